"""What is due: time limits, kills, begin times, silent nodes, jobs to forget.

Timers are hints: each function checks the record again, so a stale one changes nothing.
"""

from __future__ import annotations

from heapq import heappop

from scheduler.api.records import Job
from scheduler.core.effects import AnyEffect
from scheduler.core.lifecycle import end_everywhere, finish, is_over
from scheduler.core.nodes import on_silent
from scheduler.core.state import State
from scheduler.core.steps import end_step, signal_step


def fire(state: State, now_s: float) -> list[AnyEffect]:
    """Everything due at ``now_s``."""
    effects: list[AnyEffect] = []
    while state.timers and state.timers[0][0] <= now_s:
        _, _, kind, key = heappop(state.timers)
        if kind == "silent":
            effects += on_silent(state, key, now_s)
        elif kind in ("step_limit", "step_wait", "step_kill"):
            effects += _step_due(state, kind, key, now_s)
        else:
            effects += _job_due(state, kind, int(key), now_s)
    return effects


def _job_due(state: State, kind: str, job_id: int, now_s: float) -> list[AnyEffect]:
    job = state.jobs.get(job_id)
    if job is None:
        return []
    if kind == "begin":
        state.want_schedule = True
        return []
    if kind == "forget":
        _forget(state, job, now_s)
        return []
    if kind == "kill":
        if job.completing and job.kill_at_s is not None and now_s >= job.kill_at_s:
            state.touch(job)
            return end_everywhere(state, job)
        return []
    return _limit_due(state, kind, job_id, now_s)


def _forget(state: State, job: Job, now_s: float) -> None:
    """Drop the job when it is long over and no dependency asks for it.

    An array goes as a whole: what became of it is told by all its tasks.  Only the timer of its
    newest record looks, and looks again, so that thousands of tasks are not each asked about by
    thousands.
    """
    age_s = state.settings.min_job_age_s
    ids = state.by_array.get(job.array_job_id) or {job.id: None}
    if job.id != next(reversed(ids)) or not is_over(job):
        return
    again_s = 0.0
    for i in ids:
        task = state.jobs[i]
        due_s = task.end_s + age_s if is_over(task) and task.end_s is not None else now_s + age_s
        if due_s > now_s:
            again_s = due_s
            break
    wanted = not again_s and any(  # also by a job that was cancelled for it: it may be requeued
        state.jobs.get(i) is not None and state.jobs[i].deps
        for key in {**ids, job.array_job_id: None}
        for i in state.dependents.get(key, {})
    )
    if again_s or wanted:
        state.at(again_s or now_s + age_s, "forget", str(job.id))
        return
    for task in [state.jobs[i] for i in ids]:
        state.forget_job(task)


def _limit_due(state: State, kind: str, job_id: int, now_s: float) -> list[AnyEffect]:
    job = state.jobs[job_id]
    if job.state != "RUNNING" or job.start_s is None or job.time_limit_s is None:
        return []
    left = job.start_s + job.time_limit_s - now_s
    if kind == "warn" and job.signal is not None:
        if job.signalled or left > job.signal.before_s:
            return []
        job.signalled = True
        state.touch(job)
        effects: list[AnyEffect] = []
        for step in state.active_steps(job):
            if (step.step_id == "batch") == job.signal.batch:
                effects += signal_step(step, job.signal.signum, batch_shell=job.signal.batch)
        return effects
    if kind == "limit" and left <= 0:
        job.reason = "TimeLimit"
        return finish(state, job, "TIMEOUT", now_s, gentle=True)
    return []


def _step_due(state: State, kind: str, key: str, now_s: float) -> list[AnyEffect]:
    job_id, step_id, attempt = key.split()
    step = state.steps.get((int(job_id), step_id))
    if step is None or step.attempt != int(attempt):
        return []
    if kind == "step_kill":
        due = step.kill_at_s is not None and now_s >= step.kill_at_s
        return end_step(state, step, "") if due else []
    if kind == "step_wait":
        return end_step(state, step, "") if step.wait_kill_s is not None else []
    if step.time_limit_s is not None and now_s >= step.start_s + step.time_limit_s:
        return end_step(state, step, "TIME LIMIT")
    return []


def rearm(state: State, now_s: float) -> None:
    """After a load: timers are derived from the records again."""
    from scheduler.core.lifecycle import arm_limit
    from scheduler.core.steps import step_timer_key

    for job in state.jobs.values():
        if job.state == "PENDING" and job.begin_s is not None:
            state.at(job.begin_s, "begin", str(job.id))
        if job.state == "RUNNING":
            arm_limit(state, job)
        if job.kill_at_s is not None:
            state.at(job.kill_at_s, "kill", str(job.id))
        if is_over(job):
            state.at((job.end_s or now_s) + state.settings.min_job_age_s, "forget", str(job.id))
    for step in state.steps.values():
        if step.time_limit_s is not None:
            state.at(step.start_s + step.time_limit_s, "step_limit", step_timer_key(step))
        if step.kill_at_s is not None:
            state.at(step.kill_at_s, "step_kill", step_timer_key(step))
        if step.wait_kill_s is not None:
            state.at(step.wait_kill_s, "step_wait", step_timer_key(step))
    for node in state.nodes.values():
        node.responding = False
        node.last_seen_s = now_s
        state.strays[node.name] = {}
        state.at(now_s + state.settings.node_timeout_s, "silent", node.name)
