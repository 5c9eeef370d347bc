"""What an executor needs from its surroundings: collectives and device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Groups = tuple[tuple[int, ...], ...]

# Gives zero-based device memory: a writable, contiguous uint8 array of that many bytes, aligned
# to 64 bytes at least (a page for the best transfer rates).
Allocate = Callable[[int], npt.NDArray[np.uint8]]

REDUCE_OPS = ("add", "multiply", "maximum", "minimum", "and", "or")


class Request(Protocol):
    """A persistent collective operation on one buffer."""

    def start(self) -> None:
        """Begin; the buffer must not be touched until ``wait`` returns."""

    def wait(self) -> None:
        """Return when the buffer holds the result."""


class Collectives(Protocol):
    """Collective operations among the ranks of one program.

    Every rank makes the same calls in the same order. ``groups`` are disjoint lists of ranks that
    cover all ranks and have one length; a rank takes part in the group it is in, and the order of
    a group is the order of the parts. Buffers are C-contiguous. Reductions get float32, float64
    or integer buffers (the executor widens bfloat16, float16, float8 and sends bool as uint8);
    data movement gets any type, to be moved as bytes.
    """

    @property
    def rank(self) -> int:
        """This rank's number, the replica id of the program."""

    @property
    def size(self) -> int:
        """Number of ranks, the program's world size."""

    def all_reduce_init(self, buf: Array, op: str, groups: Groups) -> Request:
        """Prepare an in-place reduction of ``buf`` with one of REDUCE_OPS. Called at load."""

    def all_gather(self, send: Array, recv: Array, groups: Groups) -> None:
        """``recv[i]`` = ``send`` of the group's i-th rank; recv.shape = (n, *send.shape)."""

    def reduce_scatter(self, send: Array, recv: Array, op: str, groups: Groups) -> None:
        """``recv`` = sum over the group of ``send[i]``, i = own place; send = (n, *recv.shape)."""

    def all_to_all(self, send: Array, recv: Array, groups: Groups) -> None:
        """``recv[i]`` = ``send[own place]`` of the group's i-th rank; both (n, ...)."""

    def permute(self, send: Array, recv: Array, pairs: Groups) -> None:
        """``recv`` = ``send`` of the rank that names this one as target; zeros when none does."""
