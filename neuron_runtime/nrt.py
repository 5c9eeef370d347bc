"""The Neuron Runtime's calls, with their real names and order.

``nrt_init`` -> ``nrt_load`` or ``nrt_load_collectives`` -> ``nrt_get_model_tensor_info`` ->
``nrt_allocate_tensor_set``, ``nrt_tensor_allocate``, ``nrt_add_tensor_to_tensor_set`` ->
``nrt_tensor_write`` -> ``nrt_execute`` -> ``nrt_tensor_read`` -> ``nrt_unload`` ->
``nrt_tensor_free``, ``nrt_destroy_tensor_set`` -> ``nrt_close``.

Where C returns a status and fills a pointer, these return the value and raise NrtError with that
status. One process has one runtime. Every call before nrt_init is NRT_UNINITIALIZED (13), after
nrt_close NRT_CLOSED (14).
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from neuron_runtime import tensors
from neuron_runtime.device import INSTANCE_TYPES
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.execute import execute
from neuron_runtime.rtlog import Level, log
from neuron_runtime.runtime import Model, Runtime, TensorInfo, tensor_infos
from neuron_runtime.tensors import NrtTensor, Placement, TensorSet

VERSION = (2, 0, 0, 0)


class Framework(IntEnum):
    """nrt_framework_type_t."""

    INVALID = 0
    NO_FW = 1
    TENSORFLOW = 2
    PYTORCH = 3
    MXNET = 4
    PRECHECK = 5


_runtime: Runtime | None = None
_closed = False


def current() -> Runtime:
    """The process's runtime.

    Raises:
        NrtError: NRT_UNINITIALIZED before nrt_init, NRT_CLOSED after nrt_close.
    """
    if _runtime is not None:
        return _runtime
    if _closed:
        raise NrtError(NRT_STATUS.NRT_CLOSED, "the runtime was closed (nrt_close)")
    raise NrtError(NRT_STATUS.NRT_UNINITIALIZED, "call nrt_init first")


def nrt_init(
    framework: Framework | int = Framework.NO_FW, fw_version: str = "", fal_version: str = ""
) -> None:
    """Read the environment and take this process's cores, until nrt_close or its death.

    Raises:
        NrtError: NRT_INVALID for a bad framework or variable, or if already initialised;
            NRT_FAILURE without a device; NRT_RESOURCE if another process holds a wanted core.
    """
    global _runtime, _closed
    if framework not in list(Framework) or framework == Framework.INVALID:
        raise NrtError(NRT_STATUS.NRT_INVALID, f"unknown framework type {int(framework)}")
    if _runtime is not None:
        raise NrtError(NRT_STATUS.NRT_INVALID, "the runtime is already initialised")
    _runtime = Runtime(os.environ)
    _closed = False
    log(
        Level.INFO,
        "NRT",
        "nrt_init",
        f"{_runtime.directory.instance_type}, cores {list(_runtime.cores)}, framework "
        f"{Framework(framework).name} {fw_version} {fal_version}".rstrip(),
    )


def nrt_close() -> None:
    """Unload every model, free the cores. Does nothing without a runtime, as in C."""
    global _runtime, _closed
    if _runtime is None:
        return
    runtime, _runtime, _closed = _runtime, None, True
    runtime.close()


def nrt_load(neff: bytes | str | Path, vnc: int = -1, vnc_count: int = -1) -> Model:
    """Load a NEFF (its bytes, or its path) on core ``vnc`` of this process; -1: the first free.

    Raises:
        NrtError: NRT_INVALID for a damaged NEFF, one with collectives among several ranks, or a bad
            core; NRT_UNSUPPORTED_NEFF_VERSION; NRT_LOAD_NOT_ENOUGH_NC; NRT_RESOURCE.
    """
    runtime = current()
    _check_vnc_count(vnc_count)
    return runtime.load(runtime.read(neff), vnc, rank=0, world=1, collective=False)


def nrt_load_collectives(
    neff: bytes | str | Path,
    vnc: int = -1,
    vnc_count: int = -1,
    ctx_device_id: int = 0,
    ctx_device_count: int = 1,
) -> Model:
    """Load a NEFF that talks to other ranks; every rank must call this.

    Args:
        ctx_device_id: this rank.
        ctx_device_count: how many ranks there are; must be what the NEFF was compiled for.

    Raises:
        NrtError: as nrt_load; NRT_INVALID if rank or count differ from MPI's or the NEFF's.
    """
    runtime = current()
    _check_vnc_count(vnc_count)
    loaded = runtime.read(neff)
    return runtime.load(loaded, vnc, ctx_device_id, ctx_device_count, collective=True)


def _check_vnc_count(vnc_count: int) -> None:
    if vnc_count != -1:
        raise NrtError(NRT_STATUS.NRT_INVALID, "vnc_count is deprecated and must be -1")


def nrt_unload(model: Model) -> None:
    """Take a model off its core.

    Raises:
        NrtError: NRT_INVALID_HANDLE if it is not loaded.
    """
    current().unload(model)


def nrt_get_model_tensor_info(model: Model) -> list[TensorInfo]:
    """Inputs, then outputs, in the NEFF's order.

    Raises:
        NrtError: NRT_INVALID_HANDLE if the model is not loaded.
    """
    current().check_model(model)
    return tensor_infos(model.neff)


def nrt_get_model_vnc_count(model: Model) -> int:
    """Cores the model runs on in this process: one.

    Raises:
        NrtError: NRT_INVALID_HANDLE if the model is not loaded.
    """
    current().check_model(model)
    return 1


def nrt_allocate_tensor_set() -> TensorSet:
    """An empty tensor set."""
    current()
    return TensorSet()


def nrt_destroy_tensor_set(tensor_set: TensorSet) -> None:
    """Forget the set; its tensors stay until freed."""
    current()
    tensor_set.destroy()


def nrt_add_tensor_to_tensor_set(tensor_set: TensorSet, name: str, tensor: NrtTensor) -> None:
    """Put ``tensor`` into the set under ``name`` (replacing a tensor of that name).

    Raises:
        NrtError: NRT_INVALID_HANDLE for a destroyed set or freed tensor.
    """
    current()
    if tensor.freed:
        raise NrtError(NRT_STATUS.NRT_INVALID_HANDLE, f"tensor {tensor.name!r} was freed")
    tensor_set.add(name, tensor)


def nrt_get_tensor_from_tensor_set(tensor_set: TensorSet, name: str) -> NrtTensor:
    """The tensor called ``name``.

    Raises:
        NrtError: NRT_INVALID, no such tensor.
    """
    current()
    try:
        return tensor_set.tensors[name]
    except KeyError:
        raise NrtError(NRT_STATUS.NRT_INVALID, f"no tensor {name!r} in the set") from None


def nrt_tensor_allocate(placement: Placement, vnc: int, size: int, name: str = "") -> NrtTensor:
    """``size`` zero bytes on core ``vnc`` (DEVICE) or on the host.

    Raises:
        NrtError: NRT_INVALID for a bad core or size, NRT_RESOURCE when device memory is exhausted.
    """
    runtime = current()
    arena = None
    if placement is Placement.DEVICE:
        arena = runtime.arenas[runtime.core_of(vnc)]
    tensor = tensors.allocate(arena, Placement(placement), size, name)
    runtime.track(tensor)
    return tensor


def nrt_tensor_allocate_empty(name: str = "") -> NrtTensor:
    """A tensor without memory, for nrt_tensor_attach_buffer."""
    current()
    return NrtTensor(name, Placement.HOST, 0, None)


def nrt_tensor_attach_buffer(tensor: NrtTensor, buffer: NDArray[Any]) -> None:
    """Let the tensor use the caller's contiguous array; nothing is copied.

    Raises:
        NrtError: NRT_INVALID if the array is not contiguous and writable.
    """
    current()
    if not (buffer.flags.c_contiguous and buffer.flags.writeable):
        raise NrtError(NRT_STATUS.NRT_INVALID, "the buffer must be contiguous and writable")
    tensor.attach(buffer.reshape(-1).view(np.uint8))


def nrt_tensor_allocate_slice(
    source: NrtTensor, offset: int, size: int, name: str = ""
) -> NrtTensor:
    """A tensor that is ``size`` bytes of ``source`` from ``offset`` on; shares its memory.

    Raises:
        NrtError: NRT_INVALID if it would not lie inside ``source``.
    """
    current()
    memory = source.memory
    _check_range(source, offset, size)
    part = memory[offset : offset + size]
    return NrtTensor(name, source.placement, size, part, parent=source)


def nrt_tensor_free(tensor: NrtTensor) -> None:
    """Give the tensor's memory back.

    Raises:
        NrtError: NRT_INVALID_HANDLE if that was done before.
    """
    current()
    if tensor.freed:
        raise NrtError(NRT_STATUS.NRT_INVALID_HANDLE, f"tensor {tensor.name!r} was freed before")
    tensor.free()


def _check_range(tensor: NrtTensor, offset: int, size: int) -> None:
    if offset < 0 or size < 0 or offset + size > tensor.memory.nbytes:
        raise NrtError(
            NRT_STATUS.NRT_INVALID,
            f"bytes {offset}..{offset + size} lie outside tensor {tensor.name!r} of "
            f"{tensor.memory.nbytes} bytes",
        )


def nrt_tensor_write(tensor: NrtTensor, data: bytes | NDArray[Any], offset: int = 0) -> None:
    """Copy ``data`` into the tensor from byte ``offset`` on.

    Raises:
        NrtError: NRT_INVALID if it does not fit.
    """
    current()
    source = (
        np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if isinstance(data, np.ndarray)
        else np.frombuffer(data, np.uint8)
    )
    _check_range(tensor, offset, source.nbytes)
    tensor.memory[offset : offset + source.nbytes] = source


def nrt_tensor_read(tensor: NrtTensor, offset: int = 0, size: int | None = None) -> bytes:
    """Copy of ``size`` bytes (all that follow, if None) from byte ``offset`` on.

    Raises:
        NrtError: NRT_INVALID if they do not lie inside the tensor.
    """
    current()
    count = tensor.memory.nbytes - offset if size is None else size
    _check_range(tensor, offset, count)
    return tensor.memory[offset : offset + count].tobytes()


def nrt_tensor_copy(
    source: NrtTensor, source_offset: int, target: NrtTensor, target_offset: int, size: int
) -> None:
    """Copy bytes between tensors.

    Raises:
        NrtError: NRT_INVALID if a range lies outside its tensor.
    """
    current()
    _check_range(source, source_offset, size)
    _check_range(target, target_offset, size)
    part = source.memory[source_offset : source_offset + size]
    target.memory[target_offset : target_offset + size] = part


def nrt_tensor_memset(tensor: NrtTensor, offset: int, value: int, size: int) -> None:
    """Set ``size`` bytes to ``value``.

    Raises:
        NrtError: NRT_INVALID if they do not lie inside the tensor.
    """
    current()
    _check_range(tensor, offset, size)
    tensor.memory[offset : offset + size] = value & 0xFF


def nrt_tensor_get_size(tensor: NrtTensor) -> int:
    """Size in bytes."""
    current()
    return tensor.size


def nrt_tensor_get_va(
    tensor: NrtTensor, dtype: DTypeLike = np.uint8, shape: tuple[int, ...] | None = None
) -> NDArray[Any]:
    """The tensor's memory itself as an array (C hands out the address); no copy.

    Raises:
        NrtError: NRT_INVALID if the tensor is smaller than ``shape`` asks.
    """
    current()
    kind = np.dtype(dtype)
    return tensor.array(kind, (tensor.size // kind.itemsize,) if shape is None else shape)


def nrt_execute(model: Model, inputs: TensorSet, outputs: TensorSet) -> None:
    """Run the model once. Outputs are written where the tensors of ``outputs`` are.

    Raises:
        NrtError: NRT_INVALID_HANDLE, NRT_EXEC_BAD_INPUT for a missing tensor or one of another
            size, NRT_EXEC_COMPLETED_WITH_NUM_ERR, NRT_EXEC_HW_ERR_COLLECTIVES, and what the
            program itself runs into.
    """
    execute(current(), model, inputs, outputs)


def nrt_execute_repeat(
    model: Model, inputs: TensorSet, outputs: TensorSet, repeat_count: int
) -> None:
    """Run the model ``repeat_count`` times on the same inputs.

    Raises:
        NrtError: as nrt_execute; NRT_INVALID for a count below 1.
    """
    if repeat_count < 1:
        raise NrtError(NRT_STATUS.NRT_INVALID, f"repeat_count must be >= 1, not {repeat_count}")
    for _ in range(repeat_count):
        nrt_execute(model, inputs, outputs)


def nrt_get_total_vnc_count() -> int:
    """Logical cores of the instance."""
    return current().directory.core_count


def nrt_get_visible_vnc_count() -> int:
    """Logical cores of this process."""
    return len(current().cores)


nrt_get_total_nc_count = nrt_get_total_vnc_count
nrt_get_visible_nc_count = nrt_get_visible_vnc_count


def nrt_get_vnc_memory_stats(vnc: int) -> dict[str, int]:
    """``bytes_used`` and ``bytes_limit`` of core ``vnc``.

    Raises:
        NrtError: NRT_INVALID, no such core.
    """
    runtime = current()
    arena = runtime.arenas[runtime.core_of(vnc)]
    return {"bytes_used": arena.used_bytes, "bytes_limit": arena.capacity_bytes}


def nrt_get_instance_info() -> dict[str, int]:
    """``family`` (nrt.h's number) and ``size`` (devices)."""
    kind = INSTANCE_TYPES[current().directory.instance_type]
    return {"family": int(kind.family), "size": kind.devices}


def nrt_build_global_comm(vnc: int, g_device_id: int, g_device_count: int) -> None:
    """Join the other ranks now instead of at nrt_load_collectives.

    Raises:
        NrtError: NRT_INVALID if rank or count differ from MPI's.
    """
    runtime = current()
    runtime.core_of(vnc)
    runtime.join(g_device_id, g_device_count)


def nrt_barrier(vnc: int, g_device_id: int, g_device_count: int) -> None:
    """Wait until every rank is here.

    Raises:
        NrtError: NRT_INVALID, NRT_EXEC_HW_ERR_COLLECTIVES after the execution timeout.
    """
    runtime = current()
    runtime.core_of(vnc)
    runtime.join(g_device_id, g_device_count).barrier()


def nrt_get_version() -> tuple[int, int, int, int]:
    """Version of this runtime: major, minor, patch, maintenance."""
    return VERSION


def nrt_get_status_as_str(status: NRT_STATUS | int) -> str:
    """Name of a status code; ``NRT_UNKNOWN`` for any other number."""
    try:
        return NRT_STATUS(status).name
    except ValueError:
        return "NRT_UNKNOWN"
