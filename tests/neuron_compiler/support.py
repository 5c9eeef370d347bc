"""Helpers: compile text, run a program on one or several ranks in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from neuron_runtime.backends.base import Array, Groups
from neuron_runtime.backends.numpy_backend import NumpyExecutable
from neuron_runtime.compiler.emit import Options, compile_imported
from neuron_runtime.compiler.importers.stablehlo import import_stablehlo
from neuron_runtime.neff import Neff, neff_bytes, read_neff

TIMEOUT_S = 30.0
_REDUCE: dict[str, Any] = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def compile_text(text: str, **options: Any) -> Neff:
    """Compile and pass the result through the file format, as a user's program would."""
    return read_neff(neff_bytes(compile_imported(import_stablehlo(text), Options(**options))))


def function(body: str, args: str, results: str) -> str:
    """A module with one function ``main``."""
    return f"module @m {{\n  func.func public @main({args}) -> ({results}) {{\n{body}\n  }}\n}}\n"


def empty_outputs(neff: Neff) -> dict[str, Array]:
    """New output arrays, filled with a value that shows what was not written."""
    arrays = {}
    for info in neff.manifest.outputs:
        array = np.empty(info.shape, info.numpy_dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xA5
        arrays[info.name] = array
    return arrays


def run_one(neff: Neff, *arguments: Any) -> list[Array]:
    """Run a one-rank program on positional arguments."""
    infos = neff.manifest.inputs
    inputs = {
        info.name: np.ascontiguousarray(a).reshape(info.shape)
        for info, a in zip(infos, arguments, strict=True)
    }
    outputs = empty_outputs(neff)
    NumpyExecutable(neff).run(inputs, outputs)
    return list(outputs.values())


class FakeWorld:
    """Ranks as threads; every collective is a meeting of all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.calls: list[str] = []

    def meet(self, rank: int, value: Array, name: str) -> list[Array]:
        """Give a value, get everybody's (copies)."""
        self.slots[rank] = (name, value.copy())
        self.barrier.wait(TIMEOUT_S)
        seen = list(self.slots)
        self.barrier.wait(TIMEOUT_S)
        assert {n for n, _ in seen} == {name}, "ranks are in different collectives"
        if rank == 0:
            self.calls.append(name)
        return [v for _, v in seen]

    def run(self, work: Callable[[FakeLinks], Any]) -> list[Any]:
        """Run ``work`` on every rank; the first error is raised here."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            try:
                results[rank] = work(FakeLinks(self, rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=target, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if errors:
            broken = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
            raise (broken or errors)[0]
        assert not any(thread.is_alive() for thread in threads)
        return results


class FakeRequest:
    """A persistent all_reduce."""

    def __init__(self, links: FakeLinks, buf: Array, op: str, groups: Groups) -> None:
        self.links, self.buf, self.op, self.groups = links, buf, op, groups

    def start(self) -> None:
        assert self.buf.flags.c_contiguous
        assert self.buf.dtype.kind in "fiu"

    def wait(self) -> None:
        links = self.links
        parts = links.world.meet(links.rank, self.buf, f"all_reduce {self.buf.nbytes}")
        mine = links.group(self.groups)
        total = parts[mine[0]]
        for other in mine[1:]:
            total = _REDUCE[self.op](total, parts[other])
        self.buf[...] = total


class FakeLinks:
    """One rank's Collectives."""

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def group(self, groups: Groups) -> tuple[int, ...]:
        assert sorted(r for g in groups for r in g) == list(range(self.size))
        return next(g for g in groups if self.rank in g)

    def all_reduce_init(self, buf: Array, op: str, groups: Groups) -> FakeRequest:
        return FakeRequest(self, buf, op, groups)

    def all_gather(self, send: Array, recv: Array, groups: Groups) -> None:
        parts = self.world.meet(self.rank, send, "all_gather")
        for place, rank in enumerate(self.group(groups)):
            recv[place] = parts[rank]

    def reduce_scatter(self, send: Array, recv: Array, op: str, groups: Groups) -> None:
        parts = self.world.meet(self.rank, send, "reduce_scatter")
        mine = self.group(groups)
        place = mine.index(self.rank)
        total = parts[mine[0]][place]
        for other in mine[1:]:
            total = _REDUCE[op](total, parts[other][place])
        recv[...] = total

    def all_to_all(self, send: Array, recv: Array, groups: Groups) -> None:
        parts = self.world.meet(self.rank, send, "all_to_all")
        mine = self.group(groups)
        for place, rank in enumerate(mine):
            recv[place] = parts[rank][mine.index(self.rank)]

    def permute(self, send: Array, recv: Array, pairs: Groups) -> None:
        parts = self.world.meet(self.rank, send, "permute")
        recv[...] = 0
        for source, target in pairs:
            if target == self.rank:
                recv[...] = parts[source]


def shard(array: Array, neff: Neff, name: str, rank: int) -> Array:
    """The rank's part of a global array, by the manifest's partition."""
    info = neff.manifest.input(name)
    return np.ascontiguousarray(array[shard_index(info, neff, rank)]).reshape(info.shape)


def shard_index(info: Any, neff: Neff, rank: int) -> tuple[slice, ...]:
    """Index of the rank's part in the global array."""
    place: dict[str, int] = {}
    rest = rank
    for axis, size in reversed(neff.manifest.mesh):
        place[axis] = rest % size
        rest //= size
    sizes = dict(neff.manifest.mesh)
    index = []
    for whole, part, axes in zip(info.global_shape, info.shape, info.partition, strict=True):
        number = 0
        for axis in axes:
            number = number * sizes[axis] + place[axis]
        index.append(slice(number * part, number * part + part) if axes else slice(0, whole))
    return tuple(index)


def run_world(
    neff: Neff, arrays: Mapping[str, Array], steps: int = 1, feed_back: bool = False
) -> tuple[dict[str, Array], FakeWorld]:
    """Run on all ranks of the program; returns global outputs and the world.

    ``feed_back``: after each step the outputs take the place of their aliased inputs, in memory.
    """
    world = FakeWorld(neff.manifest.world_size)

    def work(links: FakeLinks) -> dict[str, Array]:
        executable = NumpyExecutable(neff, links)
        inputs = {n: shard(a, neff, n, links.rank).copy() for n, a in arrays.items()}
        outputs = empty_outputs(neff)
        if feed_back:
            for name in outputs:
                source = neff.manifest.aliased_input(name)
                if source is not None:
                    outputs[name] = inputs[source]
        for _ in range(steps):
            executable.run(inputs, outputs)
        return outputs

    parts = world.run(work)
    result = {}
    for info in neff.manifest.outputs:
        whole = np.empty(info.global_shape, info.numpy_dtype)
        for rank, outputs in enumerate(parts):
            whole[shard_index(info, neff, rank)] = outputs[info.name]
        result[info.name] = whole
    return result, world
