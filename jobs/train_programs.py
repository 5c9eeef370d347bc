"""The two compiled programs of a training run, on one core: training step and validation.

Shows the runtime's calls in their usual order. The state (parameters and both Adam moments) lives
in device memory for the whole run: the training program updates it in place, the validation program
reads the same tensors, and nothing is copied between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_runtime import nrt
from neuron_runtime.runtime import Model
from neuron_runtime.tensors import NrtTensor, Placement, TensorSet

#: File names of the compiled programs in the run's folder.
TRAIN_NEFF = "train.neff"
EVAL_NEFF = "eval.neff"


class Programs:
    """Both programs, loaded on this rank's core (the first one the process may use).

    Args:
        folder: where the compile step put the NEFFs.
        state: initial value of every state tensor: ``parameters/...``, ``moment1/...`` and
            ``moment2/...``.

    Raises:
        NrtError: a NEFF is damaged, for another number of ranks, or does not fit.
    """

    def __init__(
        self, folder: Path, rank: int, ranks: int, state: Mapping[str, NDArray[np.float32]]
    ) -> None:
        self._train = nrt.nrt_load_collectives(folder / TRAIN_NEFF, 0, -1, rank, ranks)
        self._eval = nrt.nrt_load_collectives(folder / EVAL_NEFF, 0, -1, rank, ranks)
        self._tensors: dict[str, NrtTensor] = {}
        self._views: dict[str, NDArray[Any]] = {}
        self.names = tuple(state)
        self._train_sets = self._bind(self._train, "train")
        self._eval_sets = self._bind(self._eval, "eval")
        for name, value in state.items():
            nrt.nrt_tensor_write(self._tensors[name], value)

    def _bind(self, model: Model, prefix: str) -> tuple[TensorSet, TensorSet]:
        """Tensor sets of a model; an output that may replace an input gets the input's tensor."""
        inputs, outputs = nrt.nrt_allocate_tensor_set(), nrt.nrt_allocate_tensor_set()
        manifest = model.neff.manifest
        for info in nrt.nrt_get_model_tensor_info(model):
            if info.usage == "INPUT":
                key = info.name if "/" in info.name else f"{prefix}:{info.name}"
                target = inputs
            else:
                takes_over = manifest.aliased_input(info.name)
                key = takes_over or f"{prefix}:{info.name}"
                target = outputs
            if key not in self._tensors:
                tensor = nrt.nrt_tensor_allocate(Placement.DEVICE, 0, info.size, key)
                self._tensors[key] = tensor
                self._views[key] = nrt.nrt_tensor_get_va(tensor, info.dtype, info.shape)
            nrt.nrt_add_tensor_to_tensor_set(target, info.name, self._tensors[key])
        return inputs, outputs

    def train(self, step: int, tokens: NDArray[np.int32]) -> float:
        """One optimiser step (the first is 1); returns the global batch's loss in nats a byte.

        Raises:
            NrtError: the execution failed.
        """
        self._views["train:tokens"][...] = tokens
        self._views["train:step"][...] = step
        nrt.nrt_execute(self._train, *self._train_sets)
        return float(self._views["train:loss"][()])

    def evaluate(self, tokens: NDArray[np.int32]) -> float:
        """Sum over all ranks of the negative log likelihood of ``tokens``, in nats.

        Raises:
            NrtError: the execution failed.
        """
        self._views["eval:tokens"][...] = tokens
        nrt.nrt_execute(self._eval, *self._eval_sets)
        return float(self._views["eval:nll"][()])

    def state(self) -> dict[str, NDArray[np.float32]]:
        """The state's arrays: views of device memory, valid until the next step."""
        return {name: self._views[name] for name in self.names}
