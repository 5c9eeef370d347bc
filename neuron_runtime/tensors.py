"""Device memory of one simulated core, and tensors that are views of it.

Memory comes page-aligned from anonymous mappings, so pages cost host memory only when touched, and
is counted against the core's HBM whether touched or not, as on the device. Tensors, slices and
collective buffers are views of it: nothing is copied between them.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from neuron_runtime.device import MEMORY_CATEGORIES
from neuron_runtime.errors import NRT_STATUS, NrtError

PAGE = mmap.PAGESIZE
#: From this size on a block asks for large pages.
HUGE_BYTES = 2 << 20


class _Epoch:
    """Counts the moments at which a tensor's memory changed, for caches of views."""

    value = 0


def epoch() -> int:
    """A number that differs after any tensor was freed or got another buffer."""
    return _Epoch.value


class Placement(IntEnum):
    """nrt_tensor_placement_t."""

    DEVICE = 0
    HOST = 1
    VIRTUAL = 2


def _mapped(nbytes: int) -> NDArray[np.uint8]:
    try:
        mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_BYTES:
            # An in-place all-reduce of 16 MiB between two ranks is 1.6 times faster in them.
            mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, OverflowError) as error:
        raise NrtError(
            NRT_STATUS.NRT_RESOURCE, f"the host cannot map {nbytes} bytes: {error}"
        ) from error
    return np.frombuffer(mapping, dtype=np.uint8, count=nbytes)


class Arena:
    """The HBM of one core.

    Args:
        core_id: instance-wide id, for messages.
        capacity_bytes: HBM of the core.
    """

    def __init__(self, core_id: int, capacity_bytes: int) -> None:
        self.core_id = core_id
        self.capacity_bytes = capacity_bytes
        self.used: dict[str, int] = dict.fromkeys(MEMORY_CATEGORIES, 0)

    @property
    def used_bytes(self) -> int:
        """Bytes in use, all categories."""
        return sum(self.used.values())

    def reserve(self, nbytes: int, category: str, what: str) -> None:
        """Count ``nbytes`` against the core without mapping host memory.

        Raises:
            NrtError: NRT_RESOURCE with a table of what is in use.
        """
        free = self.capacity_bytes - self.used_bytes
        if nbytes > free:
            table = ", ".join(f"{name} {size}" for name, size in self.used.items() if size)
            raise NrtError(
                NRT_STATUS.NRT_RESOURCE,
                f"device memory of nc{self.core_id} exhausted: {what} needs {nbytes} bytes, "
                f"{free} of {self.capacity_bytes} are free (in use: {table or 'nothing'})",
            )
        self.used[category] += nbytes

    def release(self, nbytes: int, category: str) -> None:
        """Give back what ``reserve`` or ``allocate`` counted."""
        self.used[category] -= nbytes

    def allocate(self, nbytes: int, category: str, what: str) -> Block:
        """A zeroed, page-aligned block of ``nbytes``; counted in whole pages.

        Raises:
            NrtError: NRT_RESOURCE, out of device memory or out of host address space.
        """
        counted = -(-max(nbytes, 1) // PAGE) * PAGE
        self.reserve(counted, category, what)
        try:
            memory = _mapped(nbytes)
        except NrtError:
            self.release(counted, category)
            raise
        return Block(self, category, counted, memory)


class Block:
    """Memory of one arena; give it back with ``free`` (views keep the host pages alive)."""

    def __init__(
        self, arena: Arena, category: str, counted_bytes: int, memory: NDArray[np.uint8]
    ) -> None:
        self.arena = arena
        self.category = category
        self.counted_bytes = counted_bytes
        self.memory = memory

    def free(self) -> None:
        """Stop counting the block. Calling it twice does nothing the second time."""
        if self.counted_bytes:
            self.arena.release(self.counted_bytes, self.category)
            self.counted_bytes = 0


class NrtTensor:
    """A tensor handle: ``size`` bytes on a core (DEVICE) or on the host (HOST, VIRTUAL).

    A tensor of ``nrt_tensor_allocate_empty`` has no memory until a buffer is attached.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        size: int,
        memory: NDArray[np.uint8] | None,
        block: Block | None = None,
        parent: NrtTensor | None = None,
    ) -> None:
        self.name = name
        self.placement = placement
        self.size = size
        self.block = block
        self.parent = parent
        self.freed = False
        self._memory = memory

    @property
    def core_id(self) -> int | None:
        """The core whose memory this is; None on the host."""
        if self.parent is not None:
            return self.parent.core_id
        return None if self.block is None else self.block.arena.core_id

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All bytes, writable, no copy.

        Raises:
            NrtError: NRT_INVALID_HANDLE if the tensor was freed, NRT_INVALID if it has no buffer.
        """
        if self.freed or (self.parent is not None and self.parent.freed):
            raise NrtError(NRT_STATUS.NRT_INVALID_HANDLE, f"tensor {self.name!r} was freed")
        if self._memory is None:
            raise NrtError(NRT_STATUS.NRT_INVALID, f"tensor {self.name!r} has no buffer attached")
        return self._memory

    def attach(self, memory: NDArray[np.uint8]) -> None:
        """Use the caller's ``memory`` (the former block, if any, is given back)."""
        _Epoch.value += 1
        if self.block is not None:
            self.block.free()
            self.block = None
        self._memory = memory
        self.size = memory.nbytes

    def array(self, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """The tensor's first bytes as an array of ``shape``; a view.

        Raises:
            NrtError: NRT_INVALID if the tensor is smaller than that.
        """
        kind = np.dtype(dtype)
        nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        memory = self.memory
        if nbytes > memory.nbytes:
            raise NrtError(
                NRT_STATUS.NRT_INVALID,
                f"tensor {self.name!r} has {memory.nbytes} bytes, {kind}{list(shape)} "
                f"needs {nbytes}",
            )
        return memory[:nbytes].view(kind).reshape(shape)

    def free(self) -> None:
        """Give the memory back; every later use is NRT_INVALID_HANDLE."""
        _Epoch.value += 1
        self.freed = True
        self._memory = None
        if self.block is not None:
            self.block.free()


def allocate(
    arena: Arena | None, placement: Placement, size: int, name: str, category: str = "tensors"
) -> NrtTensor:
    """A new tensor of ``size`` bytes, zeroed.

    Args:
        arena: the core's memory for DEVICE; ignored otherwise.

    Raises:
        NrtError: NRT_INVALID for a bad size, NRT_RESOURCE when memory is exhausted.
    """
    if size <= 0:
        raise NrtError(NRT_STATUS.NRT_INVALID, f"tensor {name!r}: size must be > 0, not {size}")
    if placement is Placement.DEVICE:
        if arena is None:
            raise NrtError(NRT_STATUS.NRT_INVALID, f"tensor {name!r}: no core given")
        block = arena.allocate(size, category, f"tensor {name!r}")
        return NrtTensor(name, placement, size, block.memory, block)
    return NrtTensor(name, placement, size, _mapped(size))


class TensorSet:
    """Tensors by name: the inputs or outputs of an execution. ``version`` counts its changes."""

    def __init__(self) -> None:
        self._tensors: dict[str, NrtTensor] | None = {}
        self.version = 0

    @property
    def tensors(self) -> dict[str, NrtTensor]:
        """Name -> tensor; not to be changed.

        Raises:
            NrtError: NRT_INVALID_HANDLE if the set was destroyed.
        """
        if self._tensors is None:
            raise NrtError(NRT_STATUS.NRT_INVALID_HANDLE, "the tensor set was destroyed")
        return self._tensors

    def add(self, name: str, tensor: NrtTensor) -> None:
        """Put a tensor into the set, replacing one of that name.

        Raises:
            NrtError: NRT_INVALID_HANDLE if the set was destroyed.
        """
        self.tensors[name] = tensor
        self.version += 1

    def destroy(self) -> None:
        """Drop the references. The tensors live on until they are freed."""
        self._tensors = None
        self.version += 1
