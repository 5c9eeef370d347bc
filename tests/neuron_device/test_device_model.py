"""The pure device model against the public instance tables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from neuron_runtime import device
from neuron_runtime.device import GIB, INSTANCE_TYPES, STATUS_NAMES, build_machine


@pytest.mark.parametrize(
    ("name", "devices", "cores", "vcpus", "host_gib", "device_gib"),
    [
        ("trn1.2xlarge", 1, 2, 8, 32, 32),
        ("trn1.32xlarge", 16, 32, 128, 512, 512),
        ("trn1n.32xlarge", 16, 32, 128, 512, 512),
        ("trn2.48xlarge", 16, 64, 192, 2048, 1536),
        ("trn2u.48xlarge", 16, 64, 192, 2048, 1536),
        ("inf2.xlarge", 1, 2, 4, 16, 32),
        ("inf2.8xlarge", 1, 2, 32, 128, 32),
        ("inf2.24xlarge", 6, 12, 96, 384, 192),
        ("inf2.48xlarge", 12, 24, 192, 768, 384),
    ],
)
def test_instance_table(
    name: str, devices: int, cores: int, vcpus: int, host_gib: int, device_gib: int
) -> None:
    kind = INSTANCE_TYPES[name]
    assert (kind.devices, kind.cores, kind.vcpus) == (devices, cores, vcpus)
    assert kind.mem_mib == host_gib * 1024
    assert kind.devices * kind.device_mem_bytes == device_gib * GIB


def test_torus_neighbours_are_in_the_drivers_order() -> None:
    kind = INSTANCE_TYPES["trn1.32xlarge"]
    assert kind.connected_devices(0) == (12, 3, 4, 1)
    assert kind.connected_devices(15) == (11, 14, 3, 12)
    with pytest.raises(ValueError, match="devices 0-15, not 16"):
        kind.connected_devices(16)


@pytest.mark.parametrize("name", list(INSTANCE_TYPES))
def test_links_go_both_ways(name: str) -> None:
    kind = INSTANCE_TYPES[name]
    for index in range(kind.devices):
        for other in kind.connected_devices(index):
            assert index in kind.connected_devices(other)


def test_logical_core_configuration() -> None:
    both = build_machine("trn2.48xlarge", "node1", 1)
    single = build_machine("trn2.48xlarge", "node1", 1, lnc=1)
    assert (both.core_count, single.core_count) == (64, 128)
    assert both.core(0).hbm_bytes == 24 * GIB
    assert single.core(0).hbm_bytes == 12 * GIB
    with pytest.raises(ValueError, match="must be 1, not 2"):
        build_machine("trn1.2xlarge", "node1", 1, lnc=2)


def test_identity_follows_from_node_and_seed() -> None:
    one, again = (build_machine("trn1.32xlarge", "node1", 7) for _ in range(2))
    other = build_machine("trn1.32xlarge", "node2", 7)
    serials = [d.serial_number for d in one.devices]
    assert serials == [d.serial_number for d in again.devices]
    assert one.instance_id == again.instance_id != other.instance_id
    assert len(set(serials) | {d.serial_number for d in other.devices}) == 32


def test_core_ids_run_over_devices() -> None:
    machine = build_machine("trn1.32xlarge", "node1", 1)
    assert machine.core(5) is machine.devices[2].cores[1]
    with pytest.raises(ValueError, match="cores are 0-31"):
        machine.core(32)


def test_execution_counters_and_memory() -> None:
    core = build_machine("trn1.2xlarge", "node1", 1).core(0)
    core.record_execution(0, 3, flops=30, busy_us=60)
    core.record_execution(1202, 1, flops=0, busy_us=5)
    core.record_execution(9999, 1, flops=0, busy_us=5)
    assert {n: core.status[n] for n in STATUS_NAMES if core.status[n]} == {
        "success": 3,
        "hw_nc_ue_error": 1,
        "generic_error": 1,
    }
    assert core.other["flop_count"] == 30
    assert core.other["inference_count"] == 5
    assert core.other["nc_time_in_use"] == 70
    core.set_memory("tensors", 4096)
    core.set_memory("tensors", 1024)
    assert core.free_bytes == core.hbm_bytes - 1024
    assert core.memory["tensors"].peak == 4096
    core.reset()
    assert core.used_bytes == 0
    assert core.memory["tensors"].peak == 4096


def test_unhealthy_components_are_the_drivers_words() -> None:
    broken = build_machine("trn1.2xlarge", "node1", 1).devices[0]
    broken.mark_unhealthy("hbm")
    broken.mark_unhealthy("hbm")
    assert broken.unhealthy_components == ["hbm"]
    with pytest.raises(ValueError, match="unknown device component"):
        broken.mark_unhealthy("cpu")


def test_unknown_instance_type_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"known: trn1\.2xlarge, "):
        build_machine("trn9.large", "node1", 1)


def test_model_is_pure() -> None:
    tree = ast.parse(Path(device.__file__).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"__future__", "hashlib", "dataclasses", "enum"}
