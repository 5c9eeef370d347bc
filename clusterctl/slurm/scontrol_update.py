"""``scontrol update``: jobs and nodes."""

from __future__ import annotations

import time

from clusterctl.slurm import client
from clusterctl.slurm.errors import CommandError, ControllerError
from clusterctl.slurm.getopt import UNSUPPORTED
from clusterctl.slurm.output import err, words
from scheduler.api.hostlist import HostlistError, expand
from scheduler.api.text import pack_os
from scheduler.api.times import TimeError, parse_begin, parse_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OVER = "Job/step already completing or completed"
_NODE_STATES = ("DRAIN", "RESUME", "UNDRAIN", "DOWN", "FAIL", "IDLE")
_PARTITION_STATES = ("UP", "DOWN", "DRAIN", "INACTIVE")
_NEED_REASON = ("DRAIN", "DOWN", "FAIL")


def _pairs(args: list[str]) -> list[tuple[str, str, str]]:
    """(key in lower case, value, the argument) of each ``key=value``; ``key+=value`` too."""
    found = []
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals:
            raise CommandError(f"Invalid input: {arg}", "Request aborted")
        found.append((key.lower(), value, arg))
    return found


def _unknown(arg: str) -> CommandError:
    return CommandError(f"Update of this parameter is not supported: {arg}", "Request aborted")


def _is(key: str, *names: str) -> bool:
    """Keys may be cut short, as long as three letters are left."""
    return any(key == n or (len(key) >= 3 and n.startswith(key)) for n in names)


def update(args: list[str]) -> int:
    """The command after the word ``update``; its exit status."""
    if not args:
        raise CommandError("too few arguments for update keyword")
    pairs = _pairs(args)
    keys = [key for key, _, _ in pairs]
    if any(_is(k, "jobid") or k == "job" for k in keys):
        return _update_jobs(pairs)
    if any(_is(k, "nodename") or k == "node" for k in keys):
        return _update_nodes(pairs)
    if any(_is(k, "partitionname") for k in keys):
        return _update_partition(pairs)
    if any(_is(k, "reservationname", "frontendname", "stepid") for k in keys):
        raise CommandError(f"scontrol: error: update {args[0].partition('=')[0]} {UNSUPPORTED}")
    raise CommandError(
        "No valid entity in update command",
        'Input line must include "NodeName" or "JobId"',
    )


# ---------------------------------------------------------------------- jobs


def _limit_s(text: str, job_id: str) -> int:
    """``timelimit=``: absolute, or ``+5``/``-5`` on what the job has."""
    sign = text[:1] if (text[:1] in ("+", "-") and text[1:2] != "1") or text[:1] == "+" else ""
    if text == "-1":
        sign = ""
    try:
        value = parse_limit(text[1:] if sign else text)
    except ValueError:
        raise CommandError("scontrol: error: Invalid TimeLimit value", "Request aborted") from None
    if not sign:
        return value
    jobs = client.call({"type": "GetJobs", "ids": [job_id], "states": ["all"]})["jobs"]
    now = jobs[0].get("time_limit_s") if jobs else None
    if now is None:
        raise CommandError(f"scontrol: error: job {job_id} has no time limit to change by {text}")
    changed = int(now) + (value if sign == "+" else -value)
    if changed <= 0:
        raise CommandError("scontrol: error: Invalid TimeLimit value", "Request aborted")
    return changed


def _number(text: str, arg: str) -> int:
    body = text[1:] if text[:1] == "-" else text
    if not (body.isascii() and body.isdigit() and len(body) < 16):
        raise CommandError(f"Invalid input: {arg}", "Request aborted")
    return int(text)


def _node_range(text: str, arg: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    return _number(low, arg), _number(high if dash else low, arg)


def _hosts(text: str) -> list[str]:
    try:
        return expand(text)
    except HostlistError as error:
        raise CommandError(str(error), "Request aborted") from None


def _begin(text: str) -> float:
    try:
        return parse_begin(text, time.time())
    except TimeError as error:
        raise CommandError(error.detail or "Invalid StartTime", "Request aborted") from None


#: Key -> field of ``UpdateJob`` and how its value is read.
_JOB_KEYS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "name": ("name", lambda v, a: pack_os(v)),
    "jobname": ("name", lambda v, a: pack_os(v)),
    "priority": ("priority", _number),
    "nice": ("nice", lambda v, a: _number(v, a) if v else 100),
    "partition": ("partitions", lambda v, a: words(v)),
    "dependency": ("dependency", lambda v, a: v),
    "starttime": ("begin_s", lambda v, a: _begin(v)),
    "eligibletime": ("begin_s", lambda v, a: _begin(v)),
    "comment": ("comment", lambda v, a: pack_os(v)),
    "requeue": ("requeue", lambda v, a: bool(_number(v, a))),
    "reqnodelist": ("nodelist", lambda v, a: _hosts(v)),
    "nodelist": ("nodelist", lambda v, a: _hosts(v)),
    "excnodelist": ("exclude", lambda v, a: _hosts(v)),
    "arraytaskthrottle": ("array_throttle", _number),
    "account": ("account", lambda v, a: v),
}


def _job_change(key: str, value: str, arg: str, job_id: str, change: dict[str, Any]) -> None:
    if _is(key, "timelimit"):
        change["time_limit_s"] = _limit_s(value, job_id)
        return
    if key in ("numnodes", "reqnodes", "minnodes"):
        change["min_nodes"], change["max_nodes"] = _node_range(value, arg)
        return
    known = _JOB_KEYS.get(key)
    if known is None:
        known = next((v for k, v in _JOB_KEYS.items() if len(key) >= 3 and k.startswith(key)), None)
    if known is None:
        raise _unknown(arg)
    change[known[0]] = known[1](value, arg)


def _update_jobs(pairs: list[tuple[str, str, str]]) -> int:
    ids = [i for key, value, _ in pairs if _is(key, "jobid") or key == "job" for i in words(value)]
    status = 0
    for job_id in ids:
        change: dict[str, Any] = {}
        for key, value, arg in pairs:
            if not (_is(key, "jobid") or key == "job"):
                _job_change(key, value, arg, job_id, change)
        try:
            reply = client.call({"type": "UpdateJob", "id": job_id, **change})
            failed = [r for r in reply.get("results", ()) if r.get("code")]
        except ControllerError as error:
            failed = [{"code": error.code, "message": error.message}]
        for result in failed:
            message = result["message"]
            if result["code"] == "denied":
                message = "Invalid user id"
            elif message == _OVER:
                message = "Job has already finished"
            err(f"{message} for job {job_id}\n")
            status = 1
    return status


# ---------------------------------------------------------------------- nodes


def _update_nodes(pairs: list[tuple[str, str, str]]) -> int:
    request: dict[str, Any] = {"type": "UpdateNode", "names": []}
    for key, value, arg in pairs:
        if _is(key, "nodename") or key == "node":
            request["names"] = _hosts(value)
        elif _is(key, "state"):
            request["state"] = _node_state(value)
        elif _is(key, "reason"):
            request["reason"] = value.strip("\"'")
        elif _is(key, "weight"):
            request["weight"] = _number(value, arg)
        else:
            raise _unknown(arg)
    if request.get("state") in _NEED_REASON and not request.get("reason"):
        raise CommandError(
            "You must specify a reason when DOWNING or DRAINING a node. Request denied"
        )
    try:
        client.call(request)
    except ControllerError as error:
        message = "Invalid user id" if error.code == "denied" else error.message
        raise CommandError(f"slurm_update error: {message}") from None
    return 0


def _update_partition(pairs: list[tuple[str, str, str]]) -> int:
    request: dict[str, Any] = {"type": "UpdatePartition", "name": "", "state": ""}
    for key, value, arg in pairs:
        if _is(key, "partitionname"):
            request["name"] = value
        elif _is(key, "state"):
            name = value.upper()
            if name not in _PARTITION_STATES:
                known = " ".join(_PARTITION_STATES)
                raise CommandError(
                    f"Invalid input: {arg}",
                    "Request aborted",
                    f"Acceptable State values are {known}",
                )
            request["state"] = name
        else:
            raise _unknown(arg)
    if not request["state"]:
        raise CommandError("No changes specified")
    try:
        client.call(request)
    except ControllerError as error:
        message = "Invalid user id" if error.code == "denied" else error.message
        raise CommandError(f"slurm_update error: {message}") from None
    return 0


def _node_state(text: str) -> str:
    name = text.upper()
    found = [s for s in _NODE_STATES if s == name or (len(name) >= 3 and s.startswith(name))]
    if not found:
        known = " ".join(_NODE_STATES)
        raise CommandError(
            f"Invalid input: {text}", "Request aborted", f"Valid states are: {known}"
        )
    return found[0]
