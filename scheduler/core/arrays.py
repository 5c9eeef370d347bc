"""Job arrays: one record for all tasks that have not started.

A task that starts is split off into a record of its own; the last one keeps the array's
record and id, as in Slurm.
"""

from __future__ import annotations

import msgspec

from scheduler.api.errors import Rejected
from scheduler.api.records import Job

INVALID = "Invalid job array specification"


def parse(text: str, max_size: int) -> tuple[list[int], int]:
    """``"0-15:4%2,20"`` -> (ascending task ids without duplicates, throttle or 0).

    Raises ``Rejected`` with Slurm's text; ids must be below ``max_size``.
    """
    body, percent, limit = text.partition("%")
    throttle = 0
    if percent:
        if not limit.isdecimal():
            raise Rejected(INVALID)
        throttle = int(limit)
    if body.startswith("[") and body.endswith("]"):
        body = body[1:-1]
    ids: dict[int, None] = {}
    for part in body.split(","):
        for task in _span(part, max_size):
            ids[task] = None
    return sorted(ids), throttle


def _span(part: str, max_size: int) -> range:
    span, colon, step_text = part.partition(":")
    first, dash, last = span.partition("-")
    numbers = [first] + ([last] if dash else []) + ([step_text] if colon else [])
    if not all(n.isdecimal() and len(n) < 10 for n in numbers) or (colon and not dash):
        raise Rejected(INVALID)
    low = int(first)
    high = int(last) if dash else low
    step = int(step_text) if colon else 1
    if low > high or step < 1 or high >= max_size:
        raise Rejected(INVALID)
    return range(low, high + 1, step)


def is_array_head(job: Job) -> bool:
    """True for the record that stands for tasks that have not started."""
    return bool(job.array_tasks)


def split(head: Job, task: int, new_id: int) -> Job:
    """Take ``task`` off the head record.  The last one is the head itself, turned into a task."""
    head.array_tasks.remove(task)
    if not head.array_tasks:
        head.array_task_id = task
        return head
    return msgspec.structs.replace(
        head,
        id=new_id,
        array_task_id=task,
        array_tasks=[],
        allocs=[],
        last_nodes=[],
        deps=[],
        exclude_nodes=list(head.exclude_nodes),
        request_key="",
    )
