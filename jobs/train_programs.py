"""The two compiled programs of a training run, on one core: training step and validation.

Shows the runtime's calls in their usual order. The state (parameters and both Adam moments) lives
in device memory for the whole run: the training program updates it in place, the validation program
reads the same tensors, and nothing is copied between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_runtime import nrt
from neuron_runtime.errors import NrtError
from neuron_runtime.runtime import Model
from neuron_runtime.tensors import NrtTensor, Placement, TensorSet

#: File names of the compiled programs in the run's folder.
TRAIN_NEFF = "train.neff"
EVAL_NEFF = "eval.neff"


def _load(name: str, neffs: Mapping[str, bytes], rank: int, ranks: int) -> Model:
    """Load one NEFF on the process's first core; an error names the file."""
    try:
        return nrt.nrt_load_collectives(neffs[name], 0, -1, rank, ranks)
    except NrtError as error:
        raise NrtError(
            error.status, f"{name}: {error.detail.removeprefix('<memory>: ')}"
        ) from error


class Programs:
    """Both programs, loaded on this rank's core (the first one the process may use).

    Args:
        neffs: contents of TRAIN_NEFF and EVAL_NEFF by these names.
        state: initial value of every state tensor: ``parameters/...``, ``moment1/...`` and
            ``moment2/...``.

    Raises:
        NrtError: a NEFF is damaged, for another number of ranks, or does not fit.
    """

    def __init__(
        self,
        neffs: Mapping[str, bytes],
        rank: int,
        ranks: int,
        state: Mapping[str, NDArray[np.float32]],
    ) -> None:
        self.names = tuple(sorted(state))
        parameters = [name for name in self.names if name.startswith("parameters/")]
        self._views: dict[str, NDArray[Any]] = {}
        self._tensors: dict[str, NrtTensor] = {}
        self._train = _load(TRAIN_NEFF, neffs, rank, ranks)
        self._train_sets = self._bind(
            self._train,
            inputs=[*self.names, "train:step", "train:tokens"],
            outputs=[*self.names, "train:loss"],
        )
        self._eval = _load(EVAL_NEFF, neffs, rank, ranks)
        self._eval_sets = self._bind(
            self._eval, inputs=[*parameters, "eval:tokens"], outputs=["eval:nll"]
        )
        for name, value in state.items():
            nrt.nrt_tensor_write(self._tensors[name], value)

    def _bind(
        self, model: Model, inputs: list[str], outputs: list[str]
    ) -> tuple[TensorSet, TensorSet]:
        """Tensor sets of a model, given our names of its inputs and outputs in order.

        A name that is an input and an output (donated state) gets one tensor for both.
        """
        sets = nrt.nrt_allocate_tensor_set(), nrt.nrt_allocate_tensor_set()
        infos = nrt.nrt_get_model_tensor_info(model)
        if len(infos) != len(inputs) + len(outputs):
            raise ValueError(
                f"the NEFF was compiled for another model: it has {len(infos)} inputs and outputs, "
                f"not {len(inputs) + len(outputs)}; compile again"
            )
        for info, name in zip(infos, [*inputs, *outputs], strict=True):
            if name not in self._tensors:
                tensor = nrt.nrt_tensor_allocate(Placement.DEVICE, 0, info.size, name)
                self._tensors[name] = tensor
                self._views[name] = nrt.nrt_tensor_get_va(tensor, info.dtype, info.shape)
            tensor_set = sets[0] if info.usage == "INPUT" else sets[1]
            nrt.nrt_add_tensor_to_tensor_set(tensor_set, info.name, self._tensors[name])
        return sets

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
