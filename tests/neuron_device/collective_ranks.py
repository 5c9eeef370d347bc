"""Program of one rank: every collective against the answer computed without MPI."""

from __future__ import annotations

import os
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from neuron_runtime.collectives import MpiCollectives
from neuron_runtime.errors import NRT_STATUS, NrtError


def value_of(rank: int, dtype: DTypeLike, count: int = 24) -> NDArray[Any]:
    """What ``rank`` contributes; differs in every place and rank."""
    return ((np.arange(count) * 3 + rank * 7) % 11 + 1).astype(dtype)


def check_all_reduce(coll: MpiCollectives) -> None:
    ranks = range(coll.size)
    for dtype in (np.float32, np.float64, np.int32, np.uint8, np.float16, ml_dtypes.bfloat16):
        for op, combine in (("add", np.add), ("maximum", np.maximum), ("minimum", np.minimum)):
            buf = np.empty(24, dtype)
            request = coll.all_reduce_init(buf, op)
            for turn in range(3):
                # The same request again and again, on new contents of the same buffer.
                buf[:] = value_of(coll.rank + turn, dtype)
                request.start()
                request.wait()
                every = np.stack([value_of(rank + turn, np.float64) for rank in ranks])
                want = combine.reduce(every, axis=0).astype(dtype)
                np.testing.assert_array_equal(buf, want, err_msg=f"{dtype} {op}")
            request.free()


def check_bf16_accumulates_in_fp32(coll: MpiCollectives) -> None:
    # 256 + 1 is not a bfloat16; adding one at a time in bfloat16 would stay at 256.
    buf = np.full(4, 256.0 if coll.rank == 0 else 1.0, ml_dtypes.bfloat16)
    request = coll.all_reduce_init(buf, "add")
    request.start()
    request.wait()
    want = np.float32(256 + coll.size - 1).astype(ml_dtypes.bfloat16)
    assert (buf == want).all(), buf


def check_groups(coll: MpiCollectives) -> None:
    half = coll.size // 2
    groups = (tuple(range(half)), tuple(range(half, coll.size)))
    mine = groups[coll.rank >= half]
    buf = value_of(coll.rank, np.float32)
    request = coll.all_reduce_init(buf, "add", groups)
    request.start()
    request.wait()
    want = sum(value_of(rank, np.float32) for rank in mine)
    np.testing.assert_array_equal(buf, want)
    # Order inside a group is the group's, not the ranks'.
    backwards = (tuple(range(coll.size))[::-1],)
    recv = np.empty(2 * coll.size, np.float32)
    coll.all_gather(np.full(2, coll.rank, np.float32), recv, backwards)
    np.testing.assert_array_equal(recv[::2], np.arange(coll.size)[::-1])


def check_moves(coll: MpiCollectives) -> None:
    size, rank = coll.size, coll.rank
    recv = np.empty(24 * size, ml_dtypes.bfloat16)
    coll.all_gather(value_of(rank, ml_dtypes.bfloat16), recv)
    want = np.concatenate([value_of(r, ml_dtypes.bfloat16) for r in range(size)])
    np.testing.assert_array_equal(recv, want)

    for dtype in (np.float32, ml_dtypes.bfloat16):
        send = value_of(rank, dtype, 6 * size)
        part = np.empty(6, dtype)
        coll.reduce_scatter(send, part, "add")
        total = sum(value_of(r, np.float64, 6 * size) for r in range(size))
        np.testing.assert_array_equal(part, total[6 * rank : 6 * rank + 6].astype(dtype))

    send = np.arange(2 * size, dtype=np.int32) + 100 * rank
    swapped = np.empty_like(send)
    coll.all_to_all(send, swapped)
    want = np.concatenate([np.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)])
    np.testing.assert_array_equal(swapped, want)

    ring = [(r, (r + 1) % size) for r in range(size)]
    out = np.empty(3, np.float32)
    coll.permute(np.full(3, rank, np.float32), out, ring)
    assert (out == (rank - 1) % size).all()
    coll.permute(np.full(3, rank + 1, np.float32), out, [(0, size - 1)])
    assert (out == (1 if rank == size - 1 else 0)).all()

    shared = value_of(rank, np.float32)
    coll.broadcast(shared, size - 1)
    np.testing.assert_array_equal(shared, value_of(size - 1, np.float32))
    coll.barrier()


def check_refusals(coll: MpiCollectives) -> None:
    for attempt, words in (
        (lambda: coll.all_reduce_init(np.empty(2, np.float32), "xor"), "unknown reduction"),
        (lambda: coll.all_reduce_init(np.empty(2, np.complex128), "add"), "cannot reduce"),
        (lambda: coll.all_reduce_init(np.empty((4, 4))[:, 1], "add"), "contiguous"),
        (lambda: coll.all_reduce_init(np.empty(2), "add", ((0, 0),)), "each of the"),
        (lambda: coll.all_gather(np.empty(2), np.empty(3)), "all_gather"),
    ):
        with pytest.raises(NrtError, match=words) as caught:
            attempt()
        assert caught.value.status is NRT_STATUS.NRT_INVALID


if __name__ == "__main__":
    world = MpiCollectives(timeout_s=60)
    assert world.size == int(sys.argv[1])
    check_all_reduce(world)
    check_bf16_accumulates_in_fp32(world)
    check_groups(world)
    check_moves(world)
    check_refusals(world)
    os.write(1, f"rank {world.rank} ok\n".encode())
