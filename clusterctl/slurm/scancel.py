"""scancel: cancel or signal jobs, tasks of arrays and steps."""

from __future__ import annotations

import os
import sys

from clusterctl.slurm import client, values
from clusterctl.slurm.errors import CommandError
from clusterctl.slurm.getopt import Parser
from clusterctl.slurm.options_query import SCANCEL
from clusterctl.slurm.output import error, out, say, uid_of, version_text, words
from scheduler.api.text import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_USAGE = "scancel [OPTIONS] [job_id[_array_id][.step_id]]"
#: Exit codes that Slurm's scancel ends with: its error number, cut to a byte.
_DENIED_EXIT = 210
_UNKNOWN_STEP_EXIT = 225

_STATES = {"PENDING": "PD", "RUNNING": "R", "SUSPENDED": "S"}


def _valid_id(text: str) -> bool:
    """``12``, ``12_3``, ``12_[1-4,7]``, ``12.0``, ``12.batch``."""
    job, dot, step = text.partition(".")
    base, underscore, task = job.partition("_")
    if not (base.isascii() and base.isdigit() and int(base) > 0):
        return False
    if dot and not (step.isascii() and (step.isdigit() or step in ("batch", "interactive"))):
        return False
    if not underscore:
        return True
    inner = task[1:-1] if task.startswith("[") and task.endswith("]") else task
    return bool(inner) and all(c in "0123456789,-:" for c in inner)


def _split_ids(text: str) -> list[str]:
    """Ids separated by commas outside brackets."""
    found = []
    depth = 0
    start = 0
    for i, char in enumerate(text + ","):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            if i > start:
                found.append(text[start:i])
            start = i + 1
    return found


def _states(text: str) -> list[str]:
    found = []
    for part in words(text):
        name = part.upper()
        name = next((long for long, short in _STATES.items() if name in (long, short)), name)
        if name not in _STATES:
            from scheduler.api.states import JOB_STATES

            known = {**{v: k for k, v in JOB_STATES.items()}, **{k: k for k in JOB_STATES}}
            if name not in known:
                raise CommandError(
                    f"Invalid job state specified: {part}",
                    "Valid job states are PENDING, RUNNING, and SUSPENDED",
                )
            name = known[name]
        found.append(name)
    return found


class _Command:
    def __init__(self) -> None:
        self.request: dict[str, Any] = {"type": "Cancel"}
        self.filters = False
        self.verbose = 0
        self.quiet = False
        self.interactive = False

    def option(self, name: str, value: str, kind: str) -> None:
        request = self.request
        lists = {
            "account": "accounts",
            "name": "names",
            "jobname": "names",
            "partition": "partitions",
            "qos": "qos",
        }
        if kind:
            raise error("scancel", f"--{name} {kind}")
        if name in lists:
            request[lists[name]] = words(value)
            self.filters = True
        elif name == "state":
            request["states"] = _states(value)
            self.filters = True
        elif name in ("user", "me"):
            uid = os.getuid() if name == "me" else uid_of(value)
            if uid is None:
                raise error("scancel", f"Invalid user name: {value}")
            request["users"] = [str(uid)]
            self.filters = True
        elif name == "nodelist":
            request["nodes"] = values.host_names("scancel", value)
            self.filters = True
        elif name == "signal":
            number = values.signal_number(value)
            if number is None:
                raise CommandError(f"Unknown job signal: {value}")
            request["signal"] = number
        elif name == "batch":
            request["batch_only"] = True
        elif name == "full":
            request["full"] = True
        elif name == "clusters":
            from clusterctl.slurm.sbatch import check_cluster

            check_cluster("scancel", value)
        elif name == "verbose":
            self.verbose += 1
        elif name == "quiet":
            self.quiet = True
        elif name == "interactive":
            self.interactive = True


def _confirmed(ids: list[str]) -> list[str]:
    """Those ids that the person at the terminal says yes to."""
    kept = []
    for text in ids:
        jobs = client.call({"type": "GetJobs", "ids": [text.partition(".")[0]]})["jobs"]
        what = f" name={show(jobs[0]['name'])} partition={jobs[0]['partition']}" if jobs else ""
        out(f"Cancel job_id={text}{what} [y/n]? ")
        sys.stdout.flush()
        answer = sys.stdin.readline()  # the end of the input is a no
        if answer.strip().lower() in ("y", "yes"):
            kept.append(text)
    return kept


def _report(command: _Command, results: list[dict[str, Any]]) -> int:
    status = 0
    signalling = bool(command.request.get("signal"))
    for result in results:
        text, code, message = result["id"], result.get("code", ""), result.get("message", "")
        if command.verbose:
            what = "step" if "." in text else "job"
            verb = f"Signal {command.request['signal']} to" if signalling else "Terminating"
            say("scancel", f"{verb} {what} {text}")
        if not code:
            continue
        step = "." in text
        shown = text.partition(".")[0]
        line = f"error: Kill job error on job {'step ' if step else ''}id {shown}: {message}"
        if code == "denied":
            say("scancel", line)
            status = _DENIED_EXIT
        elif step:
            if not command.quiet:
                say("scancel", line)
                say("scancel", line)
            status = status or _UNKNOWN_STEP_EXIT
        elif (signalling and code != "not_found") or signalling:
            say("scancel", line)
            status = status or 1
        elif command.verbose:
            say("scancel", line)
    return status


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    parser = Parser("scancel", SCANCEL, usage_exit=1)
    given, rest = parser.parse(argv, permute=True)
    command = _Command()
    for opt, value in given:
        if opt.long == "help":
            out(parser.help_text(_USAGE, "Cancel or signal jobs, array tasks and job steps."))
            return 0
        if opt.long == "usage":
            out(f"Usage: {_USAGE}\n")
            return 0
        if opt.long == "version":
            out(version_text())
            return 0
        command.option(opt.long, value or "", opt.kind)
    ids = [text for word in rest for text in _split_ids(word)]
    for text in ids:
        if not _valid_id(text):
            raise error("scancel", f"Invalid job id {text}")
    if not ids and not command.filters:
        raise error("scancel", "No job identification provided")
    if command.interactive:
        ids = _interactive(command, ids)
        if not ids:
            return 0
    elif command.verbose and not ids:
        ids = _matching(command.request)  # only those are to be named
        if not ids:
            return 0
    command.request["ids"] = ids
    reply = client.call(command.request)
    return _report(command, reply["results"])


def _interactive(command: _Command, ids: list[str]) -> list[str]:
    return _confirmed(ids or _matching(command.request))


def _matching(request: dict[str, Any]) -> list[str]:
    """Ids of the jobs that the filters mean."""
    fields = ("users", "states", "partitions", "names", "accounts", "qos", "nodes")
    query = {f: request[f] for f in fields if f in request}
    jobs = client.call({"type": "GetJobs", **query})["jobs"]
    return [str(job["id"]) for job in jobs]
