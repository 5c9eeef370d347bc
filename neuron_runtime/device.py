"""Pure model of Neuron devices: instance types, topology, cores, memory, counters, error state.

No I/O, no clock, no randomness: everything that changes comes in as an argument, so the same model
serves the runtime, the device directory on disk and simulations.

Figures: AWS's public instance and architecture tables (whole-instance, dense TFLOPS; memory
bandwidth in GB/s; link bandwidth in GB/s per device; EFA in Gbit/s).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

GIB = 1024**3

#: Execution outcomes counted per core, with the driver's names (``stats/status/<name>``).
STATUS_NAMES: tuple[str, ...] = (
    "success",
    "failure",
    "timeout",
    "exec_bad_input",
    "hw_error",
    "execute_completed_with_error",
    "execute_completed_with_num_error",
    "generic_error",
    "resource_error",
    "resource_nc_error",
    "execute_failed_to_queue",
    "invalid_error",
    "unsupported_neff_version",
    "oob_error",
    "hw_collectives_error",
    "hw_hbm_ue_error",
    "hw_nc_ue_error",
    "hw_dma_abort_error",
    "hw_repairable_hbm_ue_error",
    "execute_sw_nq_overflow",
    "execute_sw_semaphore_error",
    "execute_sw_event_error",
    "execute_sw_psum_collision",
    "execute_sw_sequencer_fatal",
)

#: NRT status code -> name of the counter it increments; every other code is ``generic_error``.
STATUS_OF_CODE: dict[int, str] = {
    0: "success",
    1: "failure",
    2: "invalid_error",
    4: "resource_error",
    5: "timeout",
    6: "hw_error",
    7: "execute_failed_to_queue",
    9: "resource_nc_error",
    10: "unsupported_neff_version",
    1002: "exec_bad_input",
    1003: "execute_completed_with_num_error",
    1004: "execute_completed_with_error",
    1006: "oob_error",
    1200: "hw_collectives_error",
    1201: "hw_hbm_ue_error",
    1202: "hw_nc_ue_error",
    1203: "hw_dma_abort_error",
    1204: "execute_sw_nq_overflow",
    1205: "hw_repairable_hbm_ue_error",
}

#: Device memory categories, as in ``stats/memory_usage/device_mem`` and neuron-monitor.
MEMORY_CATEGORIES: tuple[str, ...] = (
    "constants",
    "model_code",
    "model_shared_scratchpad",
    "runtime_memory",
    "tensors",
)

#: Per-core counters of ``stats/other_info``.
OTHER_INFO_NAMES: tuple[str, ...] = (
    "flop_count",
    "inference_count",
    "model_load_count",
    "reset_req_count",
    "reset_fail_count",
    "nc_time_in_use",
)

#: Per-device counters of ``stats/hardware``.
HARDWARE_NAMES: tuple[str, ...] = (
    "mem_ecc_corrected",
    "mem_ecc_uncorrected",
    "mem_ecc_repairable_uncorrected",
    "sram_ecc_corrected",
    "sram_ecc_uncorrected",
)

#: Words the driver uses in ``stats/hardware/health_status/unhealthy_components``.
UNHEALTHY_COMPONENTS: tuple[str, ...] = (
    "hbm",
    "sram",
    "firmware_service_api",
    "firmware_service_processor",
    "link_intraserver",
    "link_host",
    "link_efa",
    "link_interserver",
    "link_switch",
    "axi_fabric",
)


class InstanceFamily(IntEnum):
    """Instance family numbers of nrt.h."""

    INF1 = 1
    TRN1 = 2
    TRN1N = 3
    INF2 = 4
    TRN2 = 5
    TRN2N = 6
    INF2E = 7
    TRN2P = 8
    TRN2U = 9


class Topology(StrEnum):
    """How the devices of one instance are joined by NeuronLink."""

    NONE = "none"
    RING = "ring"
    TORUS_2D = "torus2d"


@dataclass(frozen=True)
class Architecture:
    """One device generation. ``tflops`` are dense, per device."""

    device_name: str
    nd_version: str
    nc_version: str
    physical_cores: int
    memory_bytes: int
    lnc_allowed: tuple[int, ...]
    lnc_default: int
    tflops_bf16: float
    tflops_fp8: float
    tflops_fp32: float
    memory_gb_per_s: float
    sbuf_bytes: int
    psum_bytes: int
    reset_wait_s: int


TRAINIUM1 = Architecture(
    device_name="Trainium1",
    nd_version="NDv2",
    nc_version="NCv2",
    physical_cores=2,
    memory_bytes=32 * GIB,
    lnc_allowed=(1,),
    lnc_default=1,
    tflops_bf16=190.0,
    tflops_fp8=190.0,
    tflops_fp32=47.5,
    memory_gb_per_s=820.0,
    sbuf_bytes=24 * 1024**2,
    psum_bytes=2 * 1024**2,
    reset_wait_s=120,
)
INFERENTIA2 = Architecture(
    device_name="Inferentia2",
    nd_version="NDv3",
    nc_version="NCv2",
    physical_cores=2,
    memory_bytes=32 * GIB,
    lnc_allowed=(1,),
    lnc_default=1,
    tflops_bf16=190.0,
    tflops_fp8=190.0,
    tflops_fp32=47.5,
    memory_gb_per_s=820.0,
    sbuf_bytes=24 * 1024**2,
    psum_bytes=2 * 1024**2,
    reset_wait_s=120,
)
TRAINIUM2 = Architecture(
    device_name="Trainium2",
    nd_version="NDv3",
    nc_version="NCv3",
    physical_cores=8,
    memory_bytes=96 * GIB,
    lnc_allowed=(1, 2),
    lnc_default=2,
    tflops_bf16=667.0,
    tflops_fp8=1299.0,
    tflops_fp32=181.0,
    memory_gb_per_s=2900.0,
    sbuf_bytes=28 * 1024**2,
    psum_bytes=2 * 1024**2,
    reset_wait_s=480,
)


@dataclass(frozen=True)
class InstanceType:
    """One EC2 instance type.

    ``efa_gbit_per_s`` is 0 and ``neuronlink_gb_per_s`` is 0.0 where the instance has none.
    """

    name: str
    family: InstanceFamily
    arch: Architecture
    devices: int
    vcpus: int
    host_gib: int
    neuronlink_gb_per_s: float
    efa_gbit_per_s: int
    topology: Topology

    @property
    def target(self) -> str:
        """The compiler's ``--target`` name for this instance: trn1, trn2 or inf2."""
        return self.name[:4]

    @property
    def mem_mib(self) -> int:
        """Host memory in MiB."""
        return self.host_gib * 1024

    @property
    def device_mem_bytes(self) -> int:
        """Device memory (HBM) of one device in bytes."""
        return self.arch.memory_bytes

    @property
    def cores_per_device(self) -> int:
        """Logical cores of one device at the default logical-core configuration."""
        return self.arch.physical_cores // self.arch.lnc_default

    @property
    def cores(self) -> int:
        """Logical cores of the instance at the default logical-core configuration."""
        return self.devices * self.cores_per_device

    def connected_devices(self, device: int) -> tuple[int, ...]:
        """Neighbours of ``device`` in the driver's order.

        On the 4x4 torus (row-major ids, both directions wrap) the order is north, west, south,
        east; so device 0 is connected to 12, 3, 4, 1. On a ring: previous, next.

        Raises:
            ValueError: no such device.
        """
        if not 0 <= device < self.devices:
            raise ValueError(f"{self.name} has devices 0-{self.devices - 1}, not {device}")
        if self.topology is Topology.TORUS_2D:
            side = 4
            row, column = divmod(device, side)
            return (
                (row - 1) % side * side + column,
                row * side + (column - 1) % side,
                (row + 1) % side * side + column,
                row * side + (column + 1) % side,
            )
        if self.topology is Topology.RING:
            return ((device - 1) % self.devices, (device + 1) % self.devices)
        return ()


def _table() -> dict[str, InstanceType]:
    fam, none, ring, torus = InstanceFamily, Topology.NONE, Topology.RING, Topology.TORUS_2D
    rows = (
        ("trn1.2xlarge", fam.TRN1, TRAINIUM1, 1, 8, 32, 0.0, 0, none),
        ("trn1.32xlarge", fam.TRN1, TRAINIUM1, 16, 128, 512, 384.0, 800, torus),
        ("trn1n.32xlarge", fam.TRN1N, TRAINIUM1, 16, 128, 512, 768.0, 1600, torus),
        ("trn2.48xlarge", fam.TRN2, TRAINIUM2, 16, 192, 2048, 1024.0, 3200, torus),
        ("trn2u.48xlarge", fam.TRN2U, TRAINIUM2, 16, 192, 2048, 1024.0, 3200, torus),
        ("inf2.xlarge", fam.INF2, INFERENTIA2, 1, 4, 16, 0.0, 0, none),
        ("inf2.8xlarge", fam.INF2, INFERENTIA2, 1, 32, 128, 0.0, 0, none),
        ("inf2.24xlarge", fam.INF2, INFERENTIA2, 6, 96, 384, 192.0, 0, ring),
        ("inf2.48xlarge", fam.INF2, INFERENTIA2, 12, 192, 768, 192.0, 0, ring),
    )
    return {row[0]: InstanceType(*row) for row in rows}


#: Every simulated instance type by its EC2 name.
INSTANCE_TYPES: dict[str, InstanceType] = _table()


def instance_type(name: str) -> InstanceType:
    """The instance type called ``name``.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    try:
        return INSTANCE_TYPES[name]
    except KeyError:
        known = ", ".join(INSTANCE_TYPES)
        raise ValueError(f"unknown instance type {name!r}; known: {known}") from None


@dataclass
class MemoryUse:
    """One memory category of one core, in bytes."""

    total: int = 0
    present: int = 0
    peak: int = 0

    def set_present(self, present: int) -> None:
        """Record that ``present`` bytes are in use now."""
        if present > self.present:
            self.total += present - self.present
        self.present = present
        self.peak = max(self.peak, present)


@dataclass
class Core:
    """One logical NeuronCore: its memory use and counters."""

    index: int
    hbm_bytes: int
    status: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUS_NAMES, 0))
    other: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OTHER_INFO_NAMES, 0))
    memory: dict[str, MemoryUse] = field(
        default_factory=lambda: {name: MemoryUse() for name in MEMORY_CATEGORIES}
    )

    @property
    def used_bytes(self) -> int:
        """Device memory in use, all categories."""
        return sum(use.present for use in self.memory.values())

    @property
    def free_bytes(self) -> int:
        """Device memory still free on this core."""
        return self.hbm_bytes - self.used_bytes

    def set_memory(self, category: str, present_bytes: int) -> None:
        """Record ``present_bytes`` in ``category`` (see ``MEMORY_CATEGORIES``)."""
        self.memory[category].set_present(present_bytes)

    def record_execution(self, code: int, count: int, flops: int, busy_us: int) -> None:
        """Count ``count`` executions that ended with NRT status ``code``.

        ``flops`` and ``busy_us`` are the sums over those executions.
        """
        self.status[STATUS_OF_CODE.get(code, "generic_error")] += count
        self.other["inference_count"] += count
        self.other["flop_count"] += flops
        self.other["nc_time_in_use"] += busy_us

    def reset(self) -> None:
        """What a reset does: memory is empty afterwards; counters stay."""
        self.other["reset_req_count"] += 1
        for use in self.memory.values():
            use.set_present(0)


@dataclass
class Device:
    """One device with its cores, ECC counters and unhealthy components."""

    index: int
    serial_number: str
    connected: tuple[int, ...]
    cores: list[Core]
    hardware: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HARDWARE_NAMES, 0))
    unhealthy_components: list[str] = field(default_factory=list)
    present: bool = True

    def mark_unhealthy(self, component: str) -> None:
        """Add ``component`` to the unhealthy ones.

        Raises:
            ValueError: not one of ``UNHEALTHY_COMPONENTS``.
        """
        if component not in UNHEALTHY_COMPONENTS:
            raise ValueError(f"unknown device component {component!r}")
        if component not in self.unhealthy_components:
            self.unhealthy_components.append(component)

    def reset(self) -> None:
        """Reset every core. Hardware damage (ECC counts, bad components) is not healed by it."""
        for core in self.cores:
            core.reset()


@dataclass
class Machine:
    """All devices of one instance."""

    type: InstanceType
    lnc: int
    instance_id: str
    devices: list[Device]

    @property
    def cores_per_device(self) -> int:
        """Logical cores of one device at this machine's logical-core configuration."""
        return self.type.arch.physical_cores // self.lnc

    @property
    def core_count(self) -> int:
        """Logical cores of the machine; core id = device x cores_per_device + k."""
        return len(self.devices) * self.cores_per_device

    def core(self, core_id: int) -> Core:
        """The core with instance-wide id ``core_id``.

        Raises:
            ValueError: no such core.
        """
        if not 0 <= core_id < self.core_count:
            raise ValueError(f"core {core_id} does not exist: cores are 0-{self.core_count - 1}")
        device, k = divmod(core_id, self.cores_per_device)
        return self.devices[device].cores[k]


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()


def build_machine(name: str, node_name: str, seed: int, lnc: int | None = None) -> Machine:
    """A fresh machine of instance type ``name``.

    Serial numbers and the instance id follow from ``node_name`` and ``seed`` alone.

    Args:
        lnc: logical-core configuration, 1 or 2; None takes the generation's default.

    Raises:
        ValueError: unknown instance type, or an lnc this generation does not have.
    """
    kind = instance_type(name)
    lnc = kind.arch.lnc_default if lnc is None else lnc
    if lnc not in kind.arch.lnc_allowed:
        allowed = " or ".join(str(value) for value in kind.arch.lnc_allowed)
        raise ValueError(f"{name}: logical core configuration must be {allowed}, not {lnc}")
    per_device = kind.arch.physical_cores // lnc
    hbm_bytes = kind.arch.memory_bytes // per_device
    devices = [
        Device(
            index=index,
            serial_number=_digest("serial", node_name, seed, index)[:16],
            connected=kind.connected_devices(index),
            cores=[Core(k, hbm_bytes) for k in range(per_device)],
        )
        for index in range(kind.devices)
    ]
    return Machine(kind, lnc, f"i-{_digest('instance', node_name, seed)[:17]}", devices)
