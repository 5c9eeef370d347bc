"""A convenience layer in the shape of Neuron's Python binding ``nrtpy``.

    model = NrtpyModel.load_from_neff("step.neff", "step", cc_enabled=True, rank_id=0, world_size=2)
    outputs = model(inputs={"x": NrtpyTensor.from_numpy(array, "x")})
    outputs["y"].numpy()

The runtime is initialised at the first load (``configure`` sets variables before that) and closed
by ``reset``. One process has one runtime.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_runtime import nrt
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.runtime import Model, TensorInfo
from neuron_runtime.tensors import NrtTensor, Placement


class NrtpyError(RuntimeError):
    """This layer was used wrongly (the runtime's own failures are NrtError)."""


def _ensure_init() -> None:
    try:
        nrt.current()
    except NrtError:
        nrt.nrt_init()


def configure(**variables: str) -> None:
    """Set ``NEURON_RT_*`` variables, e.g. ``configure(NEURON_RT_VISIBLE_CORES="0")``.

    Raises:
        NrtpyError: the runtime is already initialised, or a name is no NEURON_ variable.
    """
    try:
        nrt.current()
    except NrtError:
        for name in variables:
            if not name.startswith("NEURON_"):
                raise NrtpyError(f"{name} is no NEURON_ variable") from None
        os.environ.update(variables)
        return
    raise NrtpyError("configure() must come before the first load; call reset() first")


def reset() -> None:
    """Close the runtime; models and device tensors become invalid."""
    nrt.nrt_close()


class NrtpyTensor:
    """A tensor in device memory with a type and a shape."""

    def __init__(self, handle: NrtTensor, array: NDArray[Any]) -> None:
        self.handle = handle
        self._array = array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any, name: str = "", core_id: int = 0) -> Any:
        """A zeroed tensor.

        Raises:
            NrtError: NRT_RESOURCE when device memory is exhausted.
        """
        _ensure_init()
        kind = np.dtype(dtype)
        nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        handle = nrt.nrt_tensor_allocate(Placement.DEVICE, core_id, nbytes, name)
        return cls(handle, handle.array(kind, shape))

    @classmethod
    def from_numpy(cls, array: NDArray[Any], name: str = "", core_id: int = 0) -> Any:
        """A copy of ``array`` in the memory of core ``core_id``.

        Raises:
            NrtError: NRT_RESOURCE when device memory is exhausted.
        """
        tensor = cls.empty(array.shape, array.dtype, name, core_id)
        tensor.write(array)
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type."""
        return self._array.dtype

    @property
    def view(self) -> NDArray[Any]:
        """The device memory itself, not a copy."""
        self.handle.memory  # noqa: B018 - raises if the tensor was freed
        return self._array

    def write(self, array: NDArray[Any]) -> None:
        """Replace the contents.

        Raises:
            NrtpyError: another shape or type.
        """
        if (array.shape, array.dtype) != (self.shape, self.dtype):
            raise NrtpyError(
                f"tensor {self.handle.name!r} is {self.dtype}{list(self.shape)}, "
                f"not {array.dtype}{list(array.shape)}"
            )
        np.copyto(self.view, array)

    def numpy(self) -> NDArray[Any]:
        """A copy of the contents."""
        return self.view.copy()

    def free(self) -> None:
        """Give the memory back."""
        nrt.nrt_tensor_free(self.handle)


@dataclass(frozen=True)
class BenchmarkResult:
    """Times of single executions in milliseconds."""

    mean_ms: float
    min_ms: float
    max_ms: float
    std_ms: float


class NrtpyModel:
    """A loaded NEFF that is called like a function."""

    def __init__(self, model: Model, name: str, vnc: int) -> None:
        self.model = model
        self.name = name
        self._vnc = vnc

    @classmethod
    def load_from_neff(
        cls,
        path: str | Path,
        name: str,
        core_id: int = 0,
        cc_enabled: bool = False,
        rank_id: int = 0,
        world_size: int = 1,
    ) -> NrtpyModel:
        """Load a NEFF file on core ``core_id`` of this process.

        Args:
            cc_enabled: the program has collectives; every rank must load it.

        Raises:
            NrtError: what nrt_load or nrt_load_collectives refuses.
        """
        _ensure_init()
        if cc_enabled:
            model = nrt.nrt_load_collectives(path, core_id, -1, rank_id, world_size)
        else:
            model = nrt.nrt_load(path, core_id)
        return cls(model, name, core_id)

    @property
    def input_tensors_info(self) -> list[TensorInfo]:
        """Inputs in the NEFF's order."""
        infos = nrt.nrt_get_model_tensor_info(self.model)
        return [info for info in infos if info.usage == "INPUT"]

    @property
    def output_tensors_info(self) -> list[TensorInfo]:
        """Outputs in the NEFF's order."""
        infos = nrt.nrt_get_model_tensor_info(self.model)
        return [info for info in infos if info.usage == "OUTPUT"]

    def allocate_outputs(self) -> dict[str, NrtpyTensor]:
        """Fresh tensors for every output."""
        kinds = {t.name: t.numpy_dtype for t in self.model.neff.manifest.outputs}
        return {
            info.name: NrtpyTensor.empty(info.shape, kinds[info.name], info.name, self._vnc)
            for info in self.output_tensors_info
        }

    def __call__(
        self,
        inputs: Mapping[str, NrtpyTensor],
        outputs: Mapping[str, NrtpyTensor] | None = None,
        save_trace: bool = False,
        ntff_name: str | None = None,
    ) -> dict[str, NrtpyTensor]:
        """Run once. Without ``outputs``, fresh tensors are made for them.

        Raises:
            NrtpyError: a trace is asked for: this runtime records none.
            NrtError: what nrt_execute raises; NRT_EXEC_BAD_INPUT for another shape or type.
        """
        if save_trace or ntff_name is not None:
            raise NrtpyError("this runtime records no traces (save_trace, ntff_name)")
        results = self.allocate_outputs() if outputs is None else dict(outputs)
        self._check(self.input_tensors_info, inputs)
        self._check(self.output_tensors_info, results)
        sets = []
        for given in (inputs, results):
            tensor_set = nrt.nrt_allocate_tensor_set()
            for name, tensor in given.items():
                nrt.nrt_add_tensor_to_tensor_set(tensor_set, name, tensor.handle)
            sets.append(tensor_set)
        nrt.nrt_execute(self.model, sets[0], sets[1])
        return results

    @staticmethod
    def _check(wanted: list[TensorInfo], given: Mapping[str, NrtpyTensor]) -> None:
        for info in wanted:
            tensor = given.get(info.name)
            if tensor is None:
                continue  # nrt_execute names it
            if (tensor.shape, tensor.dtype.name) != (info.shape, info.dtype):
                raise NrtError(
                    NRT_STATUS.NRT_EXEC_BAD_INPUT,
                    f"{info.usage.lower()} {info.name!r} is {tensor.dtype}{list(tensor.shape)}, "
                    f"the model takes {info.dtype}{list(info.shape)}",
                )

    def benchmark(
        self,
        inputs: Mapping[str, NrtpyTensor],
        warmup_iter: int = 5,
        benchmark_iter: int = 5,
    ) -> BenchmarkResult:
        """Time ``benchmark_iter`` executions on the host's clock.

        Raises:
            NrtpyError: fewer than one iteration.
        """
        if benchmark_iter < 1 or warmup_iter < 0:
            raise NrtpyError("benchmark_iter must be at least 1 and warmup_iter at least 0")
        outputs = self.allocate_outputs()
        for _ in range(warmup_iter):
            self(inputs, outputs)
        times = np.empty(benchmark_iter)
        for index in range(benchmark_iter):
            start = time.perf_counter()
            self(inputs, outputs)
            times[index] = (time.perf_counter() - start) * 1000
        return BenchmarkResult(
            float(times.mean()), float(times.min()), float(times.max()), float(times.std())
        )

    def unload(self) -> None:
        """Take the model off its core."""
        nrt.nrt_unload(self.model)
