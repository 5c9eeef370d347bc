"""Death of agents, supervisors, fork servers; leftovers; duplicates; fencing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent import procs
from scheduler.api import agentwire as aw
from tests.agent.rig import ROOT, Controller, Node, attach, collect, wait_for

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if len(sys.argv) > 2:
            os.environ.clear()
            os.execve("/bin/sleep", ["sleep", "1000"], {}) if sys.argv[2] == "exec" else None
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def gone(pid: int) -> bool:
    found = procs.stat(pid)
    return found is None or found.state in "ZX"


def fork_server(node: Node) -> int:
    assert node.process is not None
    agent = node.process.pid
    (found,) = [one.pid for one in procs.all_stats() if one.ppid == agent]
    return found


def daemon_script(node: Node) -> tuple[str, Path]:
    program = node.work / "daemon.py"
    program.write_text(DAEMON)
    pid_file = node.work / "pid"
    return f"#!/bin/sh\n{sys.executable} {program} {pid_file}\n", pid_file


def test_agent_killed_tasks_live_on_and_codes_are_reported(node: Node, link: Controller) -> None:
    fifo = node.work / "fifo"
    os.mkfifo(fifo)
    link.send(node.launch(50, script="#!/bin/sh\nread x <fifo\nexit $x\n"))
    link.send(node.launch(51, script="#!/bin/sh\nread x <fifo2\nexit $x\n"))
    os.mkfifo(node.work / "fifo2")
    pids = [link.until(aw.StepStarted).pids["0"] for _ in range(2)]
    node.kill()
    assert all(not gone(pid) for pid in pids)
    fifo.write_text("5\n")  # ends while no agent is there
    wait_for("outcome in the journal", (node.dir / "spool/50.batch.1/exit.json").exists)
    node.start()
    link = node.link()
    steps = {one.job_id: one for one in link.until(aw.Register).steps}
    assert not steps[50].running
    assert [one.code for one in steps[50].exits] == [5]
    assert steps[51].running
    assert link.until(aw.StepEnded, job_id=50).exits[0].code == 5
    (node.work / "fifo2").write_text("6\n")
    assert link.until(aw.StepEnded, job_id=51).exits[0].code == 6
    link.send(aw.Forget(steps=[(50, "batch", 1), (51, "batch", 1)]))
    wait_for("empty journal", lambda: not list((node.dir / "spool").glob("5*")))


def test_agent_killed_output_goes_on(node: Node, link: Controller) -> None:
    go = node.work / "go"
    script = "echo one; while ! test -e go; do sleep 0.02; done; echo two"
    link.send(node.launch(52, "sh", "-c", script))
    attach(link, 52)
    assert link.until(aw.Output).data == "one\n"
    node.kill()
    node.start()
    link = node.link()
    go.touch()
    attach(link, 52, t0_1=4)
    texts = {}
    message = link.until(aw.Output, fd=1)
    texts[message.offset] = message.data
    assert texts == {4: "two\n"}


def test_supervisor_killed(node: Node, link: Controller) -> None:
    """Its tasks, also one in a session of its own, are found and ended; lost is said."""
    script, pid_file = daemon_script(node)
    link.send(node.launch(53, script=script + "exec sleep 1000\n"))
    task = link.until(aw.StepStarted).pids["0"]
    wait_for("daemon", lambda: pid_file.exists() and pid_file.read_text())
    daemon = int(pid_file.read_text())
    ((_, supervisor),) = node.supervisors()
    os.kill(supervisor, signal.SIGKILL)
    ended = link.until(aw.StepEnded)
    assert ended.lost
    assert ended.clean
    assert gone(task)
    assert gone(daemon)


def test_supervisor_killed_while_the_agent_is_away(node: Node, link: Controller) -> None:
    script, pid_file = daemon_script(node)
    link.send(node.launch(54, script=script + "exec sleep 1000\n"))
    task = link.until(aw.StepStarted).pids["0"]
    wait_for("daemon", lambda: pid_file.exists() and pid_file.read_text())
    daemon = int(pid_file.read_text())
    ((_, supervisor),) = node.supervisors()
    node.kill()
    os.kill(supervisor, signal.SIGKILL)
    assert not gone(task)
    node.start()
    link = node.link()
    link.send(aw.EndJob(job_id=54, attempt=1))
    link.until(aw.JobCleaned, job_id=54)
    assert gone(task)
    assert gone(daemon)
    assert [one.lost for one in link.all(aw.StepEnded)][-1:] == [True]


def test_orphan_without_its_environment_is_ended(node: Node, link: Controller) -> None:
    """New session, empty environment, parents gone: only the fork server can find it."""
    program = node.work / "hide.py"
    program.write_text(
        "import os, sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        open(sys.argv[1] + '.part', 'w').write(str(os.getpid()))\n"
        "        os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "        os.execve('/bin/sleep', ['sleep', '1000'], {})\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    pid_file = node.work / "pid"
    script = f"#!/bin/sh\n{sys.executable} {program} {pid_file}\nexec sleep 1000\n"
    link.send(node.launch(55, script=script))
    wait_for("hidden process", pid_file.exists)
    hidden = int(pid_file.read_text())
    wait_for("exec", lambda: not procs.environment(hidden))
    ((_, supervisor),) = node.supervisors()
    os.kill(supervisor, signal.SIGKILL)
    link.until(aw.StepEnded)
    wait_for("end of the hidden process", lambda: gone(hidden))


def test_daemon_left_by_the_script_is_ended(node: Node, link: Controller) -> None:
    script, pid_file = daemon_script(node)
    link.send(node.launch(56, script=script + "exit 4\n"))
    ended = link.until(aw.StepEnded)
    assert ended.exits[0].code == 4
    assert gone(int(pid_file.read_text()))


def test_fork_server_killed_steps_live_on(node: Node, link: Controller) -> None:
    link.send(
        node.launch(57, script="#!/bin/sh\nwhile ! test -e go; do sleep 0.02; done; exit 9\n")
    )
    link.until(aw.StepStarted)
    server = fork_server(node)
    os.kill(server, signal.SIGKILL)
    wait_for("fork server's end", lambda: gone(server))
    link.send(node.launch(58, script="#!/bin/sh\nexit 8\n"))
    assert link.until(aw.StepEnded).exits[0].code == 8
    (node.work / "go").touch()
    assert link.until(aw.StepEnded, job_id=57).exits[0].code == 9


def test_repeated_launch_runs_once(node: Node, link: Controller) -> None:
    launch = node.launch(59, script="#!/bin/sh\necho x >>runs; exit 2\n")
    for _ in range(3):
        link.send(launch)
    link.until(aw.StepEnded)
    link.send(launch)
    assert link.until(aw.StepEnded).exits[0].code == 2
    node.kill()
    node.start()
    link = node.link()
    link.send(launch)
    assert link.until(aw.StepEnded).exits[0].code == 2
    assert (node.work / "runs").read_text() == "x\n"


def test_newer_attempt_ends_the_older_first(node: Node, link: Controller) -> None:
    link.send(node.launch(60, script="#!/bin/sh\nexec sleep 1000\n"))
    old = link.until(aw.StepStarted).pids["0"]
    link.send(node.launch(60, script="#!/bin/sh\nexit 1\n", attempt=2))
    link.until(aw.StepEnded, attempt=1)
    assert gone(old)
    assert link.until(aw.StepEnded, attempt=2).exits[0].code == 1
    link.send(node.launch(60, script="#!/bin/sh\ntouch wrong\n", attempt=1, step="7"))
    link.send(aw.EndStep(job_id=61, step_id="0", attempt=1))
    assert link.until(aw.StepEnded).job_id == 61
    assert not (node.work / "wrong").exists()


def test_end_of_an_unknown_job(node: Node, link: Controller) -> None:
    link.send(aw.EndJob(job_id=999, attempt=3))
    assert link.until(aw.JobCleaned) == aw.JobCleaned(job_id=999, attempt=3)


def test_end_job_ends_all_its_steps(node: Node, link: Controller) -> None:
    link.send(node.launch(62, script="#!/bin/sh\nexec sleep 1000\n", std_out="out"))
    link.send(node.launch(62, "sleep", "1000", ntasks=2))
    pids = [*link.until(aw.StepStarted).pids.values(), *link.until(aw.StepStarted).pids.values()]
    link.send(aw.EndJob(job_id=62, attempt=1, notice="*** JOB 62 ON n1 CANCELLED ***"))
    link.until(aw.JobCleaned, job_id=62)
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)
    assert "CANCELLED" in (node.work / "out").read_text()
    assert [one.clean for one in link.all(aw.StepEnded)][-2:] == [False, True]


def test_memory_limit(node: Node, link: Controller) -> None:
    script = (
        f"#!/bin/sh\n{sys.executable} -c 'import time; x = bytearray(200 << 20); time.sleep(60)'\n"
    )
    link.send(node.launch(63, script=script, mem_mib=100, std_out="out"))
    ended = link.until(aw.StepEnded)
    assert ended.exits[0].oom
    assert ended.exits[0].signal == signal.SIGKILL
    assert ended.usage.max_rss_mib > 100
    assert "oom-kill event(s) in StepId=63.batch" in (node.work / "out").read_text()


def test_second_agent_is_refused(node: Node) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "nodeagent", "--dir", str(node.dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == 1
    assert "another agent runs in" in second.stderr


def test_links_of_older_controllers_are_refused(node: Node) -> None:
    first = node.link(epoch=5)
    first.until(aw.Register)
    older = node.link(epoch=4)
    with pytest.raises((EOFError, ConnectionError)):
        older.until(aw.Register)
    newer = node.link(epoch=6)
    newer.until(aw.Register)
    with pytest.raises((EOFError, ConnectionError)):
        first.until(aw.Register)


def test_stop_with_and_without_killing(node: Node, link: Controller) -> None:
    assert node.process is not None
    link.send(node.launch(64, script="#!/bin/sh\nexec sleep 1000\n"))
    pid = link.until(aw.StepStarted).pids["0"]
    link.send(aw.Stop())
    assert node.process.wait(10) == 0
    assert not gone(pid)
    node.start()
    link = node.link()
    link.send(aw.Stop(kill=True))
    assert node.process is not None
    assert node.process.wait(10) == 0
    assert gone(pid)


def test_long_paths(tmp_path: Path) -> None:
    from tests.agent.rig import running

    deep = tmp_path / ("d" * 80) / ("e" * 80)
    with running(deep) as node:
        link = node.link()
        link.send(node.launch(65, "echo", "hi"))
        attach(link, 65)
        assert collect(link, 65, 2)["0:1"] == b"hi\n"
