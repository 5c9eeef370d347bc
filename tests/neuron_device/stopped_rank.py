"""Rank 0 is stopped for longer than the timeout while it waits: that must not count as a hang."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from neuron_runtime.collectives import MpiCollectives

if __name__ == "__main__":
    world = MpiCollectives(timeout_s=1.8)
    buf = np.ones(4, np.float32)
    request = world.all_reduce_init(buf, "add")
    pid = np.array([os.getpid()], np.int64)
    world.broadcast(pid, 0)
    if world.rank == 1:
        time.sleep(0.2)  # rank 0 is in its wait by then; if not, the test only proves less
        os.kill(int(pid[0]), signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(int(pid[0]), signal.SIGCONT)
        # The peer has had the time to notice, wrongly, that two seconds have passed.
        time.sleep(0.3)
    request.start()
    request.wait()
    # One write: the pieces of two ranks may mix otherwise.
    os.write(1, f"ok {buf[0]}\n".encode())
    request.free()
