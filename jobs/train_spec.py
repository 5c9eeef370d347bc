"""What is trained: model sizes, optimiser, and the parameters with their initial values.

No framework is imported here: the compile step (which needs JAX) and the ranks (which do not) share
this module.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB = 256


@dataclass(frozen=True)
class TrainSpec:
    """One training run. Equal specs (and equal text) give equal loss curves.

    ``global_batch`` sequences of ``seq_len`` bytes make one step, however many ranks share them.
    The learning rate rises linearly over ``warmup_steps`` and then falls along a half cosine to a
    tenth of ``learning_rate`` at the last of ``steps``.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    ff_width: int = 512
    seq_len: int = 128
    global_batch: int = 16
    steps: int = 300
    warmup_steps: int = 20
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 0

    def check(self, ranks: int) -> None:
        """Refuse a spec that cannot be run on ``ranks`` ranks.

        Raises:
            ValueError: saying which number is wrong.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("seed", "warmup_steps", "weight_decay") else 1
            if field.name != "learning_rate" and value < least:
                raise ValueError(f"{field.name} must be at least {least}, not {value}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, not {self.learning_rate}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        if ranks < 1 or self.global_batch % ranks:
            raise ValueError(
                f"a global batch of {self.global_batch} sequences cannot be shared evenly by "
                f"{ranks} ranks"
            )

    def as_config(self) -> dict[str, Any]:
        """The spec as a JSON object."""
        return asdict(self)

    def fingerprint(self, data_sha256: str) -> str:
        """Names this run; a checkpoint of another fingerprint must not be resumed."""
        text = json.dumps([self.as_config(), data_sha256], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def parameter_shapes(spec: TrainSpec) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape. Names sort in the order the compiled step takes them."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCAB, spec.width),
        "final_norm": (spec.width,),
        "position": (spec.seq_len, spec.width),
        "unembed": (spec.width, VOCAB),
    }
    for index in range(spec.layers):
        shapes[f"layer{index:02d}_attention_norm"] = (spec.width,)
        shapes[f"layer{index:02d}_attention_out"] = (spec.width, spec.width)
        shapes[f"layer{index:02d}_attention_qkv"] = (spec.width, 3 * spec.width)
        shapes[f"layer{index:02d}_ff_in"] = (spec.width, spec.ff_width)
        shapes[f"layer{index:02d}_ff_norm"] = (spec.width,)
        shapes[f"layer{index:02d}_ff_out"] = (spec.ff_width, spec.width)
    return dict(sorted(shapes.items()))


def initial_parameters(spec: TrainSpec) -> dict[str, NDArray[np.float32]]:
    """Fresh parameters, from the seed alone: equal on every rank and for every rank count."""
    random = np.random.Generator(np.random.Philox(key=spec.seed))
    values: dict[str, NDArray[np.float32]] = {}
    for name, shape in parameter_shapes(spec).items():
        if name.endswith("norm"):
            values[name] = np.ones(shape, np.float32)
            continue
        deviation = 0.02
        if name.endswith(("attention_qkv", "ff_in", "attention_out", "ff_out")):
            deviation = float(shape[0]) ** -0.5
        if name.endswith(("attention_out", "ff_out")):
            deviation /= (2 * spec.layers) ** 0.5
        values[name] = (random.standard_normal(shape) * deviation).astype(np.float32)
    return values
