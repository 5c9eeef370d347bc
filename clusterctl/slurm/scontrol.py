"""scontrol: look at the cluster and change it."""

from __future__ import annotations

import sys

from clusterctl.slurm import client
from clusterctl.slurm.errors import CommandError, ControllerError, NoController
from clusterctl.slurm.getopt import UNSUPPORTED, Parser
from clusterctl.slurm.options_query import SCONTROL
from clusterctl.slurm.output import err, error, out, say, version_text, words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.slurm.scontrol_show import Flags

_OVER = "Job/step already completing or completed"

#: Commands, most used first: an abbreviation means the first that it fits.
_KEYWORDS = [
    "show",
    "update",
    "hold",
    "release",
    "requeue",
    "requeuehold",
    "uhold",
    "suspend",
    "resume",
    "ping",
    "version",
    "top",
    "wait_job",
    "write",
    "notify",
    "exit",
    "quit",
    "help",
    "verbose",
    "quiet",
    "oneliner",
    "details",
    "all",
    "hide",
    "reconfigure",
    "reboot",
    "cancel_reboot",
    "create",
    "delete",
    "shutdown",
    "takeover",
    "listpids",
    "pidinfo",
    "setdebug",
    "setdebugflags",
    "schedloglevel",
    "abort",
    "checkpoint",
    "completing",
    "cluster",
    "errnumstr",
    "fsdampeningfactor",
    "getaddrs",
    "power",
    "reboot_nodes",
    "scontrol",
    "token",
]

_NOT_BUILT = [
    "notify",
    "reconfigure",
    "reboot",
    "cancel_reboot",
    "create",
    "delete",
    "shutdown",
    "takeover",
    "listpids",
    "pidinfo",
    "setdebug",
    "setdebugflags",
    "schedloglevel",
    "abort",
    "checkpoint",
    "completing",
    "cluster",
    "errnumstr",
    "fsdampeningfactor",
    "getaddrs",
    "power",
    "reboot_nodes",
    "token",
    "top",
]

_INSTEAD = {
    "shutdown": "use `clusterctl down`",
    "takeover": "there is one controller; `clusterctl up` restarts it",
    "reconfigure": "`clusterctl down` and `clusterctl up` read the cluster file again",
}


def usage() -> str:
    """The text of ``--help``."""
    parser = Parser("scontrol", SCONTROL, usage_exit=1)
    about = (
        "Commands: show job|node|partition|config|step|hostnames|hostlist [name],\n"
        "hold, uhold, release, requeue, requeuehold, suspend, resume JOB...,\n"
        "update jobid=... | nodename=... key=value..., write batch_script JOB [file|-],\n"
        "wait_job JOB, ping, version"
    )
    text = parser.help_text("", about)
    return f"{'scontrol [<OPTION>] [<COMMAND>]':<75}\n" + text.partition("\n")[2]


def _keyword(word: str) -> str | None:
    lower = word.lower()
    if lower in _KEYWORDS:
        return lower
    found = [k for k in _KEYWORDS if len(lower) >= 2 and k.startswith(lower)]
    return found[0] if found else None


def _ping() -> int:
    try:
        host = client.call({"type": "Ping"}).get("host", "")
    except NoController as gone:
        import os

        out(f"Slurmctld(primary) at {os.uname().nodename} is DOWN\n")
        say("scontrol", gone.hint)
        return 1
    out(f"Slurmctld(primary) at {host} is UP\n")
    return 0


def _job_ids(args: list[str]) -> list[str]:
    """Ids from the arguments; ``jobname=NAME`` stands for the jobs of that name."""
    found: list[str] = []
    for arg in args:
        key, equals, value = arg.partition("=")
        if equals and key.lower() in ("jobname", "name"):
            jobs = client.call({"type": "GetJobs", "names": words(value), "states": ["all"]})
            found += [str(job["id"]) for job in jobs["jobs"]]
        elif equals and key.lower() in ("jobid", "job"):
            found += words(value)
        elif equals:
            raise error("scontrol", f"{arg} {UNSUPPORTED}")
        else:
            found += words(arg)
    return found


def _control(op: str, args: list[str]) -> int:
    """hold, release, requeue, ...: one line for each job that it failed for."""
    ids = _job_ids(args)
    if not ids:
        raise CommandError(f"too few arguments for keyword:{op}")
    for text in ids:
        base = text.partition("_")[0]
        if not (base.isascii() and base.isdigit()):
            raise CommandError("Invalid job id specified", f"Invalid job id {text}")
    results = client.call({"type": "Control", "op": op, "ids": ids})["results"]
    last = ""
    for result in results:
        code, message = result.get("code", ""), result.get("message", "")
        if not code:
            continue
        if op in ("hold", "uhold", "release"):
            if code == "denied":
                message = "Invalid user id"
            elif message == _OVER:
                message = "Job has already finished"
        last = message
        err(f"{message} for job {result['id']}\n")
    if last and op in ("hold", "uhold", "release"):
        err(f"slurm_suspend error: {last}\n")
    return 1 if last else 0


def _wait_job(args: list[str]) -> int:
    job_id = args[0] if args else ""
    if not (job_id.isascii() and job_id.isdigit()):
        raise CommandError(f"scontrol: error: invalid job id for wait_job: {job_id}")
    message = {"type": "WaitJob", "job_id": int(job_id), "until": "allocated"}
    jobs = client.call_again(message, patience_s=client.FOREVER_S)["jobs"]
    if not any(job.get("state") == "RUNNING" for job in jobs):
        raise CommandError(f"scontrol: error: job {job_id} has ended")
    say("scontrol", f"Nodes are ready for job {job_id}")
    return 0


def _write(args: list[str]) -> int:
    """``write batch_script JOB [file|-]``."""
    from scheduler.api.text import unpack

    if len(args) < 2 or not "batch_script".startswith(args[0].lower()) or len(args[0]) < 3:
        raise CommandError(f"scontrol: error: write {' '.join(args)} {UNSUPPORTED}")
    if not (args[1].isascii() and args[1].isdigit()):
        raise CommandError(f"scontrol: error: invalid job id: {args[1]}")
    body = unpack(client.call({"type": "GetScript", "job_id": int(args[1])})["script"])
    name = args[2] if len(args) > 2 else f"slurm-{args[1]}.sh"
    if name == "-":
        sys.stdout.buffer.write(body)
        return 0
    try:
        with open(name, "wb") as file:
            file.write(body)
    except OSError as bad:
        raise CommandError(f"scontrol: error: cannot write {name}: {bad.strerror}") from None
    out(f"batch script for job {args[1]} written to {name}\n")
    return 0


def _one(flags: Flags, args: list[str]) -> int:
    """One command; its exit status."""
    keyword = _keyword(args[0])
    rest = args[1:]
    if keyword is None:
        raise CommandError(f"invalid keyword: {args[0]}")
    if keyword == "show":
        from clusterctl.slurm.scontrol_show import show

        return show(flags, rest)
    if keyword == "update":
        from clusterctl.slurm.scontrol_update import update

        return update(rest)
    if keyword in ("hold", "uhold", "release", "requeue", "requeuehold", "suspend", "resume"):
        return _control(keyword, rest)
    simple: dict[str, Callable[[], int]] = {"ping": _ping}
    if keyword in simple:
        return simple[keyword]()
    if keyword == "wait_job":
        return _wait_job(rest)
    if keyword == "write":
        return _write(rest)
    if keyword == "version":
        out(version_text())
        return 0
    if keyword == "help":
        out(usage())
        return 0
    if keyword in _NOT_BUILT:
        hint = f": {_INSTEAD[keyword]}" if keyword in _INSTEAD else ""
        raise CommandError(f"scontrol: error: {keyword} {UNSUPPORTED}{hint}")
    return _set_flag(flags, keyword)


def _set_flag(flags: Flags, keyword: str) -> int:
    """Words of the interactive mode."""
    if keyword == "oneliner":
        flags.oneliner = True
    elif keyword == "details":
        flags.details = True
    return 0


def _interactive(flags: Flags) -> int:
    """Commands from standard input, until its end or ``quit``."""
    from clusterctl.slurm.directives import split_words

    echo = not sys.stdin.isatty()
    status = 0
    while True:
        out("scontrol: ")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            out("\n")
            return status
        if echo:
            out(line if line.endswith("\n") else line + "\n")
        args = split_words(line.strip())
        if not args:
            continue
        if _keyword(args[0]) in ("quit", "exit"):
            return status
        try:
            status = _one(flags, args)
        except CommandError as bad:
            err("".join(text + "\n" for text in bad.lines))
            status = bad.exit_code
        except ControllerError as bad:
            say("scontrol", f"error: {bad.message}")
            status = 1


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    from clusterctl.slurm.scontrol_show import Flags

    parser = Parser("scontrol", SCONTROL, usage_exit=1)
    given, rest = parser.parse(argv, permute=False)
    names = {opt.long for opt, _ in given}
    for opt, value in given:
        if opt.kind:
            raise error("scontrol", f"--{opt.long} {opt.kind}")
        if opt.long in ("clusters", "cluster") and value != "all":
            from clusterctl.slurm.sbatch import check_cluster

            check_cluster("scontrol", value or "")
    if names & {"help", "usage"}:
        out(usage())
        return 0
    if "version" in names:
        out(version_text())
        return 0
    flags = Flags(details="details" in names, oneliner="oneliner" in names)
    return _one(flags, rest) if rest else _interactive(flags)
