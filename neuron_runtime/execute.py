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
from neuron_runtime.runtime import Model, Runtime
from neuron_runtime.tensors import NrtTensor


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


def _check_numbers(arrays: Mapping[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        # NaN is the only value that differs from itself; holds for ml_dtypes' floats as well.
        if array.dtype.kind in "fV" and bool((array != array).any()):
            raise NrtError(
                NRT_STATUS.NRT_EXEC_COMPLETED_WITH_NUM_ERR, f"output {name!r} contains NaN"
            )


def _run(runtime: Runtime, model: Model, inputs: Any, outputs: Any) -> None:
    try:
        with runtime.locks[model.core_id]:
            model.executable.run(inputs, outputs)
    except MemoryError as error:
        raise NrtError(
            NRT_STATUS.NRT_RESOURCE, f"the host ran out of memory in an execution: {error}"
        ) from error
    if runtime.config.report_numerical_errors:
        _check_numbers(outputs)


def execute(
    runtime: Runtime,
    model: Model,
    inputs: Mapping[str, NrtTensor],
    outputs: Mapping[str, NrtTensor],
) -> None:
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
    status, flops = NRT_STATUS.NRT_SUCCESS, 0
    try:
        into = _bind(manifest.outputs, outputs, "output")
        _run(runtime, model, _bind(manifest.inputs, inputs, "input"), into)
        flops = manifest.flops
    except NrtError as error:
        status = error.status
        log(Level.ERROR, "NRT", "nrt_infodump", f"Failure: {status.name} in nrt_execute()")
        log(Level.ERROR, "NRT", "nrt_infodump", f"model {manifest.name}: {error.detail}")
        raise
    finally:
        busy_us = (time.perf_counter_ns() - start) // 1000
        runtime.counters.count_execution(model.core_id, status, flops, busy_us)
