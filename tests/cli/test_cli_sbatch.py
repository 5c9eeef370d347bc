"""sbatch: scripts, directives, precedence, values, refusals, repeats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.slurm import client
from clusterctl.slurm.directives import MAX_SCRIPT, directives, split_words
from clusterctl.slurm.errors import CommandError
from scheduler.api import wire
from scheduler.api.text import unpack
from tests.cli.conftest import Runner
from tests.cli.fake_controller import FakeController


@pytest.fixture
def fake(controller: FakeController) -> FakeController:
    controller.answers[wire.Submit] = wire.Submitted(job_id=41)
    return controller


def _script(name: str = "job.sh", text: bytes = b"#!/bin/bash\nsleep 1\n") -> str:
    Path(name).write_bytes(text)
    return name


def _spec(fake: FakeController) -> wire.JobSpec:
    return fake.of(wire.Submit)[-1].spec


# ---------------------------------------------------------------------- what is printed


def test_plain(run: Runner, fake: FakeController) -> None:
    assert run("sbatch", _script()) == (0, "Submitted batch job 41\n", "")
    spec = _spec(fake)
    assert spec.name == "job.sh"
    assert spec.command == str(Path("job.sh").resolve())
    assert spec.work_dir == os.getcwd()
    assert spec.batch


@pytest.mark.parametrize(("option", "out"), [("--parsable", "41\n"), ("-Q", "")])
def test_less_output(run: Runner, fake: FakeController, option: str, out: str) -> None:
    assert run("sbatch", option, _script()) == (0, out, "")


def test_arguments_of_the_script(run: Runner, fake: FakeController) -> None:
    run("sbatch", _script(), "a", "--time=1", "b c")
    request = fake.of(wire.Submit)[-1]
    assert request.payload.argv == ["a", "--time=1", "b c"]
    assert request.spec.time_limit_s is None


def test_wrap(run: Runner, fake: FakeController) -> None:
    run("sbatch", "--wrap", "echo hi")
    request = fake.of(wire.Submit)[-1]
    assert request.spec.name == "wrap"
    assert request.spec.command is None
    assert unpack(request.payload.script).endswith(b"\necho hi\n")


def test_standard_input(run: Runner, fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"#!/bin/sh\n#SBATCH -c 3\n")
    os.close(writing)
    saved = os.dup(0)
    os.dup2(reading, 0)
    try:
        assert run("sbatch").status == 0
    finally:
        os.dup2(saved, 0)
    assert _spec(fake).name == "sbatch"
    assert _spec(fake).resources.cpus_per_task == 3


# ---------------------------------------------------------------------- bad scripts


@pytest.mark.parametrize(
    ("text", "err"),
    [
        (b"", "sbatch: error: Batch script is empty!\n"),
        (b" \n\t\n", "sbatch: error: Batch script contains only whitespace!\n"),
        (
            b"sleep 1\n",
            (
                "sbatch: error: This does not look like a batch script.  The first\n"
                "sbatch: error: line must start with #! followed by the path to an interpreter.\n"
                "sbatch: error: For instance: #!/bin/sh\n"
            ),
        ),
        (
            b"#!/bin/sh\r\necho\r\n",
            (
                "sbatch: error: Batch script contains DOS line breaks (\\r\\n)\n"
                "sbatch: error: instead of expected UNIX line breaks (\\n).\n"
            ),
        ),
    ],
)
def test_bad_script(run: Runner, fake: FakeController, text: bytes, err: str) -> None:
    assert run("sbatch", _script(text=text)) == (1, "", err)
    assert fake.of(wire.Submit) == []


def test_missing_script_and_directory(run: Runner, fake: FakeController) -> None:
    missing = run("sbatch", "nosuch.sh")
    assert missing == (1, "", "sbatch: error: Unable to open file nosuch.sh\n")
    Path("adir").mkdir()
    assert run("sbatch", "adir") == (1, "", "sbatch: error: Batch script is empty!\n")


def test_too_large_script(run: Runner, fake: FakeController) -> None:
    ran = run("sbatch", _script(text=b"#!/bin/sh\n" + b"#" * MAX_SCRIPT))
    assert ran.status == 1
    assert f"exceeds maximum size ({MAX_SCRIPT} bytes)" in ran.err


def test_names_that_are_not_text(run: Runner, fake: FakeController) -> None:
    name = os.fsdecode(b"j\xff.sh")
    os.environ["ODD"] = os.fsdecode(b"\xfe")
    try:
        assert run("sbatch", "-o", os.fsdecode(b"out\xff"), _script(name)).status == 0
    finally:
        del os.environ["ODD"]
    request = fake.of(wire.Submit)[-1]
    assert unpack(request.spec.name) == b"j\xff.sh"
    assert unpack(request.spec.std_out) == b"out\xff"
    assert unpack(request.payload.env["ODD"]) == b"\xfe"


# ---------------------------------------------------------------------- directives


def test_directives_stop_at_the_first_command(run: Runner, fake: FakeController) -> None:
    text = (
        b"#!/bin/bash\n#SBATCH -J fromfile\n#SBATCH --time=7\n# a comment\n\n#SBATCH -N 2\n"
        b"echo x\n#SBATCH -J toolate\n"
    )
    run("sbatch", _script(text=text))
    spec = _spec(fake)
    assert (spec.name, spec.time_limit_s, spec.resources.min_nodes) == ("fromfile", 420, 2)


def test_quotes_comments_and_other_marks(run: Runner, fake: FakeController) -> None:
    text = (
        b"#!/bin/bash\n##SBATCH -J doublehash\n# SBATCH -J spacehash\n"
        b'#SBATCH --comment="two words" # trailing\nsleep 300\n'
    )
    run("sbatch", _script(text=text))
    assert _spec(fake).comment == "two words"
    assert _spec(fake).name == "job.sh"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (" -J a -N 2", ["-J", "a", "-N", "2"]),
        (" --comment='a \"b\"'", ['--comment=a "b"']),
        (r" --comment=a\ b", ["--comment=a b"]),
        (" -J a#b # c", ["-J", "a#b"]),
        (" ''", [""]),
    ],
)
def test_words_of_a_directive(line: str, words: list[str]) -> None:
    assert split_words(line) == words


def test_hetjob_is_refused() -> None:
    with pytest.raises(CommandError, match="heterogeneous"):
        directives(b"#!/bin/sh\n#SBATCH hetjob\n")


def test_bad_directive(run: Runner, fake: FakeController) -> None:
    ran = run("sbatch", _script(text=b"#!/bin/bash\n#SBATCH --frobnicate=1\n"))
    assert ran.status == 255
    assert ran.err.startswith("sbatch: unrecognized option '--frobnicate=1'\n")


def test_command_line_over_environment_over_directives(
    run: Runner, fake: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = _script(text=b"#!/bin/sh\n#SBATCH -J file -t 7 -p a\n")
    monkeypatch.setenv("SBATCH_JOB_NAME", "env")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "8")
    run("sbatch", "-J", "cli", name)
    spec = _spec(fake)
    assert (spec.name, spec.time_limit_s, spec.partitions) == ("cli", 480, ["a"])


# ---------------------------------------------------------------------- values


def test_everything_that_a_specification_carries(run: Runner, fake: FakeController) -> None:
    argv = [
        "-N",
        "2-4",
        "-n",
        "8",
        "-c",
        "2",
        "--ntasks-per-node=4",
        "--mem=1G",
        "--gres=neuron:2,gres:neuroncore:4",
        "--exclusive",
        "-p",
        "main,debug",
        "-A",
        "acc",
        "-q",
        "high",
        "--nice=10",
        "--priority=5",
        "-H",
        "-a",
        "1-6%2",
        "-d",
        "afterok:3",
        "--signal=B:USR1@60",
        "--requeue",
        "-o",
        "out",
        "-e",
        "err",
        "-i",
        "in",
        "--open-mode=append",
        "-D",
        "/tmp",
        "-C",
        "feat",
        "-x",
        "n3",
        "--comment=c",
        "--wckey=k",
        "--kill-on-invalid-dep=yes",
    ]
    assert run("sbatch", *argv, _script()).status == 0
    spec = _spec(fake)
    res = spec.resources
    assert (res.min_nodes, res.max_nodes, res.ntasks, res.cpus_per_task) == (2, 4, 8, 2)
    assert (res.ntasks_per_node, res.mem_per_node_mib, res.exclusive) == (4, 1024, True)
    assert res.gres == {"neuron": 2, "neuroncore": 4}
    assert (res.constraint, res.exclude) == ("feat", ["n3"])
    assert spec.partitions == ["main", "debug"]
    assert (spec.account, spec.qos, spec.nice, spec.priority) == ("acc", "high", 10, 5)
    assert (spec.hold, spec.array, spec.dependency) == (True, "1-6%2", "afterok:3")
    assert spec.signal is not None
    assert (spec.signal.signum, spec.signal.before_s, spec.signal.batch) == (10, 60, True)
    assert (spec.std_out, spec.std_err, spec.std_in) == ("out", "err", "in")
    assert (spec.open_mode, spec.requeue, spec.work_dir) == ("append", True, "/tmp")
    assert (spec.comment, spec.wckey, spec.kill_on_invalid_dep) == ("c", "k", True)


@pytest.mark.parametrize(
    ("argv", "status", "err"),
    [
        (["-t", "abc"], 255, "Invalid --time specification"),
        (["-n", "0"], 1, 'Invalid numeric value "0" for --ntasks.'),
        (["-n", "x"], 1, 'Invalid numeric value "x" for --ntasks.'),
        (["-c", "0"], 1, 'Invalid numeric value "0" for --cpus-per-task.'),
        (["-N", "abc"], 255, '"abc" is not a valid node count'),
        (["-N", "3-1"], 255, "Maximum node count 1 is less than minimum node count 3"),
        (["-N", "0"], 1, "Batch job submission failed: Node count specification invalid"),
        (["--mem=-1"], 255, "Invalid --mem specification"),
        (["--mem=1.5G"], 255, "Invalid --mem specification"),
        (["--signal=FOO"], 255, "Invalid --signal specification"),
        (["--mail-type=BAD"], 255, "Invalid --mail-type specification"),
        (["--open-mode=bad"], 255, "Invalid --open-mode specification"),
        (["--exclusive=bad"], 255, "Invalid --exclusive specification"),
        (["--hint=bad"], 1, 'unrecognized --hint argument "bad", see --hint=help'),
        (["--uid=nosuchuser"], 255, "Invalid --uid specification"),
        (["--export-file=nosuch"], 1, "Could not open user environment file nosuch"),
        (["-N", "1", "-w", "n00[1-2]"], 1, "invalid number of nodes (-N 2-1)"),
        (["-L", "matlab:1"], 1, "Batch job submission failed: Invalid license specification"),
        (
            ["-t", "5", "--time-min=10"],
            1,
            (
                "Batch job submission failed: Invalid time-min specification (exceeds job's time "
                "or other limits)"
            ),
        ),
    ],
)
def test_bad_values(
    run: Runner, fake: FakeController, argv: list[str], status: int, err: str
) -> None:
    assert run("sbatch", *argv, _script()) == (status, "", f"sbatch: error: {err}\n")
    assert fake.of(wire.Submit) == []


def test_bad_begin_names_the_place(run: Runner, fake: FakeController) -> None:
    assert run("sbatch", "--begin=now+1h", _script()) == (
        255,
        "",
        (
            "Invalid time specification (pos=4): now+1h\n"
            "sbatch: error: Invalid --begin specification\n"
        ),
    )


def test_memory_twice(run: Runner, fake: FakeController) -> None:
    ran = run("sbatch", "--mem=1G", "--mem-per-cpu=1G", _script())
    assert ran.status == 1
    assert ran.err == (
        "sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.\n"
    )


@pytest.mark.parametrize(
    "option",
    ["--reboot", "--mincpus=2", "--tmp=1G", "--contiguous", "--container=x", "--deadline=now"],
)
def test_what_is_not_built_is_refused(run: Runner, fake: FakeController, option: str) -> None:
    ran = run("sbatch", option, _script())
    assert ran.status == 1
    assert f"{option.partition('=')[0]} is not supported by clusterctl" in ran.err
    assert fake.of(wire.Submit) == []


def test_gpus_are_refused_with_the_way_out(run: Runner, fake: FakeController) -> None:
    ran = run("sbatch", "--gpus=1", _script())
    assert ran.status == 1
    assert "Invalid generic resource (gres) specification" in ran.err
    assert "--gres=neuron:N" in ran.err


def test_hints_without_effect_are_said(run: Runner, fake: FakeController) -> None:
    ran = run("sbatch", "--ntasks-per-core=1", "--mail-type=END", "--mail-user=u", _script())
    assert ran.status == 0
    assert ran.err == (
        "sbatch: warning: --ntasks-per-core has no effect here\n"
        "sbatch: warning: --mail-type has no effect here: no mail is sent\n"
    )


def test_more_nodes_than_tasks(run: Runner, fake: FakeController) -> None:
    ran = run("sbatch", "-N", "3", "-n", "2", _script())
    assert ran.err == ("sbatch: Warning: can't run 2 processes on 3 nodes, setting nnodes to 2\n")
    assert _spec(fake).resources.min_nodes == 2


# ---------------------------------------------------------------------- environment


def test_export(run: Runner, fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOO", "bar")
    monkeypatch.setenv("BAZ", "q")
    monkeypatch.setenv("SLURM_PROCID", "3")
    run("sbatch", "--export=FOO,X=5", _script())
    env = fake.of(wire.Submit)[-1].payload.env
    assert (env["FOO"], env["X"]) == ("bar", "5")
    assert "BAZ" not in env
    assert "SLURM_PROCID" not in env
    assert env["SLURM_SUBMIT_DIR"] == os.getcwd()
    run("sbatch", "--export=NONE", _script())
    env = fake.of(wire.Submit)[-1].payload.env
    assert not [n for n in env if not n.startswith(("SLURM_", "CLUSTERCTL_"))]


# ---------------------------------------------------------------------- the controller


def test_refusal(run: Runner, fake: FakeController) -> None:
    fake.answers[wire.Submit] = wire.Error(code="rejected", message="Job dependency problem")
    assert run("sbatch", "-d", "foo:1", _script()) == (
        1,
        "",
        "sbatch: error: Batch job submission failed: Job dependency problem\n",
    )


def test_unknown_partition_is_named(run: Runner, fake: FakeController) -> None:
    fake.answers[wire.Submit] = wire.Error(
        code="rejected", message="Invalid partition name specified"
    )
    fake.answers[wire.GetNodes] = wire.Nodes(nodes=[], partitions=[{"name": "main"}])
    assert run("sbatch", "-p", "main,nosuch", _script()).err == (
        "sbatch: error: invalid partition specified: nosuch\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    )


def test_detail_of_a_refusal_comes_first(run: Runner, fake: FakeController) -> None:
    fake.answers[wire.Submit] = wire.Error(
        code="infeasible",
        message="Requested node configuration is not available",
        warning="CPU count per node can not be satisfied",
    )
    assert run("sbatch", _script()).err == (
        "sbatch: error: CPU count per node can not be satisfied\n"
        "sbatch: error: Batch job submission failed: "
        "Requested node configuration is not available\n"
    )


def test_sent_again_with_the_same_key(run: Runner, fake: FakeController) -> None:
    answers = iter([None, wire.Submitted(job_id=41)])
    fake.answers[wire.Submit] = lambda _: next(answers)
    assert run("sbatch", _script()) == (0, "Submitted batch job 41\n", "")
    first, second = fake.of(wire.Submit)
    assert first.key == second.key != ""


@pytest.mark.parametrize(
    ("jobs", "status"),
    [
        ([{"id": 41, "state": "COMPLETED"}], 0),
        ([{"id": 41, "state": "FAILED", "code": 5}], 5),
        ([{"id": 41, "state": "FAILED", "signal_code": 9}], 1),
        ([{"id": 41, "state": "CANCELLED"}], 1),
        ([{"id": 41, "state": "COMPLETED"}, {"id": 42, "state": "FAILED", "code": 2}], 2),
    ],
)
def test_wait(
    run: Runner, fake: FakeController, jobs: list[dict[str, object]], status: int
) -> None:
    fake.answers[wire.WaitJob] = wire.Jobs(jobs=jobs)
    assert run("sbatch", "-W", _script()) == (status, "Submitted batch job 41\n", "")


def test_wait_outlives_the_controller(run: Runner, fake: FakeController) -> None:
    answers = iter([None, None, wire.Jobs(jobs=[{"id": 41, "state": "COMPLETED"}])])
    fake.answers[wire.WaitJob] = lambda _: next(answers)
    assert run("sbatch", "-W", _script()).status == 0


def test_nobody_answers(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "state.db").touch()  # a cluster was started here
    ran = run("sbatch", _script())
    assert ran.status == 1
    assert ran.err.startswith(
        "sbatch: error: Batch job submission failed: "
        "Unable to contact slurm controller (connect failure)\n"
    )
    assert "clusterctl up" in ran.err


def test_first_submission_starts_the_local_cluster(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[FakeController] = []

    def up() -> int:
        (tmp_path / "home").mkdir()
        fake = FakeController(tmp_path / "home" / "controller.sock")
        fake.answers[wire.Submit] = wire.Submitted(job_id=1)
        started.append(fake)
        return 0

    monkeypatch.setattr(client, "run_up", up)
    try:
        ran = run("sbatch", "--parsable", _script())
    finally:
        for fake in started:
            fake.stop()
    assert ran == (
        0,
        "1\n",
        "sbatch: no cluster is running; starting a local one (4 nodes)...\n",
    )
