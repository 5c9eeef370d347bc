"""The training job under plain mpiexec: same curve on 1, 2 and 4 ranks, killed and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import train
from neuron_runtime import devicedir
from neuron_runtime.errors import NrtError
from tests.neuron_device import mpi

pytestmark = pytest.mark.jax

HERE = Path(__file__).parent
#: Enough for a kill at step 10 to come long before the end.
STEPS = 160
SIZE = (
    "--layers 1 --width 32 --heads 2 --ff-width 64 --seq-len 16 --global-batch 8 "
    f"--steps {STEPS} --warmup-steps 4 --learning-rate 0.02 --validation-windows 16 "
    "--log-every 1 --checkpoint-every 4"
).split()


class Bench:
    """A machine with four cores' worth of devices, a text, and NEFFs for 1, 2 and 4 ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices = devicedir.create(folder / "devices", "trn1.32xlarge", "node1", 1).path
        self.text = folder / "text.txt"
        # 4 bits a byte without context, none at all with one byte of it.
        self.text.write_bytes(b"abcdefghijklmnop" * 2000)
        self.environment = mpi.environment(
            NEURON_DEVICE_DIR=str(self.devices),
            NEURON_COMPILE_CACHE_URL=str(folder / "cache"),
        )

    def options(self, out: Path) -> list[str]:
        return [*SIZE, "--data", str(self.text), "--out", str(out)]

    def compiled(self, ranks: int) -> Path:
        """A folder with the NEFFs for ``ranks``; compiled at the first call."""
        out = self.folder / f"compiled{ranks}"
        if not (out / "eval.neff").exists():
            arguments = ["-m", "jobs.train", "compile", "--ranks", str(ranks), *self.options(out)]
            done = subprocess.run(
                [os.environ.get("CLUSTERCTL_PYTHON", sys.executable), *arguments],
                env=self.environment,
                cwd=mpi.ROOT,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        return out

    def out(self, name: str, ranks: int) -> Path:
        """A fresh folder for a run."""
        out = self.folder / name
        shutil.copytree(self.compiled(ranks), out)
        return out

    def command(self, ranks: int, out: Path) -> list[str]:
        program = str(HERE / "run_without_jax.py")
        return mpi.command(ranks, [program, "run", *self.options(out)])

    def run(self, ranks: int, out: Path) -> subprocess.CompletedProcess[str]:
        return mpi.run_command(self.command(ranks, out), self.environment, timeout_s=100)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> tuple[Path, str]:
    """Folder and output of a run of two ranks that nothing happened to."""
    out = bench.out("undisturbed", 2)
    done = bench.run(2, out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def losses(output: str) -> list[float]:
    found = re.findall(r"^step (\d+) loss ([\d.]+) tokens/s \d+$", output, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(1, STEPS + 1))
    return [float(loss) for _, loss in found]


def result(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def test_it_learns_and_prints_what_it_should(undisturbed: tuple[Path, str]) -> None:
    out, output = undisturbed
    curve = losses(output)
    assert curve[-1] < curve[0] / 2
    summary = output.strip().splitlines()[-1]
    found = re.fullmatch(
        r"validation loss ([\d.]+) bits/byte, unigram entropy ([\d.]+) bits/byte", summary
    )
    assert found is not None, summary
    assert float(found[2]) == 4.0
    assert float(found[1]) < 4.0
    assert result(out)["validation_bits_per_byte"] == pytest.approx(float(found[1]), abs=1e-4)
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (STEPS - 8, STEPS - 4, STEPS)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_same_curve_on_other_rank_counts(
    bench: Bench, undisturbed: tuple[Path, str], ranks: int
) -> None:
    out = bench.out(f"ranks{ranks}", ranks)
    done = bench.run(ranks, out)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(losses(undisturbed[1]), rel=1e-3, abs=1e-4)
    here, there = result(out), result(undisturbed[0])
    assert here["validation_bits_per_byte"] == pytest.approx(
        there["validation_bits_per_byte"], rel=1e-3
    )


def test_killed_and_resumed_ends_the_same(bench: Bench, undisturbed: tuple[Path, str]) -> None:
    out = bench.out("killed", 2)
    process = subprocess.Popen(
        bench.command(2, out),
        env=bench.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 10 "):
                break
    finally:
        # mpiexec puts its ranks into sessions of their own; the devices know who they are.
        for pid in devicedir.holders(bench.devices).values():
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=20)
    assert not (out / "result.json").exists()
    assert devicedir.holders(bench.devices) == {}
    done = bench.run(2, out)
    assert done.returncode == 0, done.stderr
    resumed = re.search(r"^resuming from step (\d+) of 160", done.stdout, re.MULTILINE)
    assert resumed is not None
    assert 8 <= int(resumed[1]) < STEPS
    assert int(resumed[1]) % 4 == 0
    assert result(out) == result(undisturbed[0])


def test_sigterm_ends_a_rank_at_once(bench: Bench) -> None:
    out = bench.out("terminated", 1)
    process = subprocess.Popen(
        [sys.executable, str(HERE / "run_without_jax.py"), "run", *bench.options(out)],
        env=bench.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 5 "):
                break
        process.terminate()
        assert process.wait(timeout=5) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate(timeout=20)
    assert bench.run(1, out).returncode == 0
    assert not list((out / "checkpoints").glob(".writing-*"))


def test_corrupt_newest_checkpoint_is_named_and_skipped(
    bench: Bench, undisturbed: tuple[Path, str]
) -> None:
    out = bench.folder / "corrupt"
    shutil.copytree(undisturbed[0], out)
    (out / "result.json").unlink()
    with (out / "checkpoints" / f"step-{STEPS:08d}" / "state.bin").open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"\x55\xaa\x55")
    os.truncate(out / "checkpoints" / f"step-{STEPS - 4:08d}" / "state.bin", 100)
    done = bench.run(2, out)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"skipping checkpoint .*step-{STEPS:08d}: array .* is corrupt", done.stdout)
    assert re.search(rf"skipping checkpoint .*step-{STEPS - 4:08d}: .*truncated", done.stdout)
    assert f"resuming from step {STEPS - 8} of" in done.stdout
    assert result(out) == result(undisturbed[0])


def test_finished_run_only_validates(bench: Bench, undisturbed: tuple[Path, str]) -> None:
    out = bench.folder / "again"
    shutil.copytree(undisturbed[0], out)
    done = bench.run(2, out)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" not in done.stdout
    assert result(out) == result(undisturbed[0])


def test_failures_end_all_ranks_with_one_clear_line(bench: Bench, tmp_path: Path) -> None:
    out = bench.out("mixed", 2)
    done = bench.run(4, out)
    assert done.returncode != 0
    assert "compiled for 2 ranks and cannot be loaded by 4" in done.stderr
    (out / "train.neff").write_bytes(b"not a neff")
    done = bench.run(2, out)
    assert done.returncode != 0
    assert re.search(r"jobs.train: rank \d: .*train\.neff: truncated", done.stderr)
    done = bench.run(2, tmp_path)
    assert done.returncode != 0
    assert "first run: python -m jobs.train compile --ranks 2" in done.stderr


@pytest.mark.parametrize(
    ("visible", "local_rank", "chosen"),
    [(None, 3, "3"), ("5", 0, "5"), ("5", 1, "5"), ("4-7", 2, "6"), ("9,1", 1, "1")],
)
def test_core_of_a_task(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, local_rank: int, chosen: str
) -> None:
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if visible is not None:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    train.choose_core(local_rank)
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == chosen


def test_job_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    with pytest.raises(ValueError, match=r"no Neuron devices here; .*--gres=neuron:N"):
        train.choose_core(0)


def test_more_tasks_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    with pytest.raises(ValueError, match=r"task 2 of this node has no core.*--gres=neuron:N"):
        train.choose_core(2)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-")
    with pytest.raises(NrtError, match="NEURON_RT_VISIBLE_CORES"):
        train.choose_core(0)


def test_default_folder_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_SUBMIT_DIR", "/home/me")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert train.parse_arguments(["run"]).out == Path("/home/me/train-out/42")


class OtherText:
    """A communicator of two in which rank 1 read something else than rank 0."""

    def Get_size(self) -> int:
        return 2

    def Allgather(self, mine: Any, every: Any) -> None:
        every[0], every[1] = mine, mine + 1


def test_ranks_that_read_different_texts() -> None:
    with pytest.raises(ValueError, match="rank 1 read another text than rank 0"):
        train.check_same_text(OtherText(), "00" * 32)


def test_batch_that_cannot_be_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["compile", "--ranks", "3", "--out", str(tmp_path)]) == 1
    assert "cannot be shared evenly by 3 ranks" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["compile"], ["fly"], ["run", "--log-every", "0"], ["run", "--steps", "many"], []],
)
def test_bad_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train.parse_arguments(arguments)
    assert caught.value.code == 2
    assert "jobs.train" in capsys.readouterr().err


def test_script_compiles_once_and_trains(bench: Bench, tmp_path: Path) -> None:
    """The batch script as the agent runs it, with mpiexec in the place of srun."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/bash\nexec {mpi.MPIEXEC} -n "$SLURM_NTASKS" "$@"\n')
    srun.chmod(0o755)
    script = tmp_path / "copied.sh"
    shutil.copy(mpi.ROOT / "jobs" / "train.sh", script)
    options = [*SIZE, "--data", str(bench.text)]
    done = subprocess.run(
        [str(script), *options],
        env={
            **bench.environment,
            "PATH": f"{srun.parent}:{os.environ['PATH']}",
            "CLUSTERCTL_PYTHON": sys.executable,
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "2",
            "SLURM_RESTART_COUNT": "1",
            "NEURON_RT_VISIBLE_CORES": "6,9",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("attempt 2 of job 7\ncompiling train_step for 2 ranks on trn1")
    assert "validation loss" in done.stdout.splitlines()[-1]
    assert result(tmp_path / "train-out" / "7")["ranks"] == 2
    used = devicedir.DeviceDir(bench.devices).machine()
    assert [used.core(core).other["model_load_count"] for core in (6, 9)] == [2, 2]


def test_script_runs_the_train_py_beside_it(tmp_path: Path) -> None:
    """A copy of both files is the user's own: what they change in train.py is what runs."""
    (tmp_path / "srun").write_text('#!/bin/bash\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "train.py").write_text("import sys\nprint('mine', sys.argv[1])\n")
    done = subprocess.run(
        [str(mpi.ROOT / "jobs" / "train.sh")],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CLUSTERCTL_PYTHON": sys.executable,
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"running {tmp_path}/train.py\nmine compile\nmine run\n"


def test_script_is_a_valid_batch_script() -> None:
    script = mpi.ROOT / "jobs" / "train.sh"
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/bin/bash\n")
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    directives = re.findall(r"^#SBATCH (--\S+)", script.read_text(), re.MULTILINE)
    assert directives == [
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--gres=neuron:1",
        "--time=00:20:00",
        "--requeue",
        "--output=%x-%j.out",
    ]
