"""Device state on disk: a tree with the names the Neuron driver gives its sysfs files.

``<path>/neuronN/...`` mirrors ``/sys/devices/virtual/neuron_device/neuronN/...``; the simulator's
own files live beside it in ``<path>/control/``: ``node.json`` (what the machine is), ``lock`` (one
flock for all writers) and ``owner/`` (see corelock). A file is replaced by rename, so a reader
never sees half of one. Tools read this tree as they would read the driver's.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuron_runtime import corelock
from neuron_runtime.device import (
    HARDWARE_NAMES,
    INSTANCE_TYPES,
    MEMORY_CATEGORIES,
    OTHER_INFO_NAMES,
    STATUS_NAMES,
    Core,
    Device,
    Machine,
    build_machine,
)

FORMAT_VERSION = 1
ENV_PATH = "NEURON_DEVICE_DIR"
ENV_INSTANCE_TYPE = "NEURON_DEVICE_INSTANCE_TYPE"
STANDALONE_INSTANCE_TYPE = "trn1.32xlarge"


class DeviceDirError(Exception):
    """The device directory is missing, damaged or belongs to another machine."""


def _core_files(core: Core) -> dict[str, str]:
    files = {}
    for name in STATUS_NAMES:
        files[f"stats/status/{name}/total"] = str(core.status[name])
        files[f"stats/status/{name}/present"] = "0"
    for name in OTHER_INFO_NAMES:
        files[f"stats/other_info/{name}/total"] = str(core.other[name])
        files[f"stats/other_info/{name}/present"] = "0"
    for name in MEMORY_CATEGORIES:
        use = core.memory[name]
        base = f"stats/memory_usage/device_mem/{name}"
        files[f"{base}/total"] = str(use.total)
        files[f"{base}/present"] = str(use.present)
        files[f"{base}/peak"] = str(use.peak)
    return files


def _device_files(machine: Machine, device: Device) -> dict[str, str]:
    arch = machine.type.arch
    files = {
        "connected_devices": ", ".join(str(other) for other in device.connected),
        "core_count": str(len(device.cores)),
        "reset": "",
        "info/notify_delay": "0",
        "info/serial_number": device.serial_number,
        "info/architecture/arch_type": arch.nd_version,
        "info/architecture/device_name": arch.device_name,
        "info/architecture/instance_type": machine.type.name.split(".", 1)[0].capitalize(),
        "stats/hardware/health_status/unhealthy_components": "\n".join(device.unhealthy_components),
    }
    for name in HARDWARE_NAMES:
        files[f"stats/hardware/{name}"] = str(device.hardware[name])
    for core in device.cores:
        base = f"neuron_core{core.index}"
        files[f"{base}/info/architecture/arch_type"] = arch.nc_version
        files.update({f"{base}/{name}": text for name, text in _core_files(core).items()})
    return files


def _write_tree(root: Path, machine: Machine) -> None:
    made: set[str] = set()
    for device in machine.devices:
        base = f"{root}/neuron{device.index}"
        for name, text in _device_files(machine, device).items():
            path = f"{base}/{name}"
            folder = path.rpartition("/")[0]
            if folder not in made:
                os.makedirs(folder, exist_ok=True)
                made.add(folder)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(descriptor, f"{text}\n".encode())
            os.close(descriptor)


def create(
    path: str | Path, instance_type: str, node_name: str, seed: int, lnc: int | None = None
) -> DeviceDir:
    """Make the device directory of one node, or open the one that is there.

    The tree is written beside ``path`` and renamed, so it exists whole or not at all. Serial
    numbers follow from ``node_name`` and ``seed``.

    Raises:
        ValueError: unknown instance type or impossible ``lnc``.
        DeviceDirError: ``path`` holds another machine, or something that is no device directory.
        OSError: the directory cannot be written.
    """
    path = Path(path)
    machine = build_machine(instance_type, node_name, seed, lnc)
    if (path / "control" / "node.json").exists():
        return _open_matching(path, machine)
    if path.exists() and any(path.iterdir()):
        raise DeviceDirError(f"{path} exists and is no device directory; choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        building.chmod(0o755)
        (building / "control" / "owner").mkdir(parents=True)
        (building / "control" / "lock").touch()
        (building / "control" / "owner" / corelock.LOCK_NAME).touch()
        node = {
            "format_version": FORMAT_VERSION,
            "instance_type": instance_type,
            "instance_id": machine.instance_id,
            "node_name": node_name,
            "seed": seed,
            "lnc": machine.lnc,
        }
        (building / "control" / "node.json").write_text(json.dumps(node, indent=1) + "\n")
        _write_tree(building, machine)
        try:
            os.rename(building, path)
        except OSError:
            # Another process was first; its directory must be the same machine.
            return _open_matching(path, machine)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return DeviceDir(path)


def _open_matching(path: Path, machine: Machine) -> DeviceDir:
    found = DeviceDir(path)
    if (found.instance_type, found.lnc) != (machine.type.name, machine.lnc):
        raise DeviceDirError(
            f"{path} holds a {found.instance_type} (LNC {found.lnc}), not a {machine.type.name} "
            f"(LNC {machine.lnc}); remove it or use another path"
        )
    return found


def standalone_path(instance_type: str) -> Path:
    """Where a process outside any cluster finds its devices."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "neuron_runtime" / f"{instance_type}-{os.uname().nodename}"


def from_environment() -> DeviceDir:
    """The device directory this process is to use.

    ``NEURON_DEVICE_DIR`` names it; without, a stand-alone machine in the user's cache directory is
    used, of type ``NEURON_DEVICE_INSTANCE_TYPE`` (default trn1.32xlarge), and made if missing.

    Raises:
        DeviceDirError: no or a damaged directory.
        ValueError: unknown ``NEURON_DEVICE_INSTANCE_TYPE``.
    """
    path = os.environ.get(ENV_PATH)
    if path:
        return DeviceDir(Path(path))
    kind = os.environ.get(ENV_INSTANCE_TYPE) or STANDALONE_INSTANCE_TYPE
    return create(standalone_path(kind), kind, os.uname().nodename, 0)


class DeviceDir:
    """An existing device directory.

    Raises:
        DeviceDirError: ``path`` is none, or was written by another version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        node = self._read_node()
        self.instance_type: str = node["instance_type"]
        self.instance_id: str = node["instance_id"]
        self.node_name: str = node["node_name"]
        self.seed: int = node["seed"]
        self.lnc: int = node["lnc"]
        kind = INSTANCE_TYPES[self.instance_type]
        self.cores_per_device: int = kind.arch.physical_cores // self.lnc
        self.core_count: int = kind.devices * self.cores_per_device
        self.hbm_bytes_per_core: int = kind.arch.memory_bytes // self.cores_per_device
        self.owners = corelock.CoreLocks(self.path / "control" / "owner", self.core_count)

    def _read_node(self) -> dict[str, Any]:
        file = self.path / "control" / "node.json"
        try:
            node: dict[str, Any] = json.loads(file.read_text())
            version = node["format_version"]
            if version != FORMAT_VERSION:
                raise DeviceDirError(
                    f"{file}: format version {version}, this runtime reads {FORMAT_VERSION}"
                )
            if node["instance_type"] not in INSTANCE_TYPES:
                raise DeviceDirError(f"{file}: unknown instance type {node['instance_type']!r}")
            for name, kind in (("instance_id", str), ("node_name", str), ("seed", int)):
                if not isinstance(node[name], kind):
                    raise DeviceDirError(f"{file}: {name} must be of type {kind.__name__}")
            if node["lnc"] not in INSTANCE_TYPES[node["instance_type"]].arch.lnc_allowed:
                raise DeviceDirError(f"{file}: impossible lnc {node['lnc']!r}")
        except FileNotFoundError:
            raise DeviceDirError(f"No neuron device available: {file} does not exist") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DeviceDirError(f"{file} cannot be read: {error}") from error
        return node

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's one lock (flock, exclusive) for a short while."""
        descriptor = os.open(self.path / "control" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def core_base(self, core_id: int) -> str:
        """Relative folder of core ``core_id`` (instance-wide id)."""
        device, k = divmod(core_id, self.cores_per_device)
        return f"neuron{device}/neuron_core{k}"

    def device_present(self, device: int) -> bool:
        """Whether the device can be seen (a fault may take its folder away)."""
        return (self.path / f"neuron{device}").is_dir()

    def read(self, name: str) -> str:
        """Text of file ``name`` (relative), without the line end.

        Raises:
            DeviceDirError: no such file.
        """
        try:
            return (self.path / name).read_text().rstrip("\n")
        except OSError as error:
            raise DeviceDirError(f"{self.path / name}: {error.strerror}") from error

    def read_int(self, name: str) -> int:
        """A counter. Whatever a user wrote into it that is no number counts as 0 (= cleared)."""
        text = self.read(name).strip()
        return int(text) if text.isdecimal() else 0

    def write(self, name: str, text: str) -> None:
        """Replace file ``name`` atomically. Call with the lock held."""
        target = f"{self.path}/{name}"
        scratch = f"{target}.{os.getpid()}.tmp"
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)
        os.rename(scratch, target)

    def apply(self, added: Mapping[str, int], present: Mapping[str, int]) -> None:
        """Bring counters up to date in one locked pass.

        Args:
            added: relative file -> amount to add.
            present: relative folder of a memory category -> bytes in use now; its ``peak`` and
                ``total`` follow.
        """
        with self.locked():
            for name, amount in added.items():
                if amount:
                    self.write(name, str(self.read_int(name) + amount))
            for folder, now in present.items():
                before = self.read_int(f"{folder}/present")
                if now == before:
                    continue
                if now > before:
                    total = self.read_int(f"{folder}/total") + now - before
                    self.write(f"{folder}/total", str(total))
                self.write(f"{folder}/present", str(now))
                if now > self.read_int(f"{folder}/peak"):
                    self.write(f"{folder}/peak", str(now))

    def clear_present(self, core_id: int) -> None:
        """Forget what a former owner of the core left: its memory and ``present`` counters."""
        base = self.core_base(core_id)
        with self.locked():
            for name in MEMORY_CATEGORIES:
                file = f"{base}/stats/memory_usage/device_mem/{name}/present"
                if self.read_int(file):
                    self.write(file, "0")
            for group, names in (("status", STATUS_NAMES), ("other_info", OTHER_INFO_NAMES)):
                for name in names:
                    file = f"{base}/stats/{group}/{name}/present"
                    if self.read_int(file):
                        self.write(file, "0")

    def holders(self) -> dict[int, int]:
        """Core id -> pid of the living process that owns it."""
        return self.owners.holders()

    def machine(self) -> Machine:
        """The model with everything the tree says now. A missing device has ``present`` False."""
        machine = build_machine(self.instance_type, self.node_name, self.seed, self.lnc)
        for device in machine.devices:
            base = f"neuron{device.index}"
            device.present = self.device_present(device.index)
            if not device.present:
                continue
            for name in HARDWARE_NAMES:
                device.hardware[name] = self.read_int(f"{base}/stats/hardware/{name}")
            words = self.read(f"{base}/stats/hardware/health_status/unhealthy_components")
            device.unhealthy_components = words.split()
            for core in device.cores:
                self._read_core(f"{base}/neuron_core{core.index}", core)
        return machine

    def _read_core(self, base: str, core: Core) -> None:
        for name in STATUS_NAMES:
            core.status[name] = self.read_int(f"{base}/stats/status/{name}/total")
        for name in OTHER_INFO_NAMES:
            core.other[name] = self.read_int(f"{base}/stats/other_info/{name}/total")
        for name in MEMORY_CATEGORIES:
            use = core.memory[name]
            folder = f"{base}/stats/memory_usage/device_mem/{name}"
            use.total = self.read_int(f"{folder}/total")
            use.present = self.read_int(f"{folder}/present")
            use.peak = self.read_int(f"{folder}/peak")


def holders(path: str | Path) -> dict[int, int]:
    """Core id -> pid of the living process that owns it.

    Raises:
        DeviceDirError: ``path`` is no device directory.
    """
    return DeviceDir(path).holders()


def sweep(path: str | Path) -> list[int]:
    """Clear what dead owners left on cores nobody holds; returns those cores' ids.

    For a node agent, after a job ended abnormally.
    """
    directory = DeviceDir(path)
    swept = []
    for core_id in directory.owners.forget_dead():
        directory.clear_present(core_id)
        swept.append(core_id)
    return swept


def read_counts(path: str | Path) -> list[int]:
    """Cores of each device of the instance type by device index; 0 for one that is missing.

    Raises:
        DeviceDirError: ``path`` is no device directory.
    """
    devices = DeviceDir(path)
    count = INSTANCE_TYPES[devices.instance_type].devices
    return [devices.cores_per_device if devices.device_present(i) else 0 for i in range(count)]
