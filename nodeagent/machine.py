"""Facts about the machine that the agent reports."""

from __future__ import annotations

import os
import time


class Machine:
    """``boot_s``: when it booted, seconds since the epoch."""

    def __init__(self) -> None:
        self.boot_s = round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), 3)

    def now_s(self) -> float:
        """The wall clock."""
        return time.time()

    def load(self) -> float:
        """Load average over one minute."""
        return os.getloadavg()[0]

    def free_mem_mib(self) -> int:
        """Memory that programs can still get, 0 when the kernel does not say."""
        try:
            with open("/proc/meminfo", "rb") as file:
                for line in file:
                    if line.startswith(b"MemAvailable:"):
                        return int(line.split()[1]) // 1024
        except OSError:
            return 0
        return 0
