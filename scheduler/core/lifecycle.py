"""The life of a job, one function per edge.

PENDING -> RUNNING (``start``) -> ended state with ``completing`` set while nodes are being
cleaned (``finish``) -> over (``settle``), or back to PENDING (requeue).  Every edge marks what
it changes and returns effects; messages about an older attempt never reach these functions
(``current`` drops them).
"""

from __future__ import annotations

from scheduler.api import agentwire, wire
from scheduler.api.records import Job, NodeAlloc, Step, TaskLayout
from scheduler.api.states import STEP_BATCH, TERMINAL
from scheduler.core import arrays, deps
from scheduler.core.effects import AnyEffect, Launch, Send, StepNews
from scheduler.core.priority import priority_of
from scheduler.core.state import State

SIGCONT, SIGTERM, SIGKILL = 18, 15, 9
#: Detail of a job after ``scontrol requeuehold``; squeue shows it as the reason.
REQUEUED_HELD = "job requeued in held state"


def current(state: State, job_id: int, attempt: int) -> Job | None:
    """The job when ``attempt`` is its present one; None for anything older or unknown.

    This is the one place where messages about an older attempt are dropped.
    """
    job = state.jobs.get(job_id)
    return job if job is not None and job.attempt == attempt else None


def start(
    state: State, job: Job, allocs: list[NodeAlloc], partition: str, now_s: float
) -> list[AnyEffect]:
    """PENDING -> RUNNING on ``allocs``; a batch job's script is launched on the first node."""
    job.attempt += 1
    job.state = "RUNNING"
    job.reason = "None"
    job.detail = ""
    job.partition = partition
    job.start_s = now_s
    job.end_s = None
    job.end_state = ""
    job.allocs = allocs
    job.next_step = 0
    job.signalled = False
    job.kill_at_s = None
    job.requeue_after = ""
    job.cancelled_by = None
    job.code = job.signal_code = job.derived_code = job.derived_signal = 0
    job.first_failure = None
    state.pending.pop(job.id, None)
    for alloc in allocs:
        state.hold_alloc(job, alloc)
    if job.array_job_id:
        state.count_array(job, +1)
    state.touch(job)
    arm_limit(state, job)
    effects: list[AnyEffect] = []
    if job.batch:
        effects += _launch_batch(state, job, now_s)
    return effects + wake_dependents(state, job, now_s)


def arm_limit(state: State, job: Job) -> None:
    """Timers for the time limit and for --signal."""
    if job.time_limit_s is None or job.start_s is None:
        return
    state.at(job.start_s + job.time_limit_s, "limit", str(job.id))
    if job.signal is not None:
        state.at(job.start_s + job.time_limit_s - job.signal.before_s, "warn", str(job.id))


def _launch_batch(state: State, job: Job, now_s: float) -> list[AnyEffect]:
    first = job.allocs[0]
    step = Step(
        job_id=job.id,
        step_id=STEP_BATCH,
        attempt=job.attempt,
        name=STEP_BATCH,
        layout=TaskLayout(nodes=[first.node], tasks=[[0]]),
        cpus=first.cpus,
        mem_mib=first.mem_mib,
        overlap=True,
        start_s=now_s,
    )
    state.add_step(step)
    state.touch_step(step)
    return [Launch(node=first.node, job_id=job.id, step_id=STEP_BATCH, attempt=job.attempt)]


def finish(
    state: State, job: Job, end_state: str, now_s: float, *, gentle: bool, detail: str = ""
) -> list[AnyEffect]:
    """RUNNING -> ``end_state`` with ``completing`` set: end everything of it everywhere.

    ``gentle``: TERM (and CONT) first, KILL after KillWait; else KILL at once.  Of two ends the
    first one decides the state.
    """
    if job.completing or job.state != "RUNNING":
        return []
    job.state = end_state
    job.end_state = end_state
    job.completing = True
    job.end_s = now_s
    job.detail = detail
    if job.array_job_id:
        state.count_array(job, -1)
    state.touch(job)
    effects: list[AnyEffect] = []
    if gentle and state.active_steps(job):
        job.kill_at_s = now_s + state.settings.kill_wait_s
        state.at(job.kill_at_s, "kill", str(job.id))
        why = {"CANCELLED": "CANCELLED", "TIMEOUT": "TIME LIMIT"}.get(end_state, end_state)
        for step in state.active_steps(job):
            step.killed = True
            step.reason = why
            state.touch_step(step)
            effects += _news(step, wire.StepEvent(killed=why))
            for node in step.layout.nodes:
                if node not in step.ended:
                    for signum in (SIGCONT, SIGTERM):
                        effects.append(_signal(step, node, signum, _notice(job, step, node)))
    else:
        effects += end_everywhere(state, job)
    return effects + settle(state, job, now_s)


def _signal(step: Step, node: str, signum: int, notice: str) -> Send:
    return Send(
        node=node,
        message=agentwire.Signal(
            job_id=step.job_id,
            step_id=step.step_id,
            attempt=step.attempt,
            signum=signum,
            notice=notice,
        ),
    )


def _notice(job: Job, step: Step | None, node: str) -> str:
    """What the batch script's stderr says when others end it (srun tells of its own steps)."""
    if step is not None and step.step_id != STEP_BATCH:
        return ""
    due = {"CANCELLED": "", "TIMEOUT": " DUE TO TIME LIMIT", "NODE_FAIL": " DUE TO NODE FAILURE"}
    if job.end_state not in due or not job.batch:
        return ""
    why = due[job.end_state]
    if job.requeue_after and job.end_state == "CANCELLED":
        why = " DUE TO JOB REQUEUE"
    return f"*** JOB {job.id} ON {node} CANCELLED AT <at>{why} ***"


def _news(step: Step, event: wire.StepEvent) -> list[AnyEffect]:
    return [StepNews(job_id=step.job_id, step_id=step.step_id, event=event)]


def end_everywhere(state: State, job: Job) -> list[AnyEffect]:
    """KILL: tell every node that is not yet clean to end all of the job."""
    job.kill_at_s = None
    return [
        Send(
            node=a.node,
            message=agentwire.EndJob(
                job_id=job.id, attempt=job.attempt, notice=_notice(job, None, a.node)
            ),
        )
        for a in job.allocs
        if not a.cleaned
    ]


def node_cleaned(state: State, job: Job, node: str, now_s: float) -> list[AnyEffect]:
    """The agent says nothing of the job is left on ``node``."""
    effects: list[AnyEffect] = []
    for step in state.active_steps(job):
        if node in step.layout.nodes and node not in step.ended:
            step.ended.append(node)
            effects += step_progress(state, job, step, now_s)
    for alloc in job.allocs:
        if alloc.node == node:
            state.release_alloc(job, alloc, now_s)
    return effects + settle(state, job, now_s)


def settle(state: State, job: Job, now_s: float) -> list[AnyEffect]:
    """When every node is clean the job is over, or goes back to the queue."""
    if not job.completing or not all(a.cleaned for a in job.allocs):
        return []
    effects: list[AnyEffect] = []
    for step in state.active_steps(job):
        effects += close_step(state, job, step, now_s)
    job.completing = False
    job.kill_at_s = None
    job.last_nodes = [a.node for a in job.allocs]
    state.touch(job)
    if job.requeue_after:
        return effects + back_to_queue(state, job, now_s)
    state.at(now_s + state.settings.min_job_age_s, "forget", str(job.id))
    return effects + wake_dependents(state, job, now_s)


def back_to_queue(state: State, job: Job, now_s: float) -> list[AnyEffect]:
    """Ended and clean -> PENDING again, same id, one restart more."""
    hold = job.requeue_after == "hold"
    job.requeue_after = ""
    job.state = "PENDING"
    job.end_state = ""
    job.allocs = []
    job.restarts += 1
    job.start_s = None
    job.end_s = None
    job.eligible_s = None
    job.begin_s = now_s + state.settings.requeue_delay_s
    job.reason = "BeginTime"
    if hold:
        job.held = "admin"
        job.reason, job.detail = "JobHeldAdmin", REQUEUED_HELD
    job.priority = priority_of(state, job, now_s)
    state.pending[job.id] = None
    state.at(job.begin_s, "begin", str(job.id))
    state.want_schedule = True
    state.touch(job)
    return []


def cancel_pending(state: State, job: Job, uid: int, now_s: float) -> list[AnyEffect]:
    """PENDING -> CANCELLED (all tasks of an array head that have not started)."""
    state.pending.pop(job.id, None)
    job.state = "CANCELLED"
    job.cancelled_by = uid
    job.end_s = now_s
    job.requeue_after = ""
    state.touch(job)
    state.at(now_s + state.settings.min_job_age_s, "forget", str(job.id))
    return wake_dependents(state, job, now_s)


def wake_dependents(state: State, job: Job, now_s: float) -> list[AnyEffect]:
    """Jobs that wait for this one (or for its array, or for a job of its name) look again."""
    effects: list[AnyEffect] = []
    waiting = dict(state.dependents.get(job.id, {}))
    if job.array_job_id:
        waiting.update(state.dependents.get(job.array_job_id, {}))
    for other_id in waiting:
        other = state.jobs.get(other_id)
        if other is not None and other.state == "PENDING":
            effects += check_deps(state, other, now_s)
    state.want_schedule = True
    return effects


def check_deps(state: State, job: Job, now_s: float) -> list[AnyEffect]:
    """Bring reason and eligibility of a pending job in line with its dependencies."""
    if not job.deps:
        return []
    verdict = deps.evaluate(state, job)
    if verdict is False:
        set_reason(state, job, "DependencyNeverSatisfied")
        if job.kill_on_invalid_dep:
            return cancel_pending(state, job, job.uid, now_s)
    elif verdict is None:
        set_reason(state, job, "Dependency")
    else:
        job.deps = []
        job.dependency = ""
        set_reason(state, job, "None")
    return []


def set_reason(state: State, job: Job, reason: str, detail: str = "") -> None:
    """Why a pending job waits; the row is written only when it changed."""
    if job.reason != reason or job.detail != detail:
        job.reason = reason
        job.detail = detail
        state.touch(job)


# ---------------------------------------------------------------------- steps


def step_progress(state: State, job: Job, step: Step, now_s: float) -> list[AnyEffect]:
    """After a node's share ended: close the step when it was the last."""
    state.touch_step(step)
    if not all(n in step.ended for n in step.layout.nodes):
        return []
    effects = close_step(state, job, step, now_s)
    if job.completing and job.kill_at_s is not None and not state.active_steps(job):
        effects += end_everywhere(state, job)  # nothing left to wait KillWait for
    return effects


def close_step(state: State, job: Job, step: Step, now_s: float) -> list[AnyEffect]:
    """The step is over on all nodes: its state, the job's derived code, and who wants to know."""
    if step.end_s is not None:
        return []
    step.end_s = now_s
    step.state = _step_state(job, step)
    if step.step_id != STEP_BATCH:
        if step.code > job.derived_code:
            job.derived_code, job.derived_signal = step.code, 0
        if step.signal and not step.code:
            job.derived_signal = max(job.derived_signal, step.signal)
        state.touch(job)
    if step.first_failure is not None and job.first_failure is None:
        job.first_failure = step.first_failure
    done = {
        "state": step.state,
        "code": step.code,
        "signal": step.signal,
        "reason": step.reason,
        "oom": step.oom,
    }
    state.drop_step(step)
    return _news(step, wire.StepEvent(done=done))


def _step_state(job: Job, step: Step) -> str:
    if step.oom:
        return "OUT_OF_MEMORY"
    if step.reason == "TIME LIMIT" and step.step_id != STEP_BATCH:
        return "TIMEOUT"
    if step.reason == "NODE FAILURE":
        return "NODE_FAIL"
    if step.killed and job.state != "RUNNING":
        return "CANCELLED"
    if step.killed and step.reason == "CANCELLED":
        return "CANCELLED"
    if step.signal == SIGKILL and not step.code:
        return "CANCELLED"  # somebody outside ended it; crashes are FAILED
    if step.code or step.signal:
        return "FAILED"
    return "COMPLETED"


def batch_ended(state: State, job: Job, step: Step, now_s: float) -> list[AnyEffect]:
    """The batch script is over: so is the job."""
    if job.end_state != "NODE_FAIL":  # what ended the script then was no answer of its own
        job.code, job.signal_code = step.code, step.signal
    state.touch(job)
    if job.completing:
        return []  # cancelled or over its limit before: that state stands
    if step.oom:
        end_state = "OUT_OF_MEMORY"
    elif step.code or step.signal:
        end_state = "FAILED"
        job.reason = "NonZeroExitCode"
        if step.signal:
            job.reason = "RaisedSignal:" + str(step.signal)
    else:
        end_state = "COMPLETED"
    return finish(state, job, end_state, now_s, gentle=_others_run(state, job, step))


def _others_run(state: State, job: Job, batch: Step) -> bool:
    return any(s is not batch and s.end_s is None for s in state.active_steps(job))


def launch_failed(
    state: State, job: Job, reason: str, detail: str, now_s: float
) -> list[AnyEffect]:
    """The script could not be started: FAILED with 0:53 as Slurm has it, the reason kept."""
    job.code, job.signal_code = 0, 53
    job.reason = reason
    state.touch(job)
    return finish(state, job, "FAILED", now_s, gentle=False, detail=detail)


def node_failed(
    state: State, job: Job, node: str, now_s: float, *, gone: bool, detail: str = ""
) -> list[AnyEffect]:
    """A node of the job is lost: NODE_FAIL, or requeued when it may be.

    ``gone``: the node does not answer.  It then counts as clean for this job; if its agent
    comes back with something of it, registration has that ended before the node is used again.
    """
    effects: list[AnyEffect] = []
    if job.state == "RUNNING" and not job.completing:
        for step in state.active_steps(job):
            step.killed = True
            step.reason = "NODE FAILURE"
            state.touch_step(step)
            effects += _news(step, wire.StepEvent(killed="NODE FAILURE", node=node))
        job.requeue_after = "requeue" if job.requeue else ""
        job.reason = "NodeDown"
        detail = detail or f"node {node} was lost"
        effects += finish(state, job, "NODE_FAIL", now_s, gentle=False, detail=detail)
    return effects + (node_cleaned(state, job, node, now_s) if gone else [])


def pending_tasks(job: Job) -> int:
    """How many starts this pending record stands for."""
    return len(job.array_tasks) if arrays.is_array_head(job) else 1


def is_over(job: Job) -> bool:
    """Ended for good and clean."""
    return job.state in TERMINAL and not job.completing and not job.requeue_after
