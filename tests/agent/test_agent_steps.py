"""Steps as srun starts them: exec, environment, files, streams."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from scheduler.api import agentwire as aw
from scheduler.api.records import TaskLayout
from scheduler.api.text import pack
from tests.agent.rig import Controller, Node, attach, collect, wait_for


def sort_lines(text: str) -> str:
    return "".join(sorted(text.splitlines(keepends=True)))


def run(link: Controller, launch: aw.Launch, streams: int) -> tuple[aw.StepEnded, dict[str, bytes]]:
    link.send(launch)
    attach(link, launch.job_id)
    texts = collect(link, launch.job_id, streams)
    ended = [one for one in link.all(aw.StepEnded) if one.job_id == launch.job_id]
    return (ended[0] if ended else link.until(aw.StepEnded, job_id=launch.job_id)), texts


def test_tasks_get_their_own_numbers(node: Node, link: Controller) -> None:
    names = "PROCID LOCALID NODEID GTIDS CPUS_ON_NODE"
    words = " ".join(f"$SLURM_{name}" for name in names.split()) + " $SLURMD_NODENAME"
    script = f"echo {words} $NEURON_RT_VISIBLE_CORES $FROM_VARS; test $SLURM_TASK_PID = $$"
    launch = node.launch(
        20,
        "sh",
        "-c",
        script,
        tasks=[2, 3],
        layout=TaskLayout(nodes=["n0", "n1"], tasks=[[0, 1], [2, 3]]),
        node_index=1,
        cpus=5,
        cores=[0, 1, 2, 7],
        vars={"FROM_VARS": "yes"},
    )
    ended, texts = run(link, launch, 4)
    assert texts["2:1"] == b"2 0 1 2,3 5 n1 0-1 yes\n"
    assert texts["3:1"] == b"3 1 1 2,3 5 n1 2,7 yes\n"
    assert [one.code for one in ended.exits] == [0, 0]


def test_node_variables(node: Node, link: Controller) -> None:
    launch = node.launch(
        21,
        "env",
        cpus_per_task=1,
        env={"PATH": os.environ["PATH"], "PMI_FD": "3", "OMP_NUM_THREADS": "7"},
    )
    _, texts = run(link, launch, 2)
    env = dict(line.split("=", 1) for line in texts["0:1"].decode().splitlines())
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["OPENBLAS_NUM_THREADS"] == "1"
    assert env["NEURON_DEVICE_DIR"] == str(node.dir / "devices")
    assert env["CLUSTERCTL_STEP"] == f"21.0.1@{node.dir}"
    assert env["MPI4PY_LIBMPI"].endswith("libmpi.so.12")
    assert "PMI_FD" not in env


def test_missing_command(node: Node, link: Controller) -> None:
    ended, texts = run(link, node.launch(22, "no-such-command"), 2)
    error = b"slurmstepd-n1: error: execve(): no-such-command: No such file or directory\n"
    assert texts["0:2"] == error
    (exit_record,) = ended.exits
    assert exit_record.code == errno.ENOENT
    assert exit_record.launch_error == "No such file or directory"


def test_command_that_is_not_executable(node: Node, link: Controller) -> None:
    (node.work / "notexec.txt").write_text("data\n")
    ended, texts = run(link, node.launch(23, "./notexec.txt"), 2)
    path = f"{node.work}/./notexec.txt"
    error = f"slurmstepd-n1: error: execve(): {path}: Permission denied\n"
    assert texts["0:2"] == error.encode()
    assert ended.exits[0].code == errno.EACCES


def test_without_path_nothing_is_found(node: Node, link: Controller) -> None:
    ended, _ = run(link, node.launch(24, "sh", "-c", "true", env={"FOO": "bar"}), 2)
    assert ended.exits[0].code == errno.ENOENT


def test_umask_and_limits_of_the_submitting_shell(node: Node, link: Controller) -> None:
    env = {"PATH": os.environ["PATH"], "SLURM_UMASK": "0027", "SLURM_RLIMIT_CORE": "0"}
    script = "umask; ulimit -c; env | grep -c RLIMIT"
    _, texts = run(link, node.launch(25, "sh", "-c", script, env=env), 2)
    assert texts["0:1"] == b"0027\n0\n0\n"


def test_stdin_reaches_all_tasks(node: Node, link: Controller) -> None:
    link.send(node.launch(26, "cat", ntasks=3))
    attach(link, 26)
    data = os.urandom(300_000)
    for start in range(0, len(data), 100_000):
        part = pack(data[start : start + 100_000])
        message = aw.Input(job_id=26, step_id="0", attempt=1, data=part, offset=start)
        link.send(message)
        link.send(message)  # a repeated part is not written twice
    link.send(aw.Input(job_id=26, step_id="0", attempt=1, offset=len(data), eof=True))
    texts = collect(link, 26, 6)
    assert [texts[f"{task}:1"] for task in range(3)] == [data] * 3


def test_stdin_for_one_task_only(node: Node, link: Controller) -> None:
    link.send(node.launch(27, "cat", ntasks=2, std_in="1"))
    attach(link, 27)
    link.send(aw.Input(job_id=27, step_id="0", attempt=1, data="line\n", eof=True, task=1))
    texts = collect(link, 27, 4)
    assert (texts["0:1"], texts["1:1"]) == (b"", b"line\n")


def test_stdin_from_a_file_per_task(node: Node, link: Controller) -> None:
    for rank in range(2):
        (node.work / f"in{rank}").write_text(f"file {rank}\n")
    _, texts = run(link, node.launch(28, "cat", ntasks=2, std_in="in%t"), 4)
    assert (texts["0:1"], texts["1:1"]) == (b"file 0\n", b"file 1\n")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("o_%j_%s_%t.txt", ["o_30_0_0.txt", "o_30_0_1.txt"]),
        ("o_%3t_%n_%N", ["o_000_0_n1", "o_001_0_n1"]),
        ("o_%x_%u_%J_%b_%%", ["o_nm_me_30.0_%b_%"]),
        ("o_%4a_%A", ["o_0012_29"]),
        ("o\\%t", ["o%t"]),
    ],
)
def test_output_patterns(node: Node, link: Controller, pattern: str, names: list[str]) -> None:
    launch = node.launch(
        30,
        "sh",
        "-c",
        "echo out; echo err >&2",
        ntasks=2,
        std_out=pattern,
        names={"x": "nm", "u": "me", "a": "12", "A": "29"},
        user="me",
    )
    link.send(launch)
    link.until(aw.StepEnded)
    assert sorted(path.name for path in node.work.iterdir()) == names
    lines = "".join((node.work / name).read_text() for name in names).split()
    assert sorted(lines) == ["err", "err", "out", "out"]


def test_separate_error_file_and_append(node: Node, link: Controller) -> None:
    for mode, job in (("", 31), ("append", 32)):
        launch = node.launch(
            job,
            script="#!/bin/sh\necho out; echo err >&2\n",
            std_out="o",
            std_err="e",
            open_mode=mode,
        )
        (node.work / "o").write_text("old\n")
        link.send(launch)
        link.until(aw.StepEnded, job_id=job)
        expected = "old\nout\n" if mode else "out\n"
        assert (node.work / "o").read_text() == expected
    assert (node.work / "e").read_text() == "err\nerr\n"


def test_output_folder_missing(node: Node, link: Controller) -> None:
    link.send(node.launch(33, script="#!/bin/sh\ntouch ran\n", std_out="nosuch/out"))
    failed = link.until(aw.LaunchFailed)
    assert failed.errno_text == "No such file or directory"
    assert failed.reason == f"Could not open {node.work}/nosuch/out"  # the text comes once
    assert not (node.work / "ran").exists()
    again = node.link()
    again.until(aw.Register)
    assert again.until(aw.LaunchFailed).errno_text == failed.errno_text
    again.send(aw.Forget(steps=[(33, "batch", 1)]))
    wait_for("dropped journal", lambda: not (node.dir / "spool" / "33.batch.1").exists())


def test_work_dir_missing(node: Node, link: Controller) -> None:
    out = node.work / "out"
    script = "#!/bin/sh\npwd\n"
    link.send(node.launch(34, script=script, std_out=str(out), work_dir="/nosuchfolder"))
    ended = link.until(aw.StepEnded)
    assert ended.exits[0].code == 0
    line = (
        "slurmstepd-n1: error: couldn't chdir to `/nosuchfolder': "
        "No such file or directory: going to /tmp instead\n"
    )
    assert out.read_text() == line * 2 + "/tmp\n"


def test_other_user_needs_a_root_agent(node: Node, link: Controller) -> None:
    """As root the task changes its user; an ordinary agent refuses."""
    link.send(node.launch(35, "id", "-u", uid=65534, gid=65534))
    attach(link, 35)
    if os.getuid() == 0:
        texts = collect(link, 35, 2)
        assert texts["0:1"] == b"65534\n"
    else:
        assert "uid 65534" in link.until(aw.LaunchFailed).reason


def test_terminal(node: Node, link: Controller) -> None:
    link.send(node.launch(36, "sh", "-c", "tty; test -t 0 && test -t 1 && echo both", pty=True))
    attach(link, 36)
    texts = collect(link, 36, 1)
    first, second = texts["0:1"].split(b"\r\n")[:2]
    assert first.startswith(b"/dev/pts/")
    assert second == b"both"


def test_output_waits_for_srun_and_the_task_waits_for_room(node: Node, link: Controller) -> None:
    """5 MB: more than is buffered, so the writer must block until srun reads."""
    marker = node.work / "done"
    command = f"head -c 5000000 /dev/zero; touch {marker}"
    link.send(node.launch(37, "sh", "-c", command))
    link.until(aw.StepStarted)
    link.send(aw.Signal(job_id=37, step_id="0", attempt=1, signum=0))
    assert not marker.exists()
    attach(link, 37)
    texts = collect(link, 37, 2)
    assert texts["0:1"] == bytes(5_000_000)
    assert marker.exists()
    assert not [one for one in link.seen if isinstance(one, aw.LaunchFailed)]


def test_output_goes_on_after_cuts_at_every_few_bytes(node: Node) -> None:
    """Each link takes a few bytes and is cut; the next attaches at that offset."""
    text = b"".join(b"line %d\n" % number for number in range(12))
    first = node.link()
    first.send(node.launch(38, "printf", "%s", text))
    got = b""
    rounds = 0
    while len(got) < len(text):
        link = node.link()
        link.until(aw.Register)
        attach(link, 38, t0_1=len(got))
        message = link.until(aw.Output, fd=1)
        while message.offset > len(got):  # on its way before we attached
            message = link.until(aw.Output, fd=1)
        whole = got[: message.offset] + message.data.encode()
        assert whole == text[: len(whole)]
        got = text[: len(got) + 7]
        link.send(aw.OutputAck(job_id=38, step_id="0", attempt=1, offsets={"0:1": len(got)}))
        link.close()
        rounds += 1
    assert rounds > 10


def test_signals_reach_tasks_or_the_batch_shell_only(node: Node, link: Controller) -> None:
    script = (
        "#!/bin/bash\ntrap 'echo shell' USR1\n"
        "bash -c 'trap \"echo child\" USR1; echo ready > ready; while :; do sleep 0.05; done' &\n"
        "while :; do wait; done\n"
    )
    link.send(node.launch(39, script=script, std_out="out"))
    link.until(aw.StepStarted)
    out = node.work / "out"
    wait_for("child", (node.work / "ready").exists)
    usr1 = signal.SIGUSR1
    link.send(aw.Signal(job_id=39, step_id="batch", attempt=0, signum=usr1))  # older: dropped
    link.send(aw.Signal(job_id=39, step_id="batch", attempt=1, signum=usr1, batch_shell=True))
    wait_for("shell's trap", lambda: out.read_text() == "shell\n")
    link.send(aw.Signal(job_id=39, step_id="batch", attempt=1, signum=usr1))
    # (The "sleep" of the loop dies of it too, which bash may tell.)
    lines = ("child\n", "shell\nshell\n")
    wait_for("both traps", lambda: all(one in sort_lines(out.read_text()) for one in lines))
    notice = "*** JOB 39 ON n1 CANCELLED ***"
    link.send(
        aw.Signal(job_id=39, step_id="x", attempt=1, signum=15, all_steps=True, notice=notice)
    )
    ended = link.until(aw.StepEnded)
    assert ended.exits[0].signal == signal.SIGTERM
    assert f"slurmstepd-n1: error: {notice}\n" in out.read_text()


def test_pids_are_real(node: Node, link: Controller) -> None:
    link.send(node.launch(40, "sleep", "100", ntasks=2))
    pids = link.until(aw.StepStarted).pids
    groups = {os.getpgid(pid) for pid in pids.values()}
    sessions = {os.getsid(pid) for pid in pids.values()}
    assert groups == set(pids.values())
    assert len(sessions) == 1
    comm = Path(f"/proc/{pids['0']}/comm")
    wait_for("exec", lambda: comm.read_text() == "sleep\n")  # the start is told at the fork
    link.send(aw.EndStep(job_id=40, step_id="0", attempt=1))
    ended = link.until(aw.StepEnded)
    assert [one.signal for one in ended.exits] == [9, 9]


def test_fifo_without_a_reader_fails_at_once(node: Node, link: Controller) -> None:
    os.mkfifo(node.work / "fifo")
    link.send(node.launch(41, script="#!/bin/sh\n", std_out="fifo"))
    assert link.until(aw.LaunchFailed).errno_text == "No such device or address"


def test_name_with_a_nul(node: Node, link: Controller) -> None:
    link.send(node.launch(42, script="#!/bin/sh\n", std_out="a\0b"))
    assert "not understood" in link.until(aw.LaunchFailed).reason
    link.send(node.launch(43, "echo", b"a\0b"))
    attach(link, 43)
    texts = collect(link, 43, 2)
    assert texts["0:2"] == b"slurmstepd-n1: error: execve(): embedded null byte\n"
