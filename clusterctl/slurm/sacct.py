"""sacct: accounting of jobs and steps."""

from __future__ import annotations

import os
import time

from clusterctl.slurm import client
from clusterctl.slurm.errors import CommandError
from clusterctl.slurm.getopt import Parser
from clusterctl.slurm.jobview import JobView, expand_tasks
from clusterctl.slurm.options_query import SACCT
from clusterctl.slurm.output import error, out, uid_of, version_text, words
from clusterctl.slurm.sacct_fields import Row, all_names, field
from scheduler.api.states import JOB_STATES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_USAGE = "sacct [OPTIONS]"
_DEFAULT = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
_BRIEF = "JobID,State,ExitCode"
_LONG = (
    "JobID,JobIDRaw,JobName,Partition,MaxRSS,MaxRSSNode,AveRSS,AveCPU,NTasks,AllocCPUS,Elapsed,"
    "State,ExitCode,ReqMem,AllocTRES"
)


class _Column:
    """A column; a negative width is left-justified."""

    def __init__(self, name: str, width: int, text: Callable[[Row], str]) -> None:
        self.name = name
        self.width = width
        self.text = text

    def fit(self, text: str) -> str:
        width = abs(self.width)
        if len(text) > width:
            text = text[: width - 1] + "+"
        return text.ljust(width) if self.width < 0 else text.rjust(width)


def _columns(text: str) -> list[_Column]:
    found = []
    for part in words(text):
        name, percent, width_text = part.partition("%")
        known = field(name)
        if known is None:
            raise error("sacct", f'Invalid field requested: "{name}"')
        width = known[1]
        if percent:
            try:
                width = int(width_text) or width
            except ValueError:
                raise error("sacct", f'Invalid field requested: "{part}"') from None
        found.append(_Column(known[0], width, known[2]))
    return found


def _ids(text: str) -> list[str]:
    found = []
    for part in words(text):
        job, dot, step = part.partition(".")
        base, underscore, task = job.partition("_")
        good = base.isascii() and base.isdigit()
        if underscore:
            good = good and task.isascii() and task.isdigit()
        if dot and step not in ("batch", "extern", "interactive"):
            good = good and step.isascii() and step.isdigit()
        if not good:
            raise CommandError(f"sacct: fatal: Bad job/step specified: {part}")
        found.append(part)
    return found


def _states(text: str) -> list[str]:
    compact = {short: long for long, short in JOB_STATES.items()}
    found = []
    for part in words(text):
        name = compact.get(part.upper(), part.upper())
        if name not in JOB_STATES:
            raise CommandError(f"sacct: fatal: unrecognized job state value '{part}'")
        found.append(name)
    return found


def _moment(text: str) -> float:
    from scheduler.api.times import TimeError, parse_begin

    try:
        return parse_begin(text, time.time(), past=True)
    except TimeError as bad:
        raise CommandError(bad.detail or "sacct: error: Invalid time specification") from None


class _Options:
    def __init__(self, argv: list[str]) -> None:
        self.parser = Parser("sacct", SACCT, usage_exit=1, advice=False)
        given, rest = self.parser.parse(argv, permute=True)
        self.values: dict[str, str] = {}
        if os.environ.get("SACCT_FORMAT"):
            self.values["format"] = os.environ["SACCT_FORMAT"]
        repeated = ("jobs", "state", "user", "name", "partition", "accounts")
        for opt, value in given:
            if opt.kind:
                raise error("sacct", f"--{opt.long} {opt.kind}")
            name = {"uid": "user"}.get(opt.long, opt.long)
            text = value or ""
            if name in repeated and self.values.get(name):
                text = f"{self.values[name]},{text}"
            self.values[name] = text
        if rest:
            raise error("sacct", f"Unrecognized option: {rest[0]}")

    def has(self, name: str) -> bool:
        return name in self.values

    def request(self) -> dict[str, Any]:
        """The ``GetAccounting`` message."""
        values = self.values
        request: dict[str, Any] = {"type": "GetAccounting"}
        lists = {"name": "names", "partition": "partitions", "accounts": "accounts"}
        request.update({f: words(values[o]) for o, f in lists.items() if o in values})
        if values.get("jobs"):
            request["ids"] = _ids(values["jobs"])
        if values.get("state"):
            request["states"] = _states(values["state"])
        users = []
        for name in words(values.get("user")):
            uid = uid_of(name)
            if uid is None:
                raise error("sacct", f"Invalid user id: {name}")
            users.append(str(uid))
        if self.has("me") or (not users and self._only_mine()):
            users.append(str(os.getuid()))
        if users:
            request["users"] = users
        self._window(request)
        return request

    def _only_mine(self) -> bool:
        return os.getuid() != 0 and not self.has("allusers") and not self.has("jobs")

    def _window(self, request: dict[str, Any]) -> None:
        now_s = time.time()
        if self.has("starttime"):
            request["start_s"] = _moment(self.values["starttime"])
        elif "ids" not in request:
            local = time.localtime(now_s)
            day = (local.tm_year, local.tm_mon, local.tm_mday, 0, 0, 0, 0, 0, -1)
            request["start_s"] = time.mktime(day)
        if self.has("endtime"):
            request["end_s"] = _moment(self.values["endtime"])
        elif "states" in request and self.has("starttime"):
            # Slurm: states without an end of the window look at its first moment only
            request["end_s"] = request["start_s"]

    def unit(self) -> str:
        text = self.values.get("units", "").upper()
        if text and text not in ("K", "M", "G", "T", "P"):
            raise error("sacct", f"Invalid --units specification: {self.values['units']}")
        return text


def _rows(options: _Options, reply: dict[str, Any]) -> list[Row]:
    now_s = reply.get("now_s", 0.0)
    unit = options.unit()
    nodes = None
    if options.has("nodelist"):
        from clusterctl.slurm.values import host_names

        nodes = set(host_names("sacct", options.values["nodelist"]))
    qos = words(options.values.get("qos"))
    jobs = [
        JobView(job, now_s)
        for record in reply["jobs"]
        for job in (expand_tasks(record) if options.has("array") else [record])
    ]
    # Arrays come after plain jobs, each task's steps with it.
    jobs.sort(key=lambda j: (bool(j.get("array_job_id")), j.array_id, _task_order(j)))
    chosen = _chosen_steps(options.values.get("jobs"))
    rows = []
    for job in jobs:
        row = Row(job, None, unit)
        if nodes is not None and not nodes & set(row.nodes()):
            continue
        if qos and job.get("qos", "normal") not in qos:
            continue
        only = chosen and not options.has("allocations") and _steps_of(job, chosen)
        if not only:
            rows.append(row)
        if not options.has("allocations"):
            steps = sorted(job.get("steps") or [], key=_step_order)
            rows += [Row(job, s, unit) for s in steps if not only or str(s["step_id"]) in only]
    return rows


def _chosen_steps(text: str | None) -> dict[str, set[str]]:
    """``-j 12.0,12.batch,13``: the steps of each job that is named by its steps only."""
    chosen: dict[str, set[str]] = {}
    parts = _ids(text or "")
    for part in parts:
        job, dot, step = part.partition(".")
        if dot and job not in parts:
            chosen.setdefault(job, set()).add(step)
    return chosen


def _steps_of(job: JobView, chosen: dict[str, set[str]]) -> set[str]:
    names = {str(job.get("id")), str(job.array_id)}
    if job.get("array_task_id") is not None:
        names.add(f"{job.array_id}_{job.get('array_task_id')}")
    return {step for name in names for step in chosen.get(name, ())}


def _task_order(job: JobView) -> float:
    task = job.get("array_task_id")
    return float(task) if task is not None else float("inf")


def _step_order(step: dict[str, Any]) -> int:
    name = str(step["step_id"])
    return int(name) if name.isdigit() else -1


def _table(options: _Options, columns: list[_Column], rows: list[Row]) -> str:
    parsable = options.has("parsable") or options.has("parsable2")
    if parsable:
        mark = options.values.get("delimiter") or "|"
        tail = "" if options.has("parsable2") else mark
        lines = [] if options.has("noheader") else [mark.join(c.name for c in columns) + tail]
        lines += [mark.join(c.text(row) for c in columns) + tail for row in rows]
    else:
        lines = []
        if not options.has("noheader"):
            lines.append("".join(c.fit(c.name) + " " for c in columns))
            lines.append("".join("-" * abs(c.width) + " " for c in columns))
        lines += ["".join(c.fit(c.text(row)) + " " for c in columns) for row in rows]
    return "".join(line + "\n" for line in lines)


def _help_format() -> str:
    names = all_names()
    lines = [
        " ".join(f"{name:<19}" for name in names[i : i + 4]) + "\n" for i in range(0, len(names), 4)
    ]
    return "".join(lines)


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    options = _Options(argv)
    if options.has("help"):
        out(options.parser.help_text(_USAGE, "Accounting of jobs and steps, ended ones too."))
        return 0
    if options.has("usage"):
        out(f"Usage: {_USAGE}\n")
        return 0
    if options.has("version"):
        out(version_text())
        return 0
    if options.has("helpformat"):
        out(_help_format())
        return 0
    if options.has("clusters") and options.values["clusters"] not in ("all", "-1"):
        from clusterctl.slurm.sbatch import check_cluster

        check_cluster("sacct", options.values["clusters"])
    default = _DEFAULT
    if options.has("brief"):
        default = _BRIEF
    elif options.has("long"):
        default = _LONG
    columns = _columns(options.values.get("format") or default)
    request = options.request()
    reply = client.call(request)
    if options.has("truncate"):
        _truncate(reply["jobs"], request)
    rows = _rows(options, reply)
    if any(c.name == "Cluster" for c in columns):
        cluster = client.call({"type": "Ping"}).get("cluster", "")
        for row in rows:
            row.job.cluster = cluster
    out(_table(options, columns, rows))
    return 0


def _truncate(jobs: list[dict[str, Any]], request: dict[str, Any]) -> None:
    """``-T``: starts and ends outside the window move to its borders."""
    low, high = request.get("start_s"), request.get("end_s")
    for record in [*jobs, *(step for job in jobs for step in job.get("steps") or [])]:
        if low is not None and record.get("start_s") is not None:
            record["start_s"] = max(record["start_s"], low)
        if high is not None and record.get("end_s") is not None:
            record["end_s"] = min(record["end_s"], high)
