"""From a command's request to an answer: at once, or as an event for the core, or a hub."""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import pwd
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from scheduler import query
from scheduler.api import wire
from scheduler.api.errors import Denied, NotFound, ProtocolError, Rejected
from scheduler.core import events
from scheduler.core.events import Caller
from scheduler.session import Session
from scheduler.store import AccountingFilter

if TYPE_CHECKING:
    from scheduler.service import Controller

log = logging.getLogger(__name__)

#: Largest batch script, bytes.
MAX_SCRIPT = 4 * 1024 * 1024
_DENIED = "Access/permission denied"
_UNKNOWN_JOB = "Invalid job id specified"
_TARGET = re.compile(r"(?<![\w])\d{1,11}(?:_\d{1,9})?(?![\w])")


@lru_cache(maxsize=1024)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@lru_cache(maxsize=1024)
def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def caller_of(session: Session) -> Caller:
    """Who asks, with names; root and the controller's own user are administrators."""
    return Caller(
        uid=session.uid,
        gid=session.gid,
        user=_user_name(session.uid),
        group=_group_name(session.gid),
        admin=session.uid in (0, os.getuid()),
    )


class Dispatcher:
    """One method a request type; errors of the tree in ``api.errors`` become replies."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller
        # One thread: the accounting connection is used by one at a time.
        self._reads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="accounting")
        self._tasks: set[asyncio.Task[None]] = set()
        self._table: dict[type[Any], Callable[[Session, Any], None]] = {
            wire.Ping: self._ping,
            wire.Submit: self._submit,
            wire.GetJobs: self._get_jobs,
            wire.GetAccounting: self._get_accounting,
            wire.GetNodes: self._get_nodes,
            wire.GetConfig: self._get_config,
            wire.GetStatus: self._get_status,
            wire.GetScript: self._get_script,
            wire.Cancel: self._asked,
            wire.Control: self._asked,
            wire.UpdateJob: self._asked,
            wire.UpdateNode: self._asked,
            wire.UpdatePartition: self._asked,
            wire.CreateStep: self._asked,
            wire.StepSignal: self._asked,
            wire.EndAllocation: self._asked,
            wire.AttachStep: self._attach,
            wire.StepInput: self._stream_only,
            wire.StepAck: self._stream_only,
            wire.WaitJob: self._wait,
            wire.Shutdown: self._shutdown,
        }

    def __call__(self, session: Session, request: wire.Request) -> None:
        """Take one request; its answer goes to ``session`` now or later."""
        self._table[type(request)](session, request)

    async def stop(self) -> None:
        """End the reading thread."""
        for task in list(self._tasks):
            task.cancel()
        self._reads.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ changes

    def _asked(self, session: Session, request: Any) -> None:
        job_id = request.job_id if isinstance(request, wire.CreateStep) else 0
        req = self._c.expect_reply(session, job_id=job_id)
        now_s = self._c.clock.now()
        self._c.post(events.Asked(now_s=now_s, req=req, caller=caller_of(session), request=request))

    def _submit(self, session: Session, request: wire.Submit) -> None:
        script = request.payload.script
        if request.spec.batch and not script:
            raise Rejected("Batch script is empty!")
        if script is not None and len(script) > MAX_SCRIPT:
            raise Rejected(
                f"Batch script of {len(script)} bytes is larger than the limit of {MAX_SCRIPT}"
            )
        known: dict[str, tuple[str, int]] = {}
        for target in _TARGET.findall(request.spec.dependency):
            if not self._in_memory(int(target.partition("_")[0])):
                outcome = self._c.store.outcome(target)
                if outcome is not None:
                    known[target] = outcome
        req = self._c.expect_reply(session, request.payload)
        self._c.post(
            events.JobSubmitted(
                now_s=self._c.clock.now(),
                req=req,
                caller=caller_of(session),
                spec=request.spec,
                key=request.key,
                test_only=request.test_only,
                known=known,
            )
        )

    def _in_memory(self, job_id: int) -> bool:
        state = self._c.state
        return job_id in state.jobs or job_id in state.by_array

    # ------------------------------------------------------------------ answers at once

    def _ping(self, session: Session, _: wire.Ping) -> None:
        session.answer(
            wire.Pong(
                version=self._c.version,
                protocol=wire.PROTOCOL,
                cluster=self._c.state.settings.cluster,
                host=self._c.site.host,
                pid=os.getpid(),
            )
        )

    def _get_jobs(self, session: Session, request: wire.GetJobs) -> None:
        session.answer(query.get_jobs(request, self._c.state, self._c.clock.now()))

    def _get_nodes(self, session: Session, _: wire.GetNodes) -> None:
        session.answer(query.get_nodes(self._c.state, self._c.clock.now()))

    def _get_config(self, session: Session, _: wire.GetConfig) -> None:
        session.answer(wire.Config(values=self._c.config_values(), now_s=self._c.clock.now()))

    def _get_status(self, session: Session, _: wire.GetStatus) -> None:
        session.answer(wire.Status(values=self._c.status()))

    def _get_script(self, session: Session, request: wire.GetScript) -> None:
        job = self._c.state.jobs.get(request.job_id)
        if job is None:
            raise NotFound(_UNKNOWN_JOB)
        self._check_owner(session, job.uid)
        payload = self._c.store.payload(job)
        if payload is None or payload.script is None:
            raise NotFound(f"job script for job {request.job_id} does not exist")
        session.answer(wire.Script(script=payload.script))

    def _check_owner(self, session: Session, uid: int) -> None:
        caller = caller_of(session)
        if not caller.admin and caller.uid != uid:
            raise Denied(_DENIED)

    # ------------------------------------------------------------------ answers later

    def _get_accounting(self, session: Session, request: wire.GetAccounting) -> None:
        task = asyncio.get_running_loop().create_task(self._read_accounting(session, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_accounting(self, session: Session, request: wire.GetAccounting) -> None:
        wanted = AccountingFilter(
            ids=request.ids,
            users=request.users,
            names=request.names,
            accounts=request.accounts,
            start_s=request.start_s,
            end_s=request.end_s,
        )
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.run_in_executor(self._reads, self._c.reader.accounting, wanted)
        except sqlite3.Error as error:
            log.warning("accounting cannot be read: %s", error)
            session.answer(
                wire.Error(code="unavailable", message=f"Unable to read accounting ({error})")
            )
            return
        session.answer(query.accounting(request, rows, self._c.state, self._c.clock.now()))

    def _attach(self, session: Session, request: wire.AttachStep) -> None:
        stored = None
        if (request.job_id, request.step_id) not in self._c.state.steps:
            stored = self._c.reader.step(request.job_id, request.step_id)
        for job in self._c.waits.records(self._c.state, request.job_id):
            if job.id == request.job_id:
                self._check_owner(session, job.uid)
        self._c.steps.attach(session, request, self._c.state, stored)

    def _wait(self, session: Session, request: wire.WaitJob) -> None:
        self._c.waits.wait(self._c.state, session, request, self._c.clock.now())

    def _stream_only(self, session: Session, request: Any) -> None:
        name = type(request).__name__
        raise ProtocolError(f"{name} belongs on a connection that is attached to a step")

    def _shutdown(self, session: Session, request: wire.Shutdown) -> None:
        if not caller_of(session).admin:
            raise Denied(_DENIED)
        self._c.request_stop(session, stop_agents=request.agents)
