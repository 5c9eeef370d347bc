"""Program of one rank: the calls of nrt in order, on a NEFF with an all-reduce.

Arguments: NEFF file. Every rank takes the core of its number.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from mpi4py import MPI

from neuron_runtime import nrt
from neuron_runtime.tensors import Placement


def main() -> None:
    rank, ranks = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    os.environ["NEURON_RT_VISIBLE_CORES"] = str(rank)
    nrt.nrt_init()
    model = nrt.nrt_load_collectives(sys.argv[1], 0, -1, rank, ranks)
    tensors = {
        info.name: nrt.nrt_tensor_allocate(Placement.DEVICE, 0, info.size, info.name)
        for info in nrt.nrt_get_model_tensor_info(model)
        if info.name != "new_total"
    }
    inputs, outputs = nrt.nrt_allocate_tensor_set(), nrt.nrt_allocate_tensor_set()
    nrt.nrt_add_tensor_to_tensor_set(inputs, "total", tensors["total"])
    nrt.nrt_add_tensor_to_tensor_set(inputs, "x", tensors["x"])
    # In place: the new total takes the old one's memory.
    nrt.nrt_add_tensor_to_tensor_set(outputs, "new_total", tensors["total"])
    nrt.nrt_add_tensor_to_tensor_set(outputs, "y", tensors["y"])
    nrt.nrt_tensor_write(tensors["x"], np.full(4, rank + 1, np.float32))
    nrt.nrt_execute_repeat(model, inputs, outputs, 5)
    got = np.frombuffer(nrt.nrt_tensor_read(tensors["total"]), np.float32)
    np.testing.assert_array_equal(got, np.full(4, 5 * sum(range(1, ranks + 1)), np.float32))
    logs = np.frombuffer(nrt.nrt_tensor_read(tensors["y"]), np.float32)
    np.testing.assert_allclose(logs, np.log(rank + 1), rtol=1e-6, atol=1e-7)
    nrt.nrt_barrier(0, rank, ranks)
    nrt.nrt_unload(model)
    nrt.nrt_close()
    assert not {name.split(".")[0] for name in sys.modules} & {"jax", "jaxlib"}
    os.write(1, f"rank {rank} ok\n".encode())


if __name__ == "__main__":
    main()
