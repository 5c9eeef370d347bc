"""One execution: bind the tensors, run the program, count what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.manifest import TensorInfo
from neuron_runtime.rtlog import Level, log
from neuron_runtime.runtime import Bound, Model, Runtime
from neuron_runtime.tensors import NrtTensor, TensorSet, epoch


def _bind(
    wanted: tuple[TensorInfo, ...], given: Mapping[str, NrtTensor], what: str
) -> dict[str, NDArray[Any]]:
    """The tensors as arrays; views.

    Raises:
        NrtError: NRT_EXEC_BAD_INPUT for a missing, unknown or wrongly sized tensor.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for info in wanted:
        tensor = given.get(info.name)
        if tensor is None:
            raise NrtError(
                NRT_STATUS.NRT_EXEC_BAD_INPUT,
                f"{what} tensor {info.name!r} ({info.dtype}{list(info.shape)}) is missing",
            )
        if tensor.size != info.nbytes:
            raise NrtError(
                NRT_STATUS.NRT_EXEC_BAD_INPUT,
                f"{what} tensor {info.name!r} has {tensor.size} bytes, the model takes "
                f"{info.dtype}{list(info.shape)} = {info.nbytes} bytes",
            )
        arrays[info.name] = tensor.array(info.numpy_dtype, info.shape)
    if len(arrays) != len(given):
        unknown = next(name for name in given if name not in arrays)
        raise NrtError(NRT_STATUS.NRT_EXEC_BAD_INPUT, f"the model has no {what} tensor {unknown!r}")
    return arrays


def _check_overlap(inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
    """An output may take an input's place exactly, or lie apart from it; nothing in between.

    Raises:
        NrtError: NRT_EXEC_BAD_INPUT.
    """
    places = [(array.ctypes.data, array.nbytes, name) for name, array in inputs.items()]
    for name, array in outputs.items():
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        for place, nbytes, other in places:
            if start < place + nbytes and place < end and (start, end) != (place, place + nbytes):
                raise NrtError(
                    NRT_STATUS.NRT_EXEC_BAD_INPUT,
                    f"output tensor {name!r} overlaps a part of input {other!r}; it may take the "
                    "input's place exactly or lie apart from it",
                )


def _check_numbers(arrays: Mapping[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        # NaN is the only value that differs from itself; holds for ml_dtypes' floats as well.
        if array.dtype.kind in "fV" and bool((array != array).any()):
            raise NrtError(
                NRT_STATUS.NRT_EXEC_COMPLETED_WITH_NUM_ERR, f"output {name!r} contains NaN"
            )


def _bound(model: Model, input_set: TensorSet, output_set: TensorSet) -> Bound:
    """Both sets as arrays; checked again only if something changed since the last execution."""
    stamp = (input_set.version, output_set.version, epoch())
    last = model.bound
    if (
        last is not None
        and last.input_set is input_set
        and last.output_set is output_set
        and last.stamp == stamp
    ):
        return last
    manifest = model.neff.manifest
    inputs = _bind(manifest.inputs, input_set.tensors, "input")
    outputs = _bind(manifest.outputs, output_set.tensors, "output")
    _check_overlap(inputs, outputs)
    model.bound = Bound(input_set, output_set, stamp, inputs, outputs)
    return model.bound


def _run(runtime: Runtime, model: Model, bound: Bound) -> None:
    try:
        with runtime.locks[model.core_id]:
            model.executable.run(bound.inputs, bound.outputs)
    except MemoryError as error:
        raise NrtError(
            NRT_STATUS.NRT_RESOURCE, f"the host ran out of memory in an execution: {error}"
        ) from error
    if runtime.config.report_numerical_errors:
        _check_numbers(bound.outputs)


def execute(runtime: Runtime, model: Model, inputs: TensorSet, outputs: TensorSet) -> None:
    """Run ``model`` once.

    Raises:
        NrtError: see nrt.nrt_execute.
    """
    runtime.check_model(model)
    if runtime.pid != os.getpid():
        raise NrtError(
            NRT_STATUS.NRT_EXEC_NC_BUSY,
            f"core {model.core_id} belongs to pid {runtime.pid}; a forked child has no cores: "
            "start a new process and call nrt_init there",
        )
    manifest = model.neff.manifest
    start = time.perf_counter_ns()
    status, flops = NRT_STATUS.NRT_FAILURE, 0
    try:
        _run(runtime, model, _bound(model, inputs, outputs))
        status, flops = NRT_STATUS.NRT_SUCCESS, manifest.flops
    except NrtError as error:
        status = error.status
        log(Level.ERROR, "NRT", "nrt_infodump", f"Failure: {status.name} in nrt_execute()")
        log(Level.ERROR, "NRT", "nrt_infodump", f"model {manifest.name}: {error.detail}")
        raise
    finally:
        busy_us = (time.perf_counter_ns() - start) // 1000
        runtime.counters.count_execution(model.core_id, status, flops, busy_us)
