"""Rank 0 waits for a collective that the others never join; it must end with 1200, not hang."""

from __future__ import annotations

import signal
import sys

import numpy as np

from neuron_runtime.collectives import MpiCollectives
from neuron_runtime.errors import NRT_STATUS, NrtError

if __name__ == "__main__":
    world = MpiCollectives(timeout_s=0.3)
    request = world.all_reduce_init(np.ones(4, np.float32), "add")
    if world.rank != 0:
        signal.pause()
    request.start()
    try:
        request.wait()
    except NrtError as error:
        print(error, flush=True)
        sys.stdout.flush()
        world.abort(7 if error.status is NRT_STATUS.NRT_EXEC_HW_ERR_COLLECTIVES else 8)
