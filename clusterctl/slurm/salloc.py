"""salloc: an allocation, and a command that runs here while it lasts."""

from __future__ import annotations

import os
import select
import sys

from clusterctl.slurm import alloc, client, signals, values
from clusterctl.slurm.errors import CommandError
from clusterctl.slurm.getopt import Parser
from clusterctl.slurm.jobspec import Options
from clusterctl.slurm.options_job import ENV_SALLOC, SALLOC
from clusterctl.slurm.output import out, say, version_text
from clusterctl.slurm.submitenv import submission_env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_USAGE = "salloc [OPTIONS(0)...] [command(0) [args(0)...]]"
_INT, _QUIT, _HUP, _TERM, _CHLD = 2, 3, 1, 15, 17
#: How often a lost watch on the job is taken up again, milliseconds.
_WATCH_AGAIN_MS = 1000


def _parse(argv: list[str]) -> tuple[Options, list[str]]:
    parser = Parser("salloc", SALLOC, usage_exit=255)
    given, rest = parser.parse(argv, permute=False)
    names = {opt.long for opt, _ in given}
    options = Options("salloc")
    if "version" in names:
        out(version_text())
        options.extra["done"] = ""
    elif "help" in names:
        out(parser.help_text(_USAGE, "Allocate nodes and run a command (or a shell) here."))
        options.extra["done"] = ""
    elif "usage" in names:
        out(f"Usage: {_USAGE}\n")
        options.extra["done"] = ""
    else:
        options.apply_env(parser, ENV_SALLOC)
        for opt, value in given:
            options.apply(opt, value)
    return options, rest


def compress(counts: list[int]) -> str:
    """``[16, 16, 3]`` as ``16(x2),3``."""
    parts = []
    i = 0
    while i < len(counts):
        j = i
        while j < len(counts) and counts[j] == counts[i]:
            j += 1
        parts.append(f"{counts[i]}(x{j - i})" if j - i > 1 else str(counts[i]))
        i = j
    return ",".join(parts)


def job_environment(job: dict[str, Any], cluster: str) -> dict[str, str]:
    """SLURM_* of an allocation, for a command that runs outside of it."""
    allocs = job.get("allocs") or []
    res = job.get("res") or {}
    nodes = job.get("node_list", "")
    count = str(len(allocs))
    env = {
        "SLURM_CLUSTER_NAME": cluster,
        "SLURM_JOBID": str(job["id"]),
        "SLURM_JOB_ACCOUNT": job.get("account", ""),
        "SLURM_JOB_CPUS_PER_NODE": compress([a["cpus"] for a in allocs]),
        "SLURM_JOB_ID": str(job["id"]),
        "SLURM_JOB_NAME": job.get("name", ""),
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": count,
        "SLURM_JOB_PARTITION": job.get("partition", ""),
        "SLURM_JOB_QOS": job.get("qos", "normal"),
        "SLURM_NNODES": count,
        "SLURM_NODELIST": nodes,
        "SLURM_NODE_ALIASES": "(null)",
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_SUBMIT_HOST": os.uname().nodename,
        "SLURM_TASKS_PER_NODE": compress([a.get("tasks", 1) for a in allocs]),
    }
    tasks = res.get("ntasks") or res.get("ntasks_per_node", 0) * len(allocs)
    if tasks:
        env["SLURM_NTASKS"] = env["SLURM_NPROCS"] = str(tasks)
    for field, variable in (
        ("ntasks_per_node", "SLURM_NTASKS_PER_NODE"),
        ("cpus_per_task", "SLURM_CPUS_PER_TASK"),
        ("mem_per_cpu_mib", "SLURM_MEM_PER_CPU"),
        ("mem_per_node_mib", "SLURM_MEM_PER_NODE"),
    ):
        if res.get(field):
            env[variable] = str(res[field])
    return env


def _find(name: str) -> str | None:
    if "/" in name:
        return name if os.access(name, os.X_OK) else None
    for folder in os.environ.get("PATH", "").split(":"):
        path = os.path.join(folder or ".", name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _command_environment(job: dict[str, Any]) -> dict[str, str]:
    cluster = client.call({"type": "Ping"}).get("cluster", "")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_JOB", "SLURM_STEP"))}
    env |= job_environment(job, cluster)
    folder = os.path.join(client.home(), "bin")
    if os.path.isdir(folder) and folder not in env.get("PATH", "").split(":"):
        env["PATH"] = f"{folder}:{env.get('PATH', os.defpath)}"
    return env


class _Command:
    """The command while it runs; watches the job at the same time."""

    def __init__(self, job: dict[str, Any], options: Options, caught: signals.Signals) -> None:
        self.job_id: int = job["id"]
        self.env = _command_environment(job)
        self.quiet = "quiet" in options.extra
        self.caught = caught
        self.kill_signal = _kill_signal(options)
        self.revoked = False

    def run(self, argv: list[str]) -> int | None:
        """The wait status; None when the command cannot be started."""
        path = _find(argv[0])
        if path is None:
            say("salloc", f'error: _fork_command: Unable to find command "{argv[0]}"')
            return None
        # The command gets the signals' usual meaning back; salloc listens to its own.
        pid = os.posix_spawn(path, argv, self.env, setsigdef=[_INT, _QUIT, _HUP, _TERM, _CHLD])
        return self._watch(pid)

    def _watch(self, pid: int) -> int:
        watch = alloc.EndWatch(self.job_id)
        try:
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    return status
                poll = select.poll()
                poll.register(self.caught.fd, select.POLLIN)
                if watch.fd >= 0 and not self.revoked:
                    poll.register(watch.fd, select.POLLIN)
                timeout = _WATCH_AGAIN_MS if watch.fd < 0 and not self.revoked else None
                ready = {fd for fd, _ in poll.poll(timeout)}
                for signum in self.caught.taken():
                    if signum in (_HUP, _TERM):
                        os.kill(pid, signum)
                if not self.revoked and (watch.fd in ready or watch.fd < 0) and watch.ended():
                    self._on_revoked(pid)
        finally:
            watch.close()

    def _on_revoked(self, pid: int) -> None:
        self.revoked = True
        if not self.quiet:
            say("salloc", f"Job allocation {self.job_id} has been revoked.")
        if self.kill_signal:
            os.kill(pid, self.kill_signal)


def _kill_signal(options: Options) -> int:
    text = options.extra.get("kill-command")
    if text is None:
        return 0
    number = values.signal_number(text or "TERM")
    if number is None:
        raise values.bad("salloc", "kill-command")
    return number


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    options, command = _parse(argv)
    if "done" in options.extra:
        return 0
    options.check()
    _kill_signal(options)
    options.spec.setdefault("name", "interactive")
    quiet = "quiet" in options.extra
    with signals.Signals((_INT, _QUIT, _HUP, _TERM, _CHLD)) as caught:
        job_id = alloc.submit("salloc", options, submission_env("ALL"))
        job = alloc.wait_allocated("salloc", job_id, options, caught)
        if not quiet:
            say("salloc", f"Granted job allocation {job_id}")
        if "no-shell" in options.extra:
            return 0
        shell = os.environ.get("SHELL") or "/bin/sh"
        running = _Command(job, options, caught)
        status: int | None = None
        try:
            status = running.run(command or [shell])
        finally:
            code, signum = _codes(status)
            if not running.revoked:
                if not quiet:
                    say("salloc", f"Relinquishing job allocation {job_id}")
                alloc.release(job_id, code, signum)
    sys.stdout.flush()
    if status is None:
        raise CommandError(exit_code=1)
    return code


def _codes(status: int | None) -> tuple[int, int]:
    """Exit code and signal; a command ended by a signal counts as code 0, as in Slurm."""
    if status is None:
        return 1, 0
    if os.WIFSIGNALED(status):
        return 0, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), 0
