"""Job dependencies: parsing, what became of their targets, what is left of them."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.api.errors import Rejected
from scheduler.api.records import Job
from scheduler.api.states import TERMINAL
from scheduler.core.state import State

PROBLEM = "Job dependency problem"
CIRCLE = "Circular job dependency"
KINDS = ("after", "afterany", "afterok", "afternotok")


def parse(text: str) -> tuple[list[tuple[str, str]], bool]:
    """``"afterok:1:2,afterany:3_4"`` -> ([("afterok", "1"), ...], False).

    The second value is True when the parts are joined by ``?`` (any one is enough).  A bare id
    means afterany; ``after:1+5`` is five minutes after job 1 began.  Raises ``Rejected`` with
    Slurm's text.
    """
    if "," in text and "?" in text:
        raise Rejected(PROBLEM)
    out: list[tuple[str, str]] = []
    for part in text.split("?" if "?" in text else ","):
        words = part.strip().split(":")
        if words == ["singleton"]:
            out.append(("singleton", ""))
            continue
        kind, targets = words[0].lower(), words[1:]
        if _is_id(kind):
            kind, targets = "afterany", words
        if kind in ("aftercorr", "afterburstbuffer", "expand"):
            raise Rejected(f"{PROBLEM} ({kind} is not supported)")
        if kind not in KINDS or not targets:
            raise Rejected(PROBLEM)
        for target in targets:
            job_id, plus, minutes = target.partition("+")
            late = kind == "after" and minutes.isdecimal() and len(minutes) < 8
            if not _is_id(job_id) or (plus and not late):
                raise Rejected(PROBLEM)
            out.append((kind, target))
    return out, "?" in text


def _is_id(text: str) -> bool:
    job, underscore, task = text.partition("_")
    return job.isdecimal() and len(job) < 12 and (not underscore or task.isdecimal() or task == "*")


def _targets(state: State, target: str) -> list[Job]:
    """Records of the target: a job, one array task, or all of an array."""
    base, _, task = target.partition("+")[0].partition("_")
    members = state.by_array.get(int(base))
    if members is None:
        job = state.jobs.get(int(base))
        return [job] if job and not task else []  # a task of what is no array: nobody knows it
    found = [state.jobs[i] for i in members]
    if not task or task == "*":
        return found
    number = int(task)
    return [j for j in found if j.array_task_id == number or number in j.array_tasks]


def check_circle(state: State, job: Job, wanted: list[tuple[str, str]]) -> None:
    """Raises ``Rejected`` when ``job`` with these dependencies would wait for itself."""
    own = {t.id: None for t in _targets(state, str(job.array_job_id or job.id))} | {job.id: None}
    if any(t.id in own for _, target in wanted if target for t in _targets(state, target)):
        raise Rejected(PROBLEM)  # Slurm's text for a job that names itself
    seen: dict[int, None] = {}
    todo = [target for _, target in wanted if target]
    while todo:
        for other in _targets(state, todo.pop()):
            if other.id in own:
                raise Rejected(CIRCLE)
            if other.id not in seen:
                seen[other.id] = None
                todo += [target for _, target in other.deps if target]


def _verdict(kind: str, job: Job) -> bool | None:
    """True satisfied, False never will be, None not yet - for one target record."""
    over = job.state in TERMINAL and not job.completing and not job.requeue_after
    if kind == "after":
        return True if job.start_s is not None or over else None
    if not over:
        return None
    if kind == "afterany":
        return True
    good = job.state == "COMPLETED"
    return good if kind == "afterok" else not good


def _delay(state: State, job: Job, kind: str, target: str) -> None:
    """``after:ID+MINUTES`` that is met: from its targets' beginnings on, the job waits so long."""
    minutes = target.partition("+")[2]
    if kind != "after" or not minutes:
        return
    begun = [t.start_s if t.start_s is not None else t.end_s for t in _targets(state, target)]
    at_s = max((s for s in begun if s is not None), default=None)
    if at_s is not None:
        job.begin_s = max(at_s + 60 * int(minutes), job.begin_s or 0)
        state.at(job.begin_s, "begin", str(job.id))
        state.touch(job)


def verdict(state: State, job: Job, kind: str, target: str) -> bool | None:
    """What one dependency of ``job`` has come to."""
    if kind == "never":
        return False
    if kind == "singleton":
        for other in state.jobs.values():
            same = other.name == job.name and other.uid == job.uid
            if same and other.id < job.id and other.state not in TERMINAL:
                return None
        return True
    verdicts = [_verdict(kind, t) for t in _targets(state, target)]
    if kind == "afternotok" and any(v is True for v in verdicts):
        return True
    if any(v is False for v in verdicts):
        return None if kind == "afternotok" and None in verdicts else False
    return None if None in verdicts else True  # nobody knows the id: met


def evaluate(state: State, job: Job) -> bool | None:
    """Look at all dependencies of ``job``; drop those that are met; say what is left.

    True: free to start; False: can never start; None: wait.
    """
    if not job.deps:
        return True
    verdicts = [(d, verdict(state, job, *d)) for d in job.deps]
    for met in [d for d, v in verdicts if v is True]:
        _delay(state, job, *met)
    if job.dep_any:
        if any(v is True for _, v in verdicts):
            left = []
        else:
            left = job.deps
    else:
        left = [d for d, v in verdicts if v is not True]
    if left != job.deps:
        job.deps = left
    text = text_of(job, [d for d, v in verdicts if v is False])
    if text != job.dependency:
        job.dependency = text
        state.touch(job)
    if not left:
        return True
    failed = [v is False for d, v in verdicts if d in left]
    return False if (all(failed) if job.dep_any else any(failed)) else None


def text_of(job: Job, failed: Sequence[tuple[str, str]] = ()) -> str:
    """What is left, as ``scontrol show job`` prints it; ``failed`` can never be met."""
    mark = "?" if job.dep_any else ","
    parts = []
    for kind, target in job.deps:
        if kind == "singleton":
            parts.append("singleton(unfulfilled)")
            continue
        if kind == "never":  # the target left memory with an outcome that rules this job out
            parts.append(f"afterok:{target}(failed)")
            continue
        parts.append(f"{kind}:{target}({'failed' if (kind, target) in failed else 'unfulfilled'})")
    return mark.join(parts)
