"""The runtime's calls: order, status codes, memory, counters, ownership."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuron_runtime import devicedir, nrt
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.neff import neff_bytes, write_neff
from neuron_runtime.nrtpy import NrtpyError, NrtpyModel, NrtpyTensor, configure, reset
from neuron_runtime.tensors import Placement
from tests.neuron_device import mpi
from tests.neuron_device.handmade import accumulate
from tests.neuron_device.test_devicedir import holding

S = NRT_STATUS
HERE = Path(__file__).parent


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[devicedir.DeviceDir]:
    """A trn1.2xlarge (two cores) of its own; the runtime is closed afterwards."""
    found = devicedir.create(tmp_path / "node1", "trn1.2xlarge", "node1", 3)
    for name in list(os.environ):
        if name.startswith("NEURON_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NEURON_DEVICE_DIR", str(found.path))
    monkeypatch.setattr(nrt, "_closed", False)
    yield found
    nrt.nrt_close()


def refused(status: NRT_STATUS, words: str = "") -> Any:
    """The block must raise NrtError with ``status``; the text must match ``words``."""
    return pytest.raises(NrtError, match=rf"{status.name}\({int(status)}\): .*{words}")


class Loaded:
    """The hand-made model, loaded, with a tensor for every input and output."""

    def __init__(self) -> None:
        self.model = nrt.nrt_load(neff_bytes(accumulate(1)))
        self.tensors = {}
        self.inputs, self.outputs = nrt.nrt_allocate_tensor_set(), nrt.nrt_allocate_tensor_set()
        for info in nrt.nrt_get_model_tensor_info(self.model):
            tensor = nrt.nrt_tensor_allocate(Placement.DEVICE, 0, info.size, info.name)
            self.tensors[info.name] = tensor
            target = self.inputs if info.usage == "INPUT" else self.outputs
            nrt.nrt_add_tensor_to_tensor_set(target, info.name, tensor)

    def write(self, name: str, value: float) -> None:
        nrt.nrt_tensor_write(self.tensors[name], np.full(4, value, np.float32))

    def read(self, name: str) -> list[float]:
        return np.frombuffer(nrt.nrt_tensor_read(self.tensors[name]), np.float32).tolist()

    def run(self) -> None:
        nrt.nrt_execute(self.model, self.inputs, self.outputs)


def test_calls_before_init_and_after_close(node: devicedir.DeviceDir) -> None:
    with refused(S.NRT_UNINITIALIZED):
        nrt.nrt_allocate_tensor_set()
    nrt.nrt_init()
    with refused(S.NRT_INVALID, "already"):
        nrt.nrt_init()
    loaded = Loaded()
    nrt.nrt_close()
    for call in (
        loaded.run,
        lambda: nrt.nrt_tensor_read(loaded.tensors["x"]),
        lambda: nrt.nrt_load(b""),
        nrt.nrt_get_total_vnc_count,
    ):
        with refused(S.NRT_CLOSED):
            call()
    nrt.nrt_init()
    with refused(S.NRT_INVALID_HANDLE):
        loaded.run()
    with refused(S.NRT_INVALID_HANDLE, "freed"):
        nrt.nrt_tensor_read(loaded.tensors["x"])


def test_execute_writes_where_the_output_tensors_are(node: devicedir.DeviceDir) -> None:
    nrt.nrt_init()
    loaded = Loaded()
    loaded.write("total", 10)
    loaded.write("x", 2)
    loaded.run()
    assert loaded.read("new_total") == [12] * 4
    np.testing.assert_allclose(loaded.read("y"), np.log(2), rtol=1e-6)
    assert loaded.read("total") == [10] * 4
    nrt.nrt_execute_repeat(loaded.model, loaded.inputs, loaded.outputs, 3)
    assert loaded.read("new_total") == [12] * 4
    # Donated: the new total takes the old one's place.
    total = loaded.tensors["total"]
    nrt.nrt_add_tensor_to_tensor_set(loaded.outputs, "new_total", total)
    nrt.nrt_execute_repeat(loaded.model, loaded.inputs, loaded.outputs, 3)
    assert loaded.read("total") == [16] * 4


def test_bad_inputs_to_execute(node: devicedir.DeviceDir) -> None:
    nrt.nrt_init()
    loaded = Loaded()
    small = nrt.nrt_tensor_allocate(Placement.DEVICE, 0, 8, "small")
    bare = nrt.nrt_allocate_tensor_set()
    with refused(S.NRT_EXEC_BAD_INPUT, r"'total' \(float32\[4\]\) is missing"):
        nrt.nrt_execute(loaded.model, bare, loaded.outputs)
    nrt.nrt_add_tensor_to_tensor_set(loaded.inputs, "x", small)
    with refused(S.NRT_EXEC_BAD_INPUT, "'x' has 8 bytes"):
        loaded.run()
    nrt.nrt_add_tensor_to_tensor_set(loaded.inputs, "x", loaded.tensors["x"])
    nrt.nrt_add_tensor_to_tensor_set(loaded.inputs, "extra", small)
    with refused(S.NRT_EXEC_BAD_INPUT, "no input tensor 'extra'"):
        loaded.run()
    nrt.nrt_close()
    base = "neuron0/neuron_core0/stats/status"
    assert node.read_int(f"{base}/exec_bad_input/total") == 3


def test_output_over_a_part_of_an_input(node: devicedir.DeviceDir) -> None:
    nrt.nrt_init()
    loaded = Loaded()
    both = nrt.nrt_tensor_allocate(Placement.DEVICE, 0, 24, "both")
    x = nrt.nrt_tensor_allocate_slice(both, 0, 16)
    y = nrt.nrt_tensor_allocate_slice(both, 8, 16)
    nrt.nrt_add_tensor_to_tensor_set(loaded.inputs, "x", x)
    nrt.nrt_add_tensor_to_tensor_set(loaded.outputs, "y", y)
    with refused(S.NRT_EXEC_BAD_INPUT, "'y' overlaps a part of input 'x'"):
        loaded.run()
    # Exactly in its place is fine, donated or not.
    nrt.nrt_add_tensor_to_tensor_set(loaded.outputs, "y", x)
    nrt.nrt_tensor_write(x, np.ones(4, np.float32))
    loaded.run()
    assert loaded.read("new_total") == [1] * 4
    assert nrt.nrt_tensor_get_va(x, np.float32).tolist() == [0] * 4


def test_nan_is_reported_when_asked_for(
    node: devicedir.DeviceDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    nrt.nrt_init()
    loaded = Loaded()
    loaded.write("x", -1)
    loaded.run()
    nrt.nrt_close()
    monkeypatch.setenv("NEURON_RT_NUMERICAL_ERRORS_VERBOSITY", "all")
    nrt.nrt_init()
    loaded = Loaded()
    loaded.write("x", -1)
    with refused(S.NRT_EXEC_COMPLETED_WITH_NUM_ERR, "'y' contains NaN"):
        loaded.run()
    loaded.write("x", 1)
    loaded.run()
    nrt.nrt_close()
    base = "neuron0/neuron_core0/stats/status"
    assert node.read_int(f"{base}/execute_completed_with_num_error/total") == 1
    assert node.read_int(f"{base}/success/total") == 2


def test_counters_and_memory_reach_the_device_directory(node: devicedir.DeviceDir) -> None:
    nrt.nrt_init()
    loaded = Loaded()
    loaded.write("x", 1)
    for _ in range(7):
        loaded.run()
    nrt.current().counters.flush()
    core = node.machine().core(0)
    assert core.status["success"] == 7
    assert core.other["inference_count"] == 7
    assert core.other["flop_count"] == 7 * 8
    assert core.other["model_load_count"] == 1
    assert core.other["nc_time_in_use"] > 0
    assert core.memory["tensors"].present == 4 * 4096
    assert core.memory["model_code"].present == loaded.model.neff.manifest.hbm.program
    used = nrt.nrt_get_vnc_memory_stats(0)["bytes_used"]
    assert used == sum(use.present for use in core.memory.values())
    nrt.nrt_close()
    core = node.machine().core(0)
    assert core.used_bytes == 0
    assert core.memory["tensors"].peak == 4 * 4096
    assert node.machine().core(1).other["inference_count"] == 0


def test_device_memory_is_exhausted_at_its_size(node: devicedir.DeviceDir) -> None:
    nrt.nrt_init()
    gib = 1 << 30
    big = [nrt.nrt_tensor_allocate(Placement.DEVICE, 0, 5 * gib, f"big{i}") for i in range(3)]
    with refused(S.NRT_RESOURCE, r"of nc0 exhausted: tensor 'more' needs .* 1073741824 of 17"):
        nrt.nrt_tensor_allocate(Placement.DEVICE, 0, 2 * gib, "more")
    other = nrt.nrt_tensor_allocate(Placement.DEVICE, 1, 2 * gib, "on the other core")
    nrt.nrt_tensor_free(big[0])
    nrt.nrt_tensor_allocate(Placement.DEVICE, 0, 5 * gib, "more")
    with refused(S.NRT_INVALID_HANDLE):
        nrt.nrt_tensor_free(big[0])
    assert other.core_id == 1
    with refused(S.NRT_INVALID, "cores 0-1"):
        nrt.nrt_tensor_allocate(Placement.DEVICE, 2, 4, "nowhere")
    with refused(S.NRT_INVALID, "size must be > 0"):
        nrt.nrt_tensor_allocate(Placement.DEVICE, 0, 0, "nothing")


def test_model_that_needs_more_memory_than_there_is(node: devicedir.DeviceDir) -> None:
    nrt.nrt_init()
    neff = accumulate(1, scratch=17 << 30)
    runtime = nrt.current()
    with refused(S.NRT_RESOURCE, "accumulate does not fit on nc0: .*scratch 18253611008"):
        runtime.load(neff, -1, 0, 1, collective=False)
    assert nrt.nrt_get_vnc_memory_stats(0)["bytes_used"] == 0
    assert runtime.models == []


def test_neffs_that_do_not_fit(node: devicedir.DeviceDir, tmp_path: Path) -> None:
    nrt.nrt_init()
    good = neff_bytes(accumulate(1))
    with refused(S.NRT_UNSUPPORTED_NEFF_VERSION, "--target trn2"):
        nrt.nrt_load(neff_bytes(accumulate(1, target="trn2")))
    with refused(S.NRT_INVALID, "logical core size 2"):
        nrt.nrt_load(neff_bytes(accumulate(1, lnc=2)))
    with refused(S.NRT_INVALID, "compiled for 4 ranks"):
        nrt.nrt_load(neff_bytes(accumulate(4)))
    with refused(S.NRT_INVALID, "truncated"):
        nrt.nrt_load(good[:-100])
    with refused(S.NRT_INVALID, "missing.neff"):
        nrt.nrt_load(tmp_path / "missing.neff")
    with refused(S.NRT_INVALID, "vnc_count"):
        nrt.nrt_load(good, 0, 1)
    assert nrt.nrt_get_vnc_memory_stats(0)["bytes_used"] == 0
    status = node.machine().core(0).status
    assert (status["unsupported_neff_version"], status["invalid_error"]) == (1, 2)


def test_hash_is_checked_when_asked_for(
    node: devicedir.DeviceDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = bytearray(neff_bytes(accumulate(1)))
    damaged[damaged.index(b'"accumulate"') + 1] ^= 0x20
    nrt.nrt_init()
    nrt.nrt_unload(nrt.nrt_load(bytes(damaged)))
    nrt.nrt_close()
    monkeypatch.setenv("NEURON_RT_VALIDATE_HASH", "1")
    nrt.nrt_init()
    with refused(S.NRT_INVALID, "hash"):
        nrt.nrt_load(bytes(damaged))


def test_second_taker_gets_the_real_text(
    node: devicedir.DeviceDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with holding(node.path, "1", job="77") as process:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "1")
        text = (
            r"NRT:nrt_allocate_neuron_cores NeuronCore\(s\) not available - "
            rf"Requested:nc1-nc1 Available:0 \(.*pid {process.pid} \(job 77\)"
        )
        with refused(S.NRT_RESOURCE, text):
            nrt.nrt_init()
        assert re.search(r"ERROR  NRT:nrt_allocate_neuron_cores NeuronC", capfd.readouterr().err)
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
        with refused(S.NRT_RESOURCE, "Requested:nc0-nc1 Available:1"):
            nrt.nrt_init()
        monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
        monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
        with refused(S.NRT_RESOURCE, "Available:1"):
            nrt.nrt_init()
        monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")
        nrt.nrt_init()
        assert nrt.current().cores == (0,)
        nrt.nrt_close()
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "0")
    nrt.nrt_init()
    assert nrt.nrt_get_visible_vnc_count() == nrt.nrt_get_total_vnc_count() == 2


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("NEURON_RT_VISIBLE_CORES", "7", "names core 7, but this trn1.2xlarge has cores 0-1"),
        ("NEURON_RT_NUM_CORES", "3", "has 2 cores"),
        ("NEURON_LOGICAL_NC_CONFIG", "2", "set to 1"),
        ("NEURON_RT_ROOT_COMM_ID", "nonsense", "NEURON_RT_ROOT_COMM_ID"),
    ],
)
def test_environment_that_cannot_be(
    node: devicedir.DeviceDir, monkeypatch: pytest.MonkeyPatch, name: str, text: str, words: str
) -> None:
    monkeypatch.setenv(name, text)
    with refused(S.NRT_INVALID, words):
        nrt.nrt_init()
    assert node.holders() == {}


def test_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEURON_DEVICE_DIR", str(tmp_path / "none"))
    with refused(S.NRT_FAILURE, "No neuron device available"):
        nrt.nrt_init()


def test_forked_child_has_no_cores(node: devicedir.DeviceDir) -> None:
    program = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tests.neuron_device.test_nrt import Loaded
from neuron_runtime import nrt
from neuron_runtime.errors import NrtError
nrt.nrt_init()
loaded = Loaded()
child = os.fork()
if child == 0:
    try:
        loaded.run()
    except NrtError as error:
        os._exit(0 if error.status == 1005 else 9)
    os._exit(8)
assert os.waitpid(child, 0)[1] == 0
loaded.run()
"""
    subprocess.run([sys.executable, "-c", program, str(mpi.ROOT)], check=True, timeout=60)


def test_tensor_calls(node: devicedir.DeviceDir) -> None:
    nrt.nrt_init()
    tensor = nrt.nrt_tensor_allocate(Placement.HOST, 0, 16, "host")
    nrt.nrt_tensor_write(tensor, b"\x01\x02", 3)
    assert nrt.nrt_tensor_read(tensor, 2, 4) == b"\x00\x01\x02\x00"
    part = nrt.nrt_tensor_allocate_slice(tensor, 3, 2)
    nrt.nrt_tensor_memset(part, 0, 9, 2)
    assert nrt.nrt_tensor_read(tensor, 3, 2) == b"\x09\x09"
    with refused(S.NRT_INVALID, "lie outside"):
        nrt.nrt_tensor_write(tensor, b"12", 15)
    with refused(S.NRT_INVALID, "lie outside"):
        nrt.nrt_tensor_allocate_slice(tensor, 10, 7)
    with refused(S.NRT_INVALID, "lie outside"):
        nrt.nrt_tensor_read(tensor, -1, 2)
    other = nrt.nrt_tensor_allocate(Placement.DEVICE, 0, 16, "device")
    nrt.nrt_tensor_copy(tensor, 3, other, 0, 2)
    assert nrt.nrt_tensor_get_va(other, np.uint16)[0] == 0x0909
    empty = nrt.nrt_tensor_allocate_empty("mine")
    with refused(S.NRT_INVALID, "no buffer"):
        nrt.nrt_tensor_read(empty)
    mine = np.zeros(3, np.float32)
    nrt.nrt_tensor_attach_buffer(empty, mine)
    nrt.nrt_tensor_write(empty, np.ones(1, np.float32), 4)
    assert mine.tolist() == [0, 1, 0]
    nrt.nrt_tensor_free(tensor)
    with refused(S.NRT_INVALID_HANDLE, "freed"):
        nrt.nrt_tensor_read(part)
    tensors = nrt.nrt_allocate_tensor_set()
    with refused(S.NRT_INVALID_HANDLE):
        nrt.nrt_add_tensor_to_tensor_set(tensors, "x", tensor)
    with refused(S.NRT_INVALID, "no tensor 'x'"):
        nrt.nrt_get_tensor_from_tensor_set(tensors, "x")
    nrt.nrt_destroy_tensor_set(tensors)
    with refused(S.NRT_INVALID_HANDLE, "destroyed"):
        nrt.nrt_add_tensor_to_tensor_set(tensors, "x", other)


def test_status_names() -> None:
    assert nrt.nrt_get_status_as_str(1005) == "NRT_EXEC_NC_BUSY"
    assert nrt.nrt_get_status_as_str(4711) == "NRT_UNKNOWN"


def test_convenience_layer(node: devicedir.DeviceDir, tmp_path: Path) -> None:
    file = tmp_path / "accumulate.neff"
    write_neff(file, accumulate(1))
    configure(NEURON_RT_VISIBLE_CORES="1")
    model = NrtpyModel.load_from_neff(file, "accumulate")
    assert node.holders() == {1: os.getpid()}
    with pytest.raises(NrtpyError, match="before the first load"):
        configure(NEURON_RT_VISIBLE_CORES="0")
    assert [info.name for info in model.input_tensors_info] == ["total", "x"]
    assert [info.shape for info in model.output_tensors_info] == [(4,), (4,)]
    x = NrtpyTensor.from_numpy(np.array([1, 2, 3, 4], np.float32), "x")
    total = NrtpyTensor.from_numpy(np.ones(4, np.float32), "total")
    outputs = model(inputs={"x": x, "total": total})
    assert outputs["new_total"].numpy().tolist() == [2, 3, 4, 5]
    wrong = NrtpyTensor.from_numpy(np.ones(4, np.int32), "x")
    with refused(S.NRT_EXEC_BAD_INPUT, r"input 'x' is int32\[4\]"):
        model(inputs={"x": wrong, "total": total})
    with pytest.raises(NrtpyError, match="traces"):
        model(inputs={"x": x, "total": total}, save_trace=True)
    times = model.benchmark({"x": x, "total": total}, warmup_iter=1, benchmark_iter=3)
    assert 0 < times.min_ms <= times.mean_ms <= times.max_ms
    model.unload()
    reset()
    assert node.holders() == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_jax_under_mpiexec(
    node: devicedir.DeviceDir, tmp_path: Path, ranks: int
) -> None:
    file = tmp_path / "accumulate.neff"
    write_neff(file, accumulate(ranks))
    done = mpi.run(ranks, [str(HERE / "nrt_ranks.py"), str(file)], NEURON_DEVICE_DIR=str(node.path))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank \d ok", done.stdout)) == ranks
    assert node.machine().core(ranks - 1).status["success"] == 5
    assert node.holders() == {}


def test_ranks_that_do_not_fit_the_neff(node: devicedir.DeviceDir, tmp_path: Path) -> None:
    file = tmp_path / "accumulate.neff"
    write_neff(file, accumulate(4))
    done = mpi.run(2, [str(HERE / "nrt_ranks.py"), str(file)], NEURON_DEVICE_DIR=str(node.path))
    assert done.returncode != 0
    assert "compiled for 4 ranks and cannot be loaded by 2" in done.stderr


def test_a_job_without_devices_sees_no_core(
    node: devicedir.DeviceDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "")

    with pytest.raises(NrtError, match="No neuron device available") as caught:
        nrt.nrt_init(1, "", "")

    assert caught.value.status == NRT_STATUS.NRT_RESOURCE
