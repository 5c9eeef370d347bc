"""squeue: the queue."""

from __future__ import annotations

import os
import time

from clusterctl.slurm import client, tableformat
from clusterctl.slurm.errors import CommandError
from clusterctl.slurm.getopt import NO, Parser
from clusterctl.slurm.jobview import JobView, expand_tasks
from clusterctl.slurm.options_query import SQUEUE, SQUEUE_ENV, SQUEUE_SAME
from clusterctl.slurm.output import error, out, say, uid_of, version_text, words
from clusterctl.slurm.squeue_fields import (
    LETTERS,
    NAMES,
    SORT_KEYS,
    STEP_LETTERS,
    STEP_NAMES,
    StepView,
    id_key,
)
from scheduler.api.states import JOB_STATES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_USAGE = "squeue [OPTIONS]"
_DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
_LONG = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
_START = "%.18i %.9P %.8j %.8u %.2t %.19S %.6D %20Y %R"
_STEPS = "%.15i %.8j %.9P %.8u %.9M %N"
_SORT = "P,t,-p"

#: State names in the order of Slurm's error text.
_VALID_STATES = (
    "PENDING,RUNNING,SUSPENDED,COMPLETED,CANCELLED,FAILED,TIMEOUT,NODE_FAIL,PREEMPTED,BOOT_FAIL,"
    "DEADLINE,OUT_OF_MEMORY,COMPLETING,CONFIGURING,RESIZING,RESV_DEL_HOLD,REQUEUED,REQUEUE_FED,"
    "REQUEUE_HOLD,REVOKED,SIGNALING,SPECIAL_EXIT,STAGE_OUT,STOPPED"
)


def job_states(command: str, text: str) -> list[str]:
    """Long names of the states in a list of long or compact names; ``["all"]`` for all."""
    compact = {short: long for long, short in JOB_STATES.items()}
    valid = _VALID_STATES.split(",")
    found = []
    for part in words(text):
        name = part.upper()
        if name == "ALL":
            return ["all"]
        name = compact.get(name, name)
        if name not in JOB_STATES and name not in valid:
            raise CommandError(
                f"{command}: error: Invalid job state specified: {part}",
                f"{command}: error: Valid job states include: {_VALID_STATES}\n",
            )
        found.append(name)
    return found


def _check_job_ids(text: str) -> list[str]:
    found = []
    for part in words(text):
        base, underscore, task = part.partition("_")
        base_ok = base.isascii() and base.isdigit() and int(base) > 0
        if not base_ok or (underscore and not (task.isascii() and task.isdigit())):
            raise error("squeue", f"Invalid job id: {part}")
        found.append(part)
    return found


class _Options:
    """Values of the options by their main name."""

    def __init__(self, argv: list[str]) -> None:
        self.parser = Parser("squeue", SQUEUE, usage_exit=1)
        given, rest = self.parser.parse(argv, permute=True)
        self.values: dict[str, str] = {}
        for variable, name in SQUEUE_ENV.items():
            value = os.environ.get(variable)
            if value:
                self.values[name] = value
        for opt, text in given:
            name = SQUEUE_SAME.get(opt.long, opt.long)
            if opt.kind == "iterate":
                self._iterate(text or "")
            if opt.kind:
                raise error("squeue", f"--{opt.long} {opt.kind}")
            value = text or ""
            if opt.arg != NO and name in ("job", "steps") and not value and rest:
                value = rest.pop(0)
            if name in ("format", "Format"):
                self.values.pop("format", None)
                self.values.pop("Format", None)
            self.values[name] = value
        if rest:
            raise CommandError(f"squeue: error: Unrecognized option: {rest[0]}", f"Usage: {_USAGE}")

    @staticmethod
    def _iterate(text: str) -> None:
        if not (text.isascii() and text.isdigit()):
            raise error("squeue", f"--iterate={text}\n")
        raise error("squeue", "--iterate is not supported; use `watch squeue`")

    def has(self, name: str) -> bool:
        return name in self.values

    def request(self) -> dict[str, Any]:
        """The ``GetJobs`` message."""
        request: dict[str, Any] = {"type": "GetJobs"}
        if self.values.get("job"):
            request["ids"] = _check_job_ids(self.values["job"])
        users = []
        for name in words(self.values.get("user")):
            uid = uid_of(name)
            if uid is None:
                say("squeue", f"error: Invalid user: {name}\n")
            users.append(name if uid is None else str(uid))
        if self.has("me"):
            users.append(str(os.getuid()))
        lists = {"partition": "partitions", "name": "names", "account": "accounts", "qos": "qos"}
        request.update({f: words(self.values[o]) for o, f in lists.items() if self.has(o)})
        if users:
            request["users"] = users
        if self.has("states"):
            request["states"] = job_states("squeue", self.values["states"])
        elif self.has("start"):
            request["states"] = ["PENDING"]
        if self.has("steps"):
            request["steps"] = True
        return request


def _check_nodes(text: str) -> list[str]:
    from clusterctl.slurm.values import host_names

    names = host_names("squeue", text)
    known = {n["name"] for n in client.call({"type": "GetNodes"})["nodes"]}
    for name in names:
        if name not in known:
            raise error("squeue", f"Invalid node name {name}")
    return names


def _sort(rows: list[Any], text: str, *, steps: bool) -> None:
    """Sort in place by a list of ``[+-]letter``; the last letter is the least."""
    if steps:
        for letter in reversed([w.lstrip("+-") for w in words(text)]):
            field = STEP_LETTERS.get(letter)
            if field is not None:
                rows.sort(key=field[1])
        return
    keys = []
    for word in words(text):
        down = word.startswith("-")
        for letter in word.lstrip("+-"):
            if letter not in LETTERS or letter == "Z":  # Slurm sorts by all letters but this
                raise error("squeue", f"Invalid sort specification: {letter}")
            keys.append((letter, down))
    if ("p", True) in keys:  # among equals the newest waiting job comes first
        rows.sort(key=lambda row: -row.array_id if row.pending else 0)
    for letter, down in reversed(keys):
        key = SORT_KEYS.get(letter) or LETTERS[letter][1]
        rows.sort(key=key, reverse=down)


def _rows(options: _Options, reply: dict[str, Any], ids: list[str]) -> list[JobView]:
    """Records in the controller's order, tasks of arrays apart where that is asked for."""
    now_s = reply.get("now_s", 0.0)
    whole = {text for text in ids if "_" not in text}
    single = {text.partition("_")[0] for text in ids if "_" in text} - whole
    rows = []
    for job in reply["jobs"]:
        apart = options.has("array") or str(job.get("array_job_id")) in single
        rows += [JobView(j, now_s) for j in (expand_tasks(job) if apart else [job])]
    rows.sort(key=id_key)
    if len(ids) == 1 and whole:
        rows.reverse()  # one array: its newest record first
    return rows


def _columns(options: _Options, *, steps: bool) -> list[tableformat.Column]:
    letters, names = (STEP_LETTERS, STEP_NAMES) if steps else (LETTERS, NAMES)
    kind = "job step" if steps else "job"
    if options.has("Format"):
        return tableformat.by_name("squeue", options.values["Format"], names, kind)
    if options.has("format"):
        return tableformat.percent("squeue", options.values["format"], letters, kind)
    if steps:
        text = _STEPS
    elif options.has("start"):
        text = _START
    else:
        text = _LONG if options.has("long") else _DEFAULT
    return tableformat.percent("squeue", text, letters, kind)


def _about(options: _Options) -> int | None:
    if options.has("help"):
        out(options.parser.help_text(_USAGE, "Show jobs (or steps) of the queue."))
    elif options.has("usage"):
        out(f"Usage: {_USAGE}\n")
    elif options.has("version"):
        out(version_text())
    else:
        return None
    return 0


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    options = _Options(argv)
    status = _about(options)
    if status is not None:
        return status
    if options.has("clusters") and options.values["clusters"] != "all":
        from clusterctl.slurm.sbatch import check_cluster

        check_cluster("squeue", options.values["clusters"])
    steps = options.has("steps")
    request = options.request()
    if options.has("nodelist"):
        request["nodes"] = _check_nodes(options.values["nodelist"])
    wanted_steps = words(options.values.get("steps"))
    if wanted_steps:
        request["ids"] = sorted({s.partition(".")[0] for s in wanted_steps})
    ids = request.get("ids", [])
    reply = client.call(request)
    if not steps and len(ids) == 1 and "_" not in ids[0] and ids[0] in reply.get("missing", ()):
        raise CommandError("slurm_load_jobs error: Invalid job id specified")
    rows = _rows(options, reply, ids)
    columns = _columns(options, steps=steps)
    if any(c.name == "cluster" for c in columns):
        cluster = client.call({"type": "Ping"}).get("cluster", "")
        for row in rows:
            row.cluster = cluster
    if options.has("start"):
        rows = [row for row in rows if row.pending]
    shown: list[Any] = rows
    if steps:
        shown = [StepView(row, step) for row in rows for step in row.get("steps", [])]
        if wanted_steps:
            shown = [s for s in shown if _step_wanted(s.shown_id(), wanted_steps)]
        _sort(shown, options.values.get("sort", "i"), steps=True)
    else:
        default = "S" if options.has("start") else _SORT
        _sort(shown, options.values.get("sort", default), steps=False)
    lines = []
    if not options.has("noheader"):
        if options.has("long") and not steps:
            lines.append(time.strftime("%a %b %d %H:%M:%S %Y"))
        lines.append(tableformat.header(columns))
    lines += [tableformat.line(columns, row) for row in shown]
    out("".join(line + "\n" for line in lines))
    return 0


def _step_wanted(shown_id: str, wanted: list[str]) -> bool:
    return any(shown_id == w or shown_id.startswith(w + ".") for w in wanted)
