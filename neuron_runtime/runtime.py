"""The one runtime of a process: its cores, their memory, the models loaded on them.

``nrt`` is the public surface; this module holds the state behind it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from neuron_runtime import env, tensors
from neuron_runtime.collectives import MpiCollectives, Request, SoloCollectives
from neuron_runtime.corelock import CoreBusy
from neuron_runtime.counters import Counters
from neuron_runtime.device import INSTANCE_TYPES
from neuron_runtime.devicedir import DeviceDir, DeviceDirError, from_environment
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.neff import Neff, read_neff
from neuron_runtime.rtlog import Level, log

if TYPE_CHECKING:
    from neuron_runtime.backends.numpy_backend import NumpyExecutable


def _ranges(cores: tuple[int, ...]) -> str:
    """``nc1-nc1`` or, for several, ``nc0-nc3``, as in libnrt's text."""
    return f"nc{min(cores)}-nc{max(cores)}"


def _unavailable(cores: tuple[int, ...], available: int, detail: str) -> NrtError:
    text = f"NeuronCore(s) not available - Requested:{_ranges(cores)} Available:{available}"
    log(Level.ERROR, "NRT", "nrt_allocate_neuron_cores", text)
    return NrtError(NRT_STATUS.NRT_RESOURCE, f"NRT:nrt_allocate_neuron_cores {text} ({detail})")


def _wanted_cores(directory: DeviceDir, config: env.RuntimeConfig) -> tuple[int, ...]:
    """The cores to take: the visible ones, else the first free NUM_CORES, else all.

    Raises:
        NrtError: NRT_INVALID for cores that do not exist, NRT_RESOURCE if too few are free.
    """
    every = tuple(range(directory.core_count))
    if config.visible_cores == ():
        raise NrtError(
            NRT_STATUS.NRT_RESOURCE,
            "No neuron device available: NEURON_RT_VISIBLE_CORES is empty "
            "(a job gets cores with --gres=neuron:N or --gres=neuroncore:N)",
        )
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


@dataclass(frozen=True)
class TensorInfo:
    """One entry of nrt_get_model_tensor_info.

    ``usage`` is ``INPUT`` or ``OUTPUT``, ``size`` bytes, ``dtype`` NumPy's (or ml_dtypes') name,
    ``nrt_dtype`` its number in nrt.h (0: the header has none).
    """

    name: str
    usage: str
    size: int
    dtype: str
    nrt_dtype: int
    shape: tuple[int, ...]


#: nrt_dtype_t by NumPy name.
NRT_DTYPES = {
    "uint64": 1,
    "int8": 2,
    "uint8": 3,
    "int16": 4,
    "uint16": 5,
    "bfloat16": 6,
    "float16": 7,
    "int32": 8,
    "uint32": 9,
    "float32": 0xA,
    "int64": 0xC,
    "float8_e4m3fn": 0xE,
    "float8_e5m2": 0xF,
}


def tensor_infos(neff: Neff) -> list[TensorInfo]:
    """Inputs, then outputs, of one rank's program."""
    return [
        TensorInfo(t.name, usage, t.nbytes, t.dtype, NRT_DTYPES.get(t.dtype, 0), t.shape)
        for usage, group in (("INPUT", neff.manifest.inputs), ("OUTPUT", neff.manifest.outputs))
        for t in group
    ]


def _check_memory(arena: tensors.Arena, neff: Neff) -> None:
    """Refuse a model that cannot fit, with a table of what it needs.

    Raises:
        NrtError: NRT_RESOURCE.
    """
    hbm = neff.manifest.hbm
    parts = {
        "program": hbm.program,
        "constants": hbm.constants,
        "scratch": hbm.scratch,
    }
    need, free = sum(parts.values()), arena.capacity_bytes - arena.used_bytes
    if need > free:
        table = ", ".join(f"{name} {nbytes}" for name, nbytes in parts.items())
        raise NrtError(
            NRT_STATUS.NRT_RESOURCE,
            f"{neff.manifest.name} does not fit on nc{arena.core_id}: it needs {need} bytes "
            f"({table}), {free} of {arena.capacity_bytes} are free",
        )


@dataclass(eq=False)
class Model:
    """A loaded model: handle of nrt_load, used by nrt_execute until nrt_unload.

    ``reserved`` is the device memory counted for it, by category; ``blocks`` what its executable
    allocated, ``requests`` its persistent collectives. ``bound`` caches the arrays of the last
    execution's tensor sets.
    """

    neff: Neff
    core_id: int
    executable: NumpyExecutable
    reserved: dict[str, int]
    blocks: list[tensors.Block] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    bound: Bound | None = None


@dataclass(frozen=True)
class Bound:
    """Arrays of two tensor sets, valid while versions and the memory epoch stay what they were."""

    input_set: tensors.TensorSet
    output_set: tensors.TensorSet
    stamp: tuple[int, int, int]
    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]]


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
        self.locks = {core: threading.Lock() for core in self.cores}
        self._tensors: weakref.WeakSet[tensors.NrtTensor] = weakref.WeakSet()
        self._collectives: MpiCollectives | None = None

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

    def track(self, tensor: tensors.NrtTensor) -> None:
        """Remember a tensor, so that close can make its handle invalid."""
        self._tensors.add(tensor)

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

    def check_model(self, model: Model) -> None:
        """Refuse a handle that is not of a loaded model.

        Raises:
            NrtError: NRT_INVALID_HANDLE.
        """
        if model not in self.models:
            raise NrtError(NRT_STATUS.NRT_INVALID_HANDLE, "the model is not loaded")

    def join(self, rank: int, world: int) -> MpiCollectives:
        """Connect to the other ranks (once).

        Raises:
            NrtError: NRT_INVALID if MPI counts otherwise, NRT_FAILURE without MPI.
        """
        if self._collectives is None:
            self._collectives = MpiCollectives(self.config.exec_timeout_s)
        found = self._collectives
        if (found.rank, found.size) != (rank, world):
            raise NrtError(
                NRT_STATUS.NRT_INVALID,
                f"asked for rank {rank} of {world}, but MPI says rank {found.rank} of {found.size}",
            )
        return found

    def read(self, source: bytes | str | Path) -> Neff:
        """Read a NEFF.

        Raises:
            NrtError: NRT_INVALID if it cannot be read or is damaged, NRT_UNSUPPORTED_NEFF_VERSION.
        """
        file = Path(source) if isinstance(source, str) else source
        try:
            return read_neff(file, validate_hash=self.config.validate_hash)
        except OSError as error:
            raise NrtError(NRT_STATUS.NRT_INVALID, f"{source!s}: {error.strerror}") from error

    def _check_loadable(self, neff: Neff, world: int) -> None:
        manifest = neff.manifest
        target = INSTANCE_TYPES[self.directory.instance_type].target
        if manifest.target != target:
            raise NrtError(
                NRT_STATUS.NRT_UNSUPPORTED_NEFF_VERSION,
                f"{neff.source} was compiled for --target {manifest.target}; this instance is a "
                f"{self.directory.instance_type}: compile it with --target {target}",
            )
        if manifest.lnc_size != self.directory.lnc:
            raise NrtError(
                NRT_STATUS.NRT_INVALID,
                f"{neff.source} was compiled for logical core size {manifest.lnc_size}, the "
                f"devices are set to {self.directory.lnc}",
            )
        if manifest.requested_cores > len(self.cores):
            raise NrtError(
                NRT_STATUS.NRT_LOAD_NOT_ENOUGH_NC,
                f"{neff.source} needs {manifest.requested_cores} cores, this process has "
                f"{len(self.cores)}",
            )
        if manifest.world_size != world:
            raise NrtError(
                NRT_STATUS.NRT_INVALID,
                f"{neff.source} was compiled for {manifest.world_size} ranks and cannot be loaded "
                f"by {world}: compile it with --ranks {world}",
            )

    def _check_same_everywhere(self, neff: Neff, collectives: MpiCollectives) -> None:
        mine = np.frombuffer(neff.manifest.graph_hash.encode()[:64].ljust(64), np.uint8)
        every = np.empty((collectives.size, 64), np.uint8)
        collectives.all_gather(mine, every)
        for rank, theirs in enumerate(every):
            if not np.array_equal(theirs, mine):
                raise NrtError(
                    NRT_STATUS.NRT_INVALID,
                    f"{neff.source}: rank {rank} loads another program than rank "
                    f"{collectives.rank}",
                )

    def load(self, neff: Neff, vnc: int, rank: int, world: int, collective: bool) -> Model:
        """Put ``neff`` on a core; with ``collective``, every rank must call this.

        Raises:
            NrtError: what does not fit: see nrt.nrt_load and nrt.nrt_load_collectives.
        """
        try:
            return self._load(neff, vnc, rank, world, collective)
        except NrtError as error:
            known = 0 <= vnc < len(self.cores)
            self.counters.count_status(self.cores[vnc if known else 0], error.status)
            self.counters.flush()
            log(Level.ERROR, "NMGR", "nmgr_load", f"{neff.source}: {error.detail}")
            raise

    def _load(self, neff: Neff, vnc: int, rank: int, world: int, collective: bool) -> Model:
        # Imported with the first model: tools that only look at devices do without an executor.
        from neuron_runtime.backends.numpy_backend import NumpyExecutable

        self._check_loadable(neff, world)
        joined = self.join(rank, world) if collective and world > 1 else None
        if joined is not None:
            self._check_same_everywhere(neff, joined)
        core = self.core_of(vnc)
        arena = self.arenas[core]
        hbm = neff.manifest.hbm
        _check_memory(arena, neff)
        reserved: dict[str, int] = {}
        blocks: list[tensors.Block] = []

        def allocate(nbytes: int) -> NDArray[np.uint8]:
            # The scratch area is asked for first, then the constants.
            category = "constants" if blocks else "model_shared_scratchpad"
            block = arena.allocate(nbytes, category, f"{category} of {neff.manifest.name}")
            blocks.append(block)
            return block.memory

        try:
            arena.reserve(hbm.program, "model_code", f"the program of {neff.manifest.name}")
            reserved["model_code"] = hbm.program
            executable = NumpyExecutable(neff, joined or SoloCollectives(), allocate)
        except BaseException:
            for request in joined.take_requests() if joined else []:
                request.free()
            self._give_back(core, reserved, blocks)
            raise
        requests = joined.take_requests() if joined else []
        model = Model(neff, core, executable, reserved, blocks, requests)
        self.models.append(model)
        self.counters.count_load(core)
        self.counters.flush()
        return model

    def _give_back(self, core: int, reserved: dict[str, int], blocks: list[tensors.Block]) -> None:
        for category, nbytes in reserved.items():
            self.arenas[core].release(nbytes, category)
        for block in blocks:
            block.free()

    def unload(self, model: Model) -> None:
        """Take a model off its core and give its memory back.

        Raises:
            NrtError: NRT_INVALID_HANDLE if it is not loaded.
        """
        self.check_model(model)
        self.models.remove(model)
        for request in model.requests:
            request.free()
        self._give_back(model.core_id, model.reserved, model.blocks)
        self.counters.flush()

    def close(self) -> None:
        """Unload everything, make all handles invalid, free the cores."""
        for model in list(self.models):
            self.unload(model)
        for tensor in list(self._tensors):
            tensor.free()
        try:
            self.counters.flush()
        finally:
            self.directory.owners.release_all()
