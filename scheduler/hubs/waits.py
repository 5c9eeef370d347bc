"""Commands that wait for a job to be allocated or to end.

They are answered after the commit of the turn that changed the job.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.api import wire
from scheduler.api.errors import NotFound, Rejected
from scheduler.api.records import Job
from scheduler.core.state import State, ended
from scheduler.query import job_view
from scheduler.session import Session
from scheduler.store.reader import Reader

_UNTIL = ("allocated", "ended")


class WaitHub:
    """Who waits for which job; ``reader`` finds jobs that left memory."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._waits: dict[int, list[tuple[Session, str]]] = {}

    def wait(self, state: State, session: Session, request: wire.WaitJob, now_s: float) -> None:
        """Answer now or when it is so.  Raises ``NotFound`` for an unknown id."""
        if request.until not in _UNTIL:
            raise Rejected(f"Cannot wait until {request.until!r}; known: {', '.join(_UNTIL)}")
        if not self.records(state, request.job_id):
            raise NotFound("Invalid job id specified")
        if _reached(_members(state, request.job_id), request.until):
            session.answer(self._view(state, request.job_id, now_s))
            return
        entry = (session, request.until)
        self._waits.setdefault(request.job_id, []).append(entry)
        session.on_closed.append(lambda: self._gone(request.job_id, entry))

    def records(self, state: State, job_id: int) -> list[Job]:
        """The job, or all of an array, from memory, else from the store."""
        return _members(state, job_id) or self._reader.job(job_id)

    def _gone(self, job_id: int, entry: tuple[Session, str]) -> None:
        entries = self._waits.get(job_id, [])
        if entry in entries:
            entries.remove(entry)
        if not entries:
            self._waits.pop(job_id, None)

    def jobs_changed(self, state: State, jobs: Iterable[Job], now_s: float) -> None:
        """The rows of ``jobs`` were committed."""
        if not self._waits:
            return
        touched = {i for job in jobs for i in (job.id, job.array_job_id) if i in self._waits}
        for job_id in sorted(touched):
            records = _members(state, job_id)
            still = []
            for session, until in self._waits.pop(job_id):
                if session.closed:
                    continue
                if _reached(records, until):
                    session.answer(self._view(state, job_id, now_s))
                else:
                    still.append((session, until))
            if still:
                self._waits[job_id] = still

    def _view(self, state: State, job_id: int, now_s: float) -> wire.Jobs:
        """All records of the job or array, also tasks that left memory before the last ended."""
        found = {job.id: job for job in _members(state, job_id)}
        if not found or any(job.array_job_id for job in found.values()):
            for job in self._reader.job(job_id):
                found.setdefault(job.id, job)
        return wire.Jobs(jobs=[job_view(found[i], state) for i in sorted(found)], now_s=now_s)


def _members(state: State, job_id: int) -> list[Job]:
    """Records in memory that ``job_id`` stands for: a job, or all of an array."""
    ids = dict.fromkeys([job_id, *state.by_array.get(job_id, {})])
    return [state.jobs[i] for i in ids if i in state.jobs]


def _reached(records: list[Job], until: str) -> bool:
    if until == "allocated":
        return any(job.state != "PENDING" for job in records) or not records
    return all(ended(job) for job in records)
