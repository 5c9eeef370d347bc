"""The compile step of train.py: both programs, from the compile cache or by the compiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from jobs.train_programs import EVAL_NEFF, TRAIN_NEFF
from jobs.train_spec import TrainSpec
from neuron_runtime.compiler.cache import compile_cached
from neuron_runtime.compiler.emit import Options
from neuron_runtime.device import INSTANCE_TYPES
from neuron_runtime.devicedir import DeviceDirError, from_environment
from neuron_runtime.neff import read_neff, write_atomic


def options_for_this_node() -> Options:
    """Target and logical core size of the devices here.

    Raises:
        ValueError: there are no devices.
    """
    try:
        found = from_environment()
    except DeviceDirError as error:
        raise ValueError(str(error)) from error
    return Options(INSTANCE_TYPES[found.instance_type].target, found.lnc)


def compile_into(spec: TrainSpec, ranks: int, folder: Path, say: Callable[[str], None]) -> None:
    """Put the NEFFs of a run on ``ranks`` ranks into ``folder``, telling what is being done.

    Raises:
        CompileError: the compiler refuses, or is not installed here (extra ``jax``).
        OSError: ``folder`` cannot be written.
    """
    options = options_for_this_node()
    for name, file in (("train_step", TRAIN_NEFF), ("eval_step", EVAL_NEFF)):
        start = time.monotonic()
        say(f"compiling {name} for {ranks} ranks on {options.target} ...")
        neff = compile_cached(
            f"jobs.train_model:{name}", spec.as_config(), ranks=ranks, options=options, log=say
        )
        content = neff.read_bytes()
        write_atomic(folder / file, content)
        manifest = read_neff(content).manifest
        say(
            f"compiled {name} in {time.monotonic() - start:.1f} s: "
            f"{manifest.flops / 1e9:.2f} GFLOP and {manifest.hbm.total / 2**20:.1f} MiB a rank, "
            f"{len(manifest.collectives)} collectives"
        )
