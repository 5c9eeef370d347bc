"""``clusterctl logs``: the standard output file of a job, also while it grows."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from clusterctl.app import rpc
from scheduler.api import wire
from scheduler.api.errors import NotFound, Rejected, Unavailable
from scheduler.api.frames import send_frame
from scheduler.api.text import show as readable
from scheduler.api.text import unpack

#: How often a followed file is looked at, seconds (the job's end is an event, not polled).
_LOOK_S = 0.1


def show(home: Path, job: str, follow: bool) -> None:
    """Write the job's output to stdout; with ``follow`` until the job has ended.

    Raises ``NotFound`` for an unknown job, ``Rejected`` for one without an output file here.
    """
    view = find(home, job)
    path = output_path(view)
    out = sys.stdout.buffer
    if not follow:
        with _open(path, view) as file:
            _copy(file, out)
        return
    with rpc.connection(home, None) as sock:
        ended = _watch(sock, int(view["id"]))
        _follow(path, view, out, ended)


def find(home: Path, job: str) -> dict[str, Any]:
    """The view of one job or array task.  Raises ``NotFound`` or ``Rejected``."""
    number, _, task = job.partition("_")
    if not number.isdecimal() or (task and not task.isdecimal()):
        raise Rejected(f"invalid job id {job!r} (a number, or ARRAY_TASK as 12_3)")
    reply = rpc.call(home, wire.GetAccounting(ids=[job]), wire.Jobs)
    if not reply.jobs:
        raise NotFound(f"no job {job} is known")
    exact = [view for view in reply.jobs if str(view["id"]) == job]
    views = exact if exact and "array_task_id" not in exact[0] else reply.jobs
    if len(views) > 1:
        tasks = [v["array_task_id"] for v in views if v.get("array_task_id") is not None]
        first = f"{number}_{min(tasks)}" if tasks else f"{number}_1"
        raise Rejected(f"job {job} is an array of {len(views)} records; name a task, as {first}")
    if views[0].get("array_tasks") and not task:
        raise Rejected(f"job {job} is an array whose tasks have not started; name one, {job}_N")
    return views[0]


def output_path(view: dict[str, Any]) -> Path:
    """The file that the batch script's stdout goes to.  Raises ``Rejected`` without one."""
    if not view.get("batch", True):
        raise Rejected(f"job {view['id']} is not a batch job: its output went to its terminal")
    is_task = view.get("array_task_id") is not None
    pattern = unpack(view.get("std_out") or "")
    pattern = pattern or (b"slurm-%A_%a.out" if is_task else b"slurm-%j.out")
    name = os.fsdecode(expand(pattern, view))
    return Path(os.fsdecode(unpack(view.get("work_dir", "/")))) / name


def expand(pattern: bytes, view: dict[str, Any]) -> bytes:
    """A file name pattern of sbatch with a job's values (``%j %A %a %x %u %N %n %t %s %%``).

    A number between % and letter pads numeric values with zeros (at most 10 digits); a pattern
    with a backslash is taken as it is, without the backslashes.
    """
    if b"\\" in pattern:
        return pattern.replace(b"\\", b"")
    task = view.get("array_task_id")
    nodes = view.get("allocs") or []
    first = nodes[0]["node"] if nodes else next(iter(view.get("last_nodes") or []), "")
    numbers: dict[bytes, int] = {
        b"j": view["id"],
        b"J": view["id"],
        b"A": view.get("array_job_id") or view["id"],
        b"a": 4294967294 if task is None else task,  # what Slurm prints outside an array
        b"n": 0,
        b"t": 0,
    }
    words: dict[bytes, bytes] = {
        b"x": unpack(view["name"]),
        b"u": unpack(view.get("user", "")),
        b"N": first.encode(),
        b"s": b"batch",
    }
    return _substitute(pattern, numbers, words)


def _substitute(pattern: bytes, numbers: dict[bytes, int], words: dict[bytes, bytes]) -> bytes:
    result, at = b"", 0
    while at < len(pattern):
        if pattern[at : at + 1] != b"%":
            result += pattern[at : at + 1]
            at += 1
            continue
        end = at + 1
        while pattern[end : end + 1].isdigit():
            end += 1
        letter, width = pattern[end : end + 1], int(pattern[at + 1 : end] or b"0")
        if letter == b"%" and end == at + 1:
            result += b"%"
        elif letter in numbers:
            result += str(numbers[letter]).zfill(min(width, 10)).encode()
        elif letter in words:
            result += words[letter]
        else:
            result += pattern[at : end + 1]
        at = end + 1
    return result


def _open(path: Path, view: dict[str, Any]) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        state = view.get("state", "PENDING")
        where = ", ".join(view.get("last_nodes") or [])
        if state == "PENDING":
            why = f"job {view['id']} is pending ({view.get('reason', 'None')})"
        else:
            why = f"job {view['id']} is {state.lower()}{f', ran on {where}' if where else ''}"
            detail = readable(view.get("detail", ""))
            why += f": {detail}" if detail else ""
        raise Unavailable(f"no output file {path}: {why}") from None
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}") from None


def _copy(file: BinaryIO, out: BinaryIO) -> bool:
    """Everything there is now; True when it was something."""
    some = False
    while data := file.read(1 << 16):
        out.write(data)
        some = True
    if some:
        out.flush()
    return some


def _watch(sock: socket.socket, job_id: int) -> Callable[[float], bool]:
    """Ask for the job's end; the result waits up to that many seconds and tells if it came."""
    send_frame(sock, msgspec.json.encode(wire.WaitJob(job_id=job_id, until="ended")))

    def ended(timeout_s: float) -> bool:
        return bool(select.select([sock], [], [], timeout_s)[0])

    return ended


def _follow(
    path: Path, view: dict[str, Any], out: BinaryIO, ended: Callable[[float], bool]
) -> None:
    file: BinaryIO | None = None
    told = False
    with contextlib.ExitStack() as stack:
        while True:
            over = ended(0.0 if file is None and not told else _LOOK_S)
            if file is None:
                try:
                    file = stack.enter_context(path.open("rb"))
                except FileNotFoundError:
                    if over:
                        raise Unavailable(f"job {view['id']} ended without {path}") from None
                    if not told and view.get("state", "PENDING") == "PENDING":
                        sys.stderr.write(
                            f"clusterctl: job {view['id']} is pending "
                            f"({view.get('reason', 'None')}); waiting for it\n"
                        )
                    told = True
                    continue
                except OSError as error:
                    raise Unavailable(f"cannot read {path}: {error.strerror}") from None
            _copy(file, out)
            if os.stat(path).st_size < file.tell():  # begun anew (requeued job): so do we
                file.seek(0)
            if over:
                return
