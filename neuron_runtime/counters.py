"""Counters of the cores one process owns, gathered in memory and written in batches.

An execution costs a few dictionary additions; the files of the device directory are brought up to
date at most once a second, and at load, unload and close. A killed process loses at most the last
second of its counts.
"""

from __future__ import annotations

import time

from neuron_runtime.device import STATUS_OF_CODE
from neuron_runtime.devicedir import DeviceDir
from neuron_runtime.tensors import Arena

FLUSH_INTERVAL_S = 1.0


class Counters:
    """What is not yet in the device directory, for the cores of ``arenas`` (core id -> arena)."""

    def __init__(self, directory: DeviceDir, arenas: dict[int, Arena]) -> None:
        self._directory = directory
        self._arenas = arenas
        self._added: dict[str, int] = {}
        self._base = {core_id: directory.core_base(core_id) for core_id in arenas}
        self._flushed = time.monotonic()
        self._memory_written: dict[str, int] = {}

    def _add(self, core_id: int, group: str, name: str, amount: int) -> None:
        for kind in ("total", "present"):
            file = f"{self._base[core_id]}/stats/{group}/{name}/{kind}"
            self._added[file] = self._added.get(file, 0) + amount

    def count_status(self, core_id: int, code: int) -> None:
        """Count one call that ended with NRT status ``code``."""
        self._add(core_id, "status", STATUS_OF_CODE.get(code, "generic_error"), 1)

    def count_execution(self, core_id: int, code: int, flops: int, busy_us: int) -> None:
        """Count one execution, and write to disk if the last time is long enough ago."""
        self.count_status(core_id, code)
        self._add(core_id, "other_info", "inference_count", 1)
        self._add(core_id, "other_info", "flop_count", flops)
        self._add(core_id, "other_info", "nc_time_in_use", busy_us)
        if time.monotonic() - self._flushed >= FLUSH_INTERVAL_S:
            self.flush()

    def count_load(self, core_id: int) -> None:
        """Count one loaded model."""
        self._add(core_id, "other_info", "model_load_count", 1)

    def flush(self) -> None:
        """Write everything to the device directory now.

        Raises:
            OSError: the directory cannot be written (the counts are kept for the next time).
        """
        present: dict[str, int] = {}
        for core_id, arena in self._arenas.items():
            for name, nbytes in arena.used.items():
                folder = f"{self._base[core_id]}/stats/memory_usage/device_mem/{name}"
                if self._memory_written.get(folder, 0) != nbytes:
                    present[folder] = nbytes
        self._directory.apply(self._added, present)
        self._memory_written.update(present)
        self._added.clear()
        self._flushed = time.monotonic()
