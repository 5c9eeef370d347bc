"""The device directory: its tree, counters, ownership by living processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neuron_runtime import devicedir
from neuron_runtime.corelock import CoreBusy
from neuron_runtime.devicedir import DeviceDir, DeviceDirError, create, holders, sweep

HOLD = """
import sys
from neuron_runtime.devicedir import DeviceDir
found = DeviceDir(sys.argv[1])
found.owners.acquire([int(core) for core in sys.argv[2].split(",")])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(path: Path, cores: str, job: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that owns ``cores`` until the block ends or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), cores],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SLURM_JOB_ID": job},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DeviceDir]:
    found = create(tmp_path / "node1", "trn1.2xlarge", "node1", 3)
    yield found
    found.owners.release_all()


def test_tree_has_the_drivers_names(tmp_path: Path) -> None:
    node = create(tmp_path / "n", "trn1.32xlarge", "node1", 3)
    assert node.read("neuron0/connected_devices") == "12, 3, 4, 1"
    assert node.read("neuron15/core_count") == "2"
    assert node.read("neuron0/info/architecture/arch_type") == "NDv2"
    assert node.read("neuron0/info/architecture/device_name") == "Trainium1"
    assert node.read("neuron0/info/architecture/instance_type") == "Trn1"
    assert len(node.read("neuron0/info/serial_number")) == 16
    assert node.read("neuron0/neuron_core1/info/architecture/arch_type") == "NCv2"
    assert node.read_int("neuron0/neuron_core1/stats/status/hw_nc_ue_error/total") == 0
    assert node.read_int("neuron3/stats/hardware/sram_ecc_uncorrected") == 0
    memory = "neuron0/neuron_core0/stats/memory_usage/device_mem/tensors"
    assert {file.name for file in (node.path / memory).iterdir()} == {"total", "present", "peak"}
    assert not [path for path in tmp_path.iterdir() if path.name != "n"]


def test_create_twice_opens_and_keeps_counters(node: DeviceDir) -> None:
    file = "neuron0/neuron_core0/stats/status/success/total"
    node.apply({file: 5}, {})
    again = create(node.path, "trn1.2xlarge", "node1", 3)
    assert again.read_int(file) == 5
    with pytest.raises(DeviceDirError, match=r"holds a trn1\.2xlarge"):
        create(node.path, "trn2.48xlarge", "node1", 3)


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(DeviceDirError, match="no device directory"):
        create(tmp_path / "mine", "trn1.2xlarge", "node1", 1)
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\x00",
        json.dumps({"format_version": 99}),
        json.dumps({"format_version": 1, "instance_type": "trn9"}),
        json.dumps(
            {
                "format_version": 1,
                "instance_type": "trn1.2xlarge",
                "instance_id": "i-1",
                "node_name": "n",
                "seed": 1,
                "lnc": 0,
            }
        ),
    ],
)
def test_damaged_description_is_refused(node: DeviceDir, text: str) -> None:
    (node.path / "control" / "node.json").write_text(text)
    with pytest.raises(DeviceDirError, match=r"node\.json"):
        DeviceDir(node.path)


def test_counters_add_up_and_any_other_text_clears(node: DeviceDir) -> None:
    file = "neuron0/neuron_core0/stats/other_info/flop_count/total"
    memory = "neuron0/neuron_core0/stats/memory_usage/device_mem/tensors"
    node.apply({file: 5}, {memory: 100})
    node.apply({file: 6}, {memory: 40})
    node.apply({}, {memory: 60})
    assert node.read_int(file) == 11
    assert [node.read_int(f"{memory}/{n}") for n in ("total", "present", "peak")] == [120, 60, 100]
    (node.path / file).write_text("clear\n")
    node.apply({file: 2}, {})
    assert node.read_int(file) == 2


def test_machine_reads_back_what_is_on_disk(node: DeviceDir) -> None:
    node.apply({"neuron0/stats/hardware/mem_ecc_corrected": 4}, {})
    node.apply({"neuron0/neuron_core1/stats/status/timeout/total": 2}, {})
    health = "neuron0/stats/hardware/health_status/unhealthy_components"
    node.write(health, "hbm\nsram")
    machine = node.machine()
    assert machine.devices[0].hardware["mem_ecc_corrected"] == 4
    assert machine.core(1).status["timeout"] == 2
    assert machine.devices[0].unhealthy_components == ["hbm", "sram"]


def test_second_taker_is_told_who_holds_the_core(node: DeviceDir) -> None:
    with holding(node.path, "1", job="77") as process:
        with pytest.raises(CoreBusy) as caught:
            node.owners.acquire([0, 1])
        assert caught.value.core_id == 1
        assert caught.value.owner.pid == process.pid
        assert caught.value.owner.job == "77"
        assert "job 77" in str(caught.value)
        # All or none: core 0 was given back.
        assert holders(node.path) == {1: process.pid}


def test_sigkill_frees_the_core_and_sweep_clears_what_it_left(node: DeviceDir) -> None:
    memory = "neuron0/neuron_core1/stats/memory_usage/device_mem/tensors"
    with holding(node.path, "0,1") as process:
        node.apply({}, {memory: 100})
        assert node.holders() == {0: process.pid, 1: process.pid}
        assert sweep(node.path) == []
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
        assert node.holders() == {}
    assert sweep(node.path) == [0, 1]
    assert node.read_int(f"{memory}/present") == 0
    assert node.read_int(f"{memory}/peak") == 100
    node.owners.acquire([0, 1])
    assert node.holders() == {0: os.getpid(), 1: os.getpid()}


def test_asking_for_holders_does_not_drop_own_cores(node: DeviceDir) -> None:
    node.owners.acquire([0])
    for _ in range(3):
        assert holders(node.path) == {0: os.getpid()}
    program = "import sys; from neuron_runtime import devicedir as d; print(d.holders(sys.argv[1]))"
    seen = subprocess.run(
        [sys.executable, "-c", program, str(node.path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert seen.stdout.strip() == str({0: os.getpid()})


def test_forked_child_does_not_keep_the_core(node: DeviceDir) -> None:
    """A child that outlives the owner (a data loader) must not block the next job."""
    program = HOLD.replace("sys.stdin.read()", "import os\nif os.fork() == 0: sys.stdin.read()")
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(node.path), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert process.wait(timeout=20) == 0
        assert node.holders() == {}
        node.owners.acquire([0])
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.stdout.close()


def test_stand_alone_machine_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NEURON_DEVICE_DIR", raising=False)
    monkeypatch.setenv("NEURON_DEVICE_INSTANCE_TYPE", "inf2.xlarge")
    found = devicedir.from_environment()
    assert found.instance_type == "inf2.xlarge"
    assert found.path.is_relative_to(tmp_path)
    monkeypatch.setenv("NEURON_DEVICE_DIR", str(tmp_path / "nothing"))
    with pytest.raises(DeviceDirError, match="No neuron device available"):
        devicedir.from_environment()


def test_many_make_the_same_directory_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from neuron_runtime.devicedir import create;"
        "print(create(sys.argv[1], 'trn1.2xlarge', 'n', 1).core_count)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "node")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert [process.communicate(timeout=30)[0] for process in started] == ["2\n"] * 6
    assert [path.name for path in tmp_path.iterdir()] == ["node"]
