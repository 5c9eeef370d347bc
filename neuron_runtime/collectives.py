"""Collective operations over an MPI communicator.

All-reduce is in place and persistent: the request is made once (at load) on a buffer of device
memory and started at every execution, so nothing is copied. MPI has no bfloat16, float16 or float8
arithmetic here: sums of such buffers travel as float32 and are rounded once, at the end. Moves
(gather, all-to-all, permute) send raw bytes of any type.

Waiting: a short burst of tests, then naps of growing length, so that waiting ranks leave the
processor to a slower one on an oversubscribed host, Python's signal handlers keep running, and a
rank whose peer never comes ends with NRT_EXEC_HW_ERR_COLLECTIVES after the execution timeout
instead of hanging for ever.

mpi4py is imported when the first communicator is made, never at import time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.rtlog import Level, log

Groups = tuple[tuple[int, ...], ...]

#: How long a wait tests without sleeping, and the nap lengths after that. Between naps it tests
#: several times: an operation has stages, and each needs a test of ours to go on.
SPIN_S = 0.002
FIRST_NAP_S = 0.00005
LONGEST_NAP_S = 0.00025
TESTS_A_ROUND = 10
LONGEST_GAP_S = 0.1

# Types MPI can reduce as they are (NumPy kind + size).
_MPI_NUMBERS = {"f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}


def _mpi() -> Any:
    """mpi4py.MPI, initialised on first use.

    Raises:
        NrtError: NRT_FAILURE if mpi4py or its MPI library cannot be loaded.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise NrtError(
            NRT_STATUS.NRT_FAILURE,
            f"collectives need mpi4py and an MPI library (pip install mpi4py mpich): {error}",
        ) from error
    return MPI


def normal_groups(groups: Sequence[Sequence[int]], size: int) -> Groups:
    """Replica groups as tuples; no groups means one group of all ranks.

    Raises:
        NrtError: NRT_INVALID if a rank is missing, repeated or does not exist.
    """
    normal = tuple(tuple(int(rank) for rank in group) for group in groups)
    if not normal:
        return (tuple(range(size)),)
    ranks = [rank for group in normal for rank in group]
    if sorted(ranks) != list(range(size)):
        raise NrtError(
            NRT_STATUS.NRT_INVALID,
            f"replica groups {list(map(list, normal))} must name each of the {size} ranks once",
        )
    return normal


class Waiter:
    """Completes an MPI request within the execution timeout."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.sequence = 0

    def wait(self, test: Callable[[], bool], what: str) -> None:
        """Test until done.

        Raises:
            NrtError: NRT_EXEC_HW_ERR_COLLECTIVES when the timeout passes first.
        """
        self.sequence += 1
        if test():
            return
        before = time.monotonic()
        waited = 0.0
        nap = FIRST_NAP_S
        while True:
            for _ in range(TESTS_A_ROUND):
                if test():
                    return
                os.sched_yield()
            now = time.monotonic()
            # A long gap means this process was stopped (a suspended job): not its peers' fault.
            waited += min(now - before, LONGEST_GAP_S)
            before = now
            if waited > self.timeout_s:
                break
            if waited > SPIN_S:
                time.sleep(nap)
                nap = min(nap * 1.5, LONGEST_NAP_S)
        text = (
            f"suspected hang in collectives operation {self.sequence} ({what}) "
            f"after {self.timeout_s:g} s (NEURON_RT_EXEC_TIMEOUT)"
        )
        log(Level.ERROR, "TDRV", "wait_collectives", f"missing collectives status: {text}")
        raise NrtError(NRT_STATUS.NRT_EXEC_HW_ERR_COLLECTIVES, text)


class Request:
    """A persistent in-place all-reduce on one buffer."""

    def __init__(
        self, waiter: Waiter, request: Any, buf: NDArray[Any], wire: NDArray[Any] | None, what: str
    ) -> None:
        self._waiter = waiter
        self._request = request
        self._buf = buf
        self._wire = wire
        self._what = what
        self._in_flight = False

    def start(self) -> None:
        """Start the operation; the buffer must not be touched until ``wait`` returns."""
        if self._request is None:
            return
        if self._wire is not None:
            np.copyto(self._wire, self._buf, casting="unsafe")
        self._in_flight = True
        self._request.Start()

    def wait(self) -> None:
        """Finish the operation; the buffer then holds the result.

        Raises:
            NrtError: NRT_EXEC_HW_ERR_COLLECTIVES after the execution timeout.
        """
        if self._request is None:
            return
        self._waiter.wait(self._request.Test, self._what)
        self._in_flight = False
        if self._wire is not None:
            np.copyto(self._buf, self._wire, casting="unsafe")

    def free(self) -> None:
        """Give the MPI request back (not if the operation hangs: MPI still owns the buffer)."""
        if self._request is not None and not self._in_flight:
            self._request.Free()
            self._request = None


class SoloCollectives:
    """Collectives of a program with one rank: every reduction and move is a copy or nothing."""

    rank = 0
    size = 1

    def all_reduce_init(
        self, buf: NDArray[Any], op: str, groups: Sequence[Sequence[int]] = ()
    ) -> Request:
        """A request that leaves the buffer as it is."""
        normal_groups(groups, 1)
        return Request(Waiter(0.0), None, buf, None, f"all_reduce {op}")

    def all_gather(
        self, send: NDArray[Any], recv: NDArray[Any], groups: Sequence[Sequence[int]] = ()
    ) -> None:
        """Copy."""
        normal_groups(groups, 1)
        np.copyto(recv.reshape(send.shape), send)

    def reduce_scatter(
        self,
        send: NDArray[Any],
        recv: NDArray[Any],
        op: str,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        """Copy."""
        normal_groups(groups, 1)
        np.copyto(recv, send.reshape(recv.shape))

    def all_to_all(
        self, send: NDArray[Any], recv: NDArray[Any], groups: Sequence[Sequence[int]] = ()
    ) -> None:
        """Copy."""
        normal_groups(groups, 1)
        np.copyto(recv, send)

    def permute(
        self, send: NDArray[Any], recv: NDArray[Any], pairs: Sequence[tuple[int, ...]]
    ) -> None:
        """Copy if rank 0 sends to itself, else zeros."""
        recv[...] = send if (0, 0) in [tuple(pair) for pair in pairs] else 0

    def barrier(self) -> None:
        """Nobody to wait for."""


class MpiCollectives:
    """Collectives among the ranks of an MPI communicator (default: all of the job's).

    Args:
        timeout_s: how long one operation may wait for its peers.
        comm: an mpi4py communicator; it is duplicated, so the caller's messages do not mix in.

    Raises:
        NrtError: NRT_FAILURE if MPI is not available.
    """

    def __init__(self, timeout_s: float, comm: Any = None) -> None:
        self._mpi = _mpi()
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self._waiter = Waiter(timeout_s)
        self._parts: dict[Groups, Any] = {}
        self._requests: list[Request] = []
        self._ops: dict[str, Any] = {
            "add": self._mpi.SUM,
            "multiply": self._mpi.PROD,
            "maximum": self._mpi.MAX,
            "minimum": self._mpi.MIN,
            "and": self._mpi.BAND,
            "or": self._mpi.BOR,
        }

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(self._comm.Get_rank())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._comm.Get_size())

    def _part(self, groups: Sequence[Sequence[int]]) -> Any:
        """The sub-communicator of this rank's group, ranks in the group's order; cached."""
        normal = normal_groups(groups, self.size)
        if normal == (tuple(range(self.size)),):
            return self._comm
        part = self._parts.get(normal)
        if part is None:
            for colour, group in enumerate(normal):
                if self.rank in group:
                    part = self._comm.Split(colour, group.index(self.rank))
            self._parts[normal] = part
        return part

    def _operator(self, op: str) -> Any:
        try:
            return self._ops[op]
        except KeyError:
            known = ", ".join(self._ops)
            raise NrtError(
                NRT_STATUS.NRT_INVALID, f"unknown reduction {op!r}; known: {known}"
            ) from None

    @staticmethod
    def _wire_for(buf: NDArray[Any], op: str) -> NDArray[Any] | None:
        """A buffer MPI can reduce, if ``buf`` itself is none."""
        kind = buf.dtype
        if kind == np.bool_:
            if op not in ("and", "or", "maximum", "minimum"):
                raise NrtError(NRT_STATUS.NRT_INVALID, f"cannot reduce bool with {op!r}")
            return np.empty(buf.shape, np.uint8)
        if kind.str[1:] in _MPI_NUMBERS:
            return None
        if kind.itemsize <= 2:
            # float16, bfloat16, float8_*, int4: exact in float32
            return np.empty(buf.shape, np.float32)
        raise NrtError(NRT_STATUS.NRT_INVALID, f"cannot reduce arrays of type {kind}")

    def all_reduce_init(
        self, buf: NDArray[Any], op: str, groups: Sequence[Sequence[int]] = ()
    ) -> Request:
        """Make a persistent in-place reduction of ``buf`` over this rank's group.

        Every rank must make the same requests in the same order (they are collective calls).

        Raises:
            NrtError: NRT_INVALID for a type, operation or group that cannot be.
        """
        part = self._part(groups)
        operator = self._operator(op)
        if not buf.flags.c_contiguous or not buf.flags.writeable:
            raise NrtError(NRT_STATUS.NRT_INVALID, "an all_reduce buffer must be contiguous")
        what = f"all_reduce {op} of {buf.nbytes} bytes"
        if part.Get_size() == 1 or buf.size == 0:
            return Request(self._waiter, None, buf, None, what)
        wire = self._wire_for(buf, op)
        request = part.Allreduce_init(self._mpi.IN_PLACE, buf if wire is None else wire, operator)
        made = Request(self._waiter, request, buf, wire, what)
        self._requests.append(made)
        return made

    def take_requests(self) -> list[Request]:
        """The persistent requests made since the last call: the caller frees them at the end."""
        made, self._requests = self._requests, []
        return made

    def _finish(self, request: Any, what: str) -> None:
        self._waiter.wait(request.Test, what)

    @staticmethod
    def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
        if not array.flags.c_contiguous:
            raise NrtError(NRT_STATUS.NRT_INVALID, "a collective's buffers must be contiguous")
        return array.reshape(-1).view(np.uint8)

    def all_gather(
        self, send: NDArray[Any], recv: NDArray[Any], groups: Sequence[Sequence[int]] = ()
    ) -> None:
        """Put every group member's ``send`` into ``recv``, in group order, one after the other."""
        part = self._part(groups)
        self._fits(recv.nbytes, send.nbytes * part.Get_size(), "all_gather")
        request = part.Iallgather(self._raw(send), self._raw(recv))
        self._finish(request, f"all_gather of {send.nbytes} bytes")

    def reduce_scatter(
        self,
        send: NDArray[Any],
        recv: NDArray[Any],
        op: str,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        """Reduce ``send`` over the group; member i gets block i of the result in ``recv``."""
        part = self._part(groups)
        operator = self._operator(op)
        self._fits(send.nbytes, recv.nbytes * part.Get_size(), "reduce_scatter")
        wire = self._wire_for(send, op)
        source, target = send, recv
        if wire is not None:
            np.copyto(wire, send, casting="unsafe")
            source, target = wire, np.empty(recv.shape, wire.dtype)
        self._raw(source)
        request = part.Ireduce_scatter_block(source, target, operator)
        self._finish(request, f"reduce_scatter {op} of {send.nbytes} bytes")
        if wire is not None:
            np.copyto(recv, target, casting="unsafe")

    def all_to_all(
        self, send: NDArray[Any], recv: NDArray[Any], groups: Sequence[Sequence[int]] = ()
    ) -> None:
        """Block j of ``send`` goes to member j; ``recv`` gets one block of each, in order."""
        part = self._part(groups)
        self._fits(recv.nbytes, send.nbytes, "all_to_all")
        if send.nbytes % part.Get_size():
            raise NrtError(NRT_STATUS.NRT_INVALID, "all_to_all: blocks of unequal size")
        request = part.Ialltoall(self._raw(send), self._raw(recv))
        self._finish(request, f"all_to_all of {send.nbytes} bytes")

    def permute(
        self, send: NDArray[Any], recv: NDArray[Any], pairs: Sequence[tuple[int, ...]]
    ) -> None:
        """Send to the target of this rank's pair; ``recv`` is zeroed where no pair ends here."""
        self._fits(recv.nbytes, send.nbytes, "permute")
        source, target = self._raw(send), self._raw(recv)
        me, requests, received = self.rank, [], False
        for sender, receiver in pairs:
            if sender == receiver == me:
                target[:] = source
                received = True
                continue
            if receiver == me:
                requests.append(self._comm.Irecv(target, sender, tag=1))
                received = True
            if sender == me:
                requests.append(self._comm.Isend(source, receiver, tag=1))
        if not received:
            target[:] = 0
        if requests:
            everything = self._mpi.Request.Testall
            self._waiter.wait(lambda: bool(everything(requests)), f"permute of {send.nbytes} bytes")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._finish(self._comm.Ibarrier(), "barrier")

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        """Copy ``root``'s array to every rank, in place."""
        self._finish(self._comm.Ibcast(self._raw(array), root), f"broadcast of {array.nbytes}")

    @staticmethod
    def _fits(have: int, need: int, what: str) -> None:
        if have != need:
            raise NrtError(NRT_STATUS.NRT_INVALID, f"{what}: {have} bytes where {need} are needed")

    def abort(self, code: int) -> None:
        """End every rank of the job at once with exit code ``code``."""
        self._comm.Abort(code)
