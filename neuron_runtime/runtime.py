"""The one runtime of a process: its cores, their memory, the models loaded on them.

``nrt`` is the public surface; this module holds the state behind it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_runtime import env, tensors
from neuron_runtime.backends.numpy_backend import NumpyExecutable
from neuron_runtime.corelock import CoreBusy
from neuron_runtime.counters import Counters
from neuron_runtime.device import INSTANCE_TYPES
from neuron_runtime.devicedir import DeviceDir, DeviceDirError, from_environment
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.neff import Neff
from neuron_runtime.rtlog import Level, log


def _ranges(cores: tuple[int, ...]) -> str:
    """``nc1-nc1`` or, for several, ``nc0-nc3``, as in libnrt's text."""
    return f"nc{min(cores)}-nc{max(cores)}"


def _unavailable(cores: tuple[int, ...], available: int, detail: str) -> NrtError:
    text = f"NeuronCore(s) not available - Requested:{_ranges(cores)} Available:{available}"
    log(Level.ERROR, "NRT", "nrt_allocate_neuron_cores", text)
    return NrtError(
        NRT_STATUS.NRT_RESOURCE, f"NRT:nrt_allocate_neuron_cores {text} ({detail})"
    )


def _wanted_cores(directory: DeviceDir, config: env.RuntimeConfig) -> tuple[int, ...]:
    """The cores to take: the visible ones, else the first free NUM_CORES, else all.

    Raises:
        NrtError: NRT_INVALID for cores that do not exist, NRT_RESOURCE if too few are free.
    """
    every = tuple(range(directory.core_count))
    if config.visible_cores is not None:
        missing = [core for core in config.visible_cores if core not in every]
        if missing:
            raise NrtError(
                NRT_STATUS.NRT_INVALID,
                f"NEURON_RT_VISIBLE_CORES names core {missing[0]}, but this "
                f"{directory.instance_type} has cores 0-{directory.core_count - 1}",
            )
        return config.visible_cores
    if config.num_cores == 0:
        return every
    if config.num_cores > len(every):
        raise NrtError(
            NRT_STATUS.NRT_INVALID,
            f"NEURON_RT_NUM_CORES={config.num_cores}, but this {directory.instance_type} has "
            f"{len(every)} cores",
        )
    held = directory.holders()
    free = [core for core in every if held.get(core, os.getpid()) == os.getpid()]
    if len(free) < config.num_cores:
        wanted = every[: config.num_cores]
        pids = ", ".join(str(pid) for pid in sorted(set(held.values())))
        raise _unavailable(wanted, len(free), f"held by pid {pids}")
    return tuple(free[: config.num_cores])


@dataclass
class Model:
    """A loaded model: handle of nrt_load, used by nrt_execute until nrt_unload."""

    neff: Neff
    core_id: int
    executable: NumpyExecutable
    blocks: list[tensors.Block]
    code_bytes: int
    loaded: bool = True
    executions: int = 0


class Runtime:
    """State between nrt_init and nrt_close.

    Raises:
        NrtError: a bad variable (NRT_INVALID), no device (NRT_FAILURE), cores taken (NRT_RESOURCE).
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.config = env.read(environ)
        self.pid = os.getpid()
        try:
            self.directory = from_environment()
        except (DeviceDirError, ValueError, OSError) as error:
            log(Level.ERROR, "TDRV", "tdrv_init", f"No neuron device available: {error}")
            raise NrtError(NRT_STATUS.NRT_FAILURE, str(error)) from error
        if self.config.lnc not in (None, self.directory.lnc):
            raise NrtError(
                NRT_STATUS.NRT_INVALID,
                f"NEURON_LOGICAL_NC_CONFIG={self.config.lnc}, but the devices are set to "
                f"{self.directory.lnc}",
            )
        self.cores = self._take_cores()
        self.arenas = {
            core: tensors.Arena(core, self.directory.hbm_bytes_per_core) for core in self.cores
        }
        self.counters = Counters(self.directory, self.arenas)
        self.models: list[Model] = []
        self.collectives: Any = None
        self._locks = {core: threading.Lock() for core in self.cores}

    @property
    def target(self) -> str:
        """What a NEFF must have been compiled for."""
        return INSTANCE_TYPES[self.directory.instance_type].target

    def _take_cores(self) -> tuple[int, ...]:
        owners = self.directory.owners
        with self.directory.locked():
            wanted = _wanted_cores(self.directory, self.config)
            for core in wanted:
                if not self.directory.device_present(core // self.directory.cores_per_device):
                    log(Level.ERROR, "TDRV", "tdrv_init", "No neuron device available")
                    raise NrtError(
                        NRT_STATUS.NRT_FAILURE, f"the device of core {core} is not present"
                    )
            try:
                owners.acquire(wanted)
            except CoreBusy as busy:
                held = owners.holders()
                available = sum(held.get(core, self.pid) == self.pid for core in wanted)
                raise _unavailable(wanted, available, str(busy)) from None
        for core in wanted:
            # What a killed predecessor left behind.
            self.directory.clear_present(core)
        return wanted

    def core_of(self, vnc: int) -> int:
        """Instance-wide core id of this process's core number ``vnc``; -1 means the first free one.

        Raises:
            NrtError: NRT_INVALID, no such core.
        """
        if vnc == -1:
            busy = {model.core_id for model in self.models}
            return next((core for core in self.cores if core not in busy), self.cores[0])
        if not 0 <= vnc < len(self.cores):
            raise NrtError(
                NRT_STATUS.NRT_INVALID, f"vnc {vnc}: this process has cores 0-{len(self.cores) - 1}"
            )
        return self.cores[vnc]

    def check_loadable(self, neff: Neff) -> None:
        """Refuse a NEFF made for another device.

        Raises:
            NrtError: NRT_UNSUPPORTED_NEFF_VERSION naming both targets.
        """
        if neff.manifest.target != self.target:
            raise NrtError(
                NRT_STATUS.NRT_UNSUPPORTED_NEFF_VERSION,
                f"{neff.manifest.name} was compiled for --target {neff.manifest.target}; this "
                f"instance is a {self.directory.instance_type}: compile it for {self.target}",
            )

    def load(self, neff: Neff, vnc: int, collectives: Any) -> Model:
        """Put ``neff`` on a core.

        Raises:
            NrtError: NRT_RESOURCE if its memory does not fit, or what the backend refuses.
        """
        self.check_loadable(neff)
        core = self.core_of(vnc)
        arena = self.arenas[core]
        blocks: list[tensors.Block] = []
        code_bytes = neff.manifest.code_bytes

        def allocate(nbytes: int, category: str, what: str) -> NDArray[np.uint8]:
            block = arena.allocate(nbytes, category, what)
            blocks.append(block)
            return block.memory

        arena.reserve(code_bytes, "model_code", f"model {neff.manifest.name}")
        try:
            executable = NumpyExecutable(neff, collectives, allocate)
        except BaseException:
            arena.release(code_bytes, "model_code")
            for block in blocks:
                block.free()
            raise
        model = Model(neff, core, executable, blocks, code_bytes)
        self.models.append(model)
        self.counters.count_load(core)
        self.counters.flush()
        return model

    def unload(self, model: Model) -> None:
        """Take a model off its core and give its memory back."""
        model.loaded = False
        self.models.remove(model)
        self.arenas[model.core_id].release(model.code_bytes, "model_code")
        for block in model.blocks:
            block.free()
        self.counters.flush()
