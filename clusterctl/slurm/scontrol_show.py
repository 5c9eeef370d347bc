"""``scontrol show``."""

from __future__ import annotations

import os

from clusterctl.slurm import client
from clusterctl.slurm import scontrol_records as records
from clusterctl.slurm.errors import CommandError
from clusterctl.slurm.jobview import JobView, expand_tasks, stamp
from clusterctl.slurm.output import out
from scheduler.api.hostlist import HostlistError, expand, fold_ordered, fold_sorted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: What Slurm's scontrol can show and ours cannot.
_NOT_BUILT = (
    "aliases assoc_mgr bbstat burstbuffer dwstat federation frontend slurmd".split()  # noqa: SIM905
)


class Flags:
    """Options that stand before the command."""

    def __init__(self, *, details: bool, oneliner: bool) -> None:
        self.details = details
        self.oneliner = oneliner


def show(flags: Flags, args: list[str]) -> int:
    """The command after the word ``show``; its exit status."""
    if not args:
        raise CommandError("too few arguments for keyword:show")
    word, equals, value = args[0].partition("=")
    name = value if equals else (args[1] if len(args) > 1 else "")
    given = bool(equals) or len(args) > 1
    entity = _entity(word.lower())
    if entity is None:
        raise CommandError(f"invalid entity:{word} for keyword:show ")
    if entity in _NOT_BUILT:
        raise CommandError(f"scontrol: error: show {entity} is not supported by clusterctl")
    return _SHOW[entity](flags, name, given)


def _entity(word: str) -> str | None:
    """The full name of an entity that may be abbreviated; plurals count as the same."""
    if word in _SAME:
        return _SAME[word]
    names = [*_SHOW, *_NOT_BUILT]
    if word in names:
        return word
    found = [n for n in names if len(word) >= 3 and n.startswith(word)]
    return found[0] if found else None


def _jobs(flags: Flags, name: str, given: bool) -> int:
    request: dict[str, Any] = {"type": "GetJobs", "states": ["all"]}
    task = ""
    if name:
        base, underscore, task = name.partition("_")
        numbers = [base, task] if underscore else [base]
        if not all(n.isascii() and n.isdigit() for n in numbers):
            raise CommandError("scontrol_print_job error: Invalid job id specified")
        request["ids"] = [name]
    reply = client.call(request)
    if name and reply.get("missing"):
        raise CommandError("slurm_load_jobs error: Invalid job id specified")
    found = reply["jobs"]
    if task:
        found = [job for record in found for job in expand_tasks(record)]
    now_s = reply.get("now_s", 0.0)
    views = [JobView(job, now_s) for job in found]
    views.sort(key=_show_order)
    if not views:
        out("No jobs in the system\n")
        return 0
    blocks = [records.job_block(v, details=flags.details, oneliner=flags.oneliner) for v in views]
    out("".join(blocks))
    return 0


def _show_order(job: JobView) -> tuple[int, int]:
    """An array's waiting tasks first, then its newest record."""
    newest_first = 0 if job.is_head else -job.id
    return job.array_id, newest_first if not job.is_head else -(1 << 62)


def _nodes(flags: Flags, name: str, given: bool) -> int:
    reply = client.call({"type": "GetNodes"})
    nodes = {n["name"]: n for n in reply["nodes"]}
    names = _expand(name) if name else list(nodes)
    status = 0
    for one in names:
        if one in nodes:
            out(records.node_block(nodes[one], oneliner=flags.oneliner))
        else:
            out(f"Node {one} not found\n")
            status = 1
    return status


def _expand(text: str) -> list[str]:
    try:
        return expand(text)
    except HostlistError as error:
        raise CommandError(*_list_error(error)) from None


def _partitions(flags: Flags, name: str, given: bool) -> int:
    reply = client.call({"type": "GetNodes"})
    nodes = {n["name"]: n for n in reply["nodes"]}
    found = [p for p in reply["partitions"] if not name or p["name"] == name]
    if name and not found:
        out(f"Partition {name} not found\n")
        return 1
    for partition in found:
        out(records.partition_block(partition, nodes, oneliner=flags.oneliner))
    return 0


def _steps(flags: Flags, name: str, given: bool) -> int:
    request: dict[str, Any] = {"type": "GetJobs", "steps": True}
    base, dot, step_id = name.partition(".")
    if name:
        request["ids"] = [base]
    reply = client.call(request)
    if name and reply.get("missing"):
        raise CommandError("slurm_get_job_steps error: Invalid job id specified")
    text = ""
    for job in reply["jobs"]:
        view = JobView(job, reply.get("now_s", 0.0))
        for step in job.get("steps") or []:
            if not dot or step["step_id"] == step_id:
                text += records.step_block(view, step, oneliner=flags.oneliner)
    if name and not text:
        out(f"Job step {name} not found\n" if dot else f"No job steps in the system for {name}\n")
        return 1
    out(text or "No job steps in the system\n")
    return 0


def _config(flags: Flags, name: str, given: bool) -> int:
    reply = client.call({"type": "GetConfig"})
    out(f"Configuration data as of {stamp(reply.get('now_s'), 'Unknown')}\n")
    for key, value in reply["values"].items():
        out(f"{key:<23} = {value}\n")
    return 0


def _list_error(error: HostlistError) -> list[str]:
    detail = [f"scontrol: error: {error.detail}"] if error.detail else []
    return [*detail, str(error)]


def _hostnames(flags: Flags, name: str, given: bool) -> int:
    text = name if given else os.environ.get("SLURM_NODELIST", "")
    if not text and not given:
        raise CommandError("scontrol: error: host list is empty", exit_code=0)
    try:
        names = expand(text)
    except HostlistError as error:
        raise CommandError(*_list_error(error), exit_code=0) from None
    out("".join(one + "\n" for one in names))
    return 0


def _folded(fold: Callable[[list[str]], str]) -> Callable[[Flags, str, bool], int]:
    def command(flags: Flags, name: str, given: bool) -> int:
        if not given:
            from clusterctl.slurm.scontrol import usage

            out(usage())
            raise CommandError("invalid encode argument")
        out(fold(_expand(name)) + "\n")
        return 0

    return command


def _fixed(text: str) -> Callable[[Flags, str, bool], int]:
    def command(flags: Flags, name: str, given: bool) -> int:
        client.call({"type": "Ping"})
        out(text + "\n")
        return 0

    return command


def _reservations(flags: Flags, name: str, given: bool) -> int:
    client.call({"type": "Ping"})
    if name:
        out(f"Reservation {name} not found\n")
        return 1
    out("No reservations in the system\n")
    return 0


def _topology(flags: Flags, name: str, given: bool) -> int:
    raise CommandError("scontrol: error: No topology information available", exit_code=0)


_SHOW: dict[str, Callable[[Flags, str, bool], int]] = {
    "config": _config,
    "daemons": _fixed("slurmctld slurmd"),
    "hostlist": _folded(fold_ordered),
    "hostlistsorted": _folded(fold_sorted),
    "hostnames": _hostnames,
    "job": _jobs,
    "licenses": _fixed("No licenses configured in Slurm."),
    "node": _nodes,
    "partition": _partitions,
    "reservation": _reservations,
    "step": _steps,
    "topology": _topology,
}

_SAME = {
    "hostname": "hostnames",
    "jobs": "job",
    "jobid": "job",
    "nodes": "node",
    "partitions": "partition",
    "reservations": "reservation",
    "steps": "step",
}
