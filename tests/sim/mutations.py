"""Ways to break the cores or the world, each of which a rule of the auditor must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import nodeagent.core.steps as agent_steps
import scheduler.core.lifecycle as lifecycle
import scheduler.core.nodes as nodes
import scheduler.sim.controller as sim_controller
from scheduler.api import agentwire
from scheduler.core import effects as fx
from scheduler.core.pool import Pool
from scheduler.core.state import State
from scheduler.sim.controller import Controller
from scheduler.store import Store

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[function.__name__] = function
    return function


# ---------------------------------------------------------------------- the store


@mutation
def a_row_is_not_written(patch: Patch) -> None:
    commit = Store.commit

    def forgetful(self: Store, turn: Any) -> None:
        turn.jobs = [j for j in turn.jobs if j.id != 3]
        commit(self, turn)

    patch.setattr(Store, "commit", forgetful)


@mutation
def the_id_counter_is_not_written(patch: Patch) -> None:
    commit = Store.commit

    def forgetful(self: Store, turn: Any) -> None:
        turn.meta = {k: v for k, v in turn.meta.items() if k != "next_job_id"}
        commit(self, turn)

    patch.setattr(Store, "commit", forgetful)
    patch.setattr(sim_controller, "check_state", lambda state: None)


@mutation
def scripts_are_not_written(patch: Patch) -> None:
    commit = Store.commit

    def forgetful(self: Store, turn: Any) -> None:
        turn.payloads = {}
        commit(self, turn)

    patch.setattr(Store, "commit", forgetful)


@mutation
def launches_leave_before_the_commit(patch: Patch) -> None:
    rows = Controller._rows

    def eager(self: Controller, effects: Any) -> Any:
        for effect in effects:
            if isinstance(effect, fx.Launch):
                job = self.state.jobs[effect.job_id]
                message = sim_controller.launch.build(
                    job,
                    self.state.steps[(effect.job_id, effect.step_id)],
                    effect.node,
                    None,
                    self.site,
                )
                assert message is not None
                self._send(effect.node, message)
        return rows(self, effects)

    patch.setattr(Controller, "_rows", eager)


# ---------------------------------------------------------------------- the agent


@mutation
def the_agent_does_not_wait_for_older_attempts(patch: Patch) -> None:
    patch.setattr(agent_steps, "of_job", lambda state, job_id, up_to=None: [])
    patch.setattr(agent_steps, "_clean_if_done", _clean_at_once)
    patch.setattr(nodes, "_end_stray", lambda state, node, report: [])


def _clean_at_once(state: Any, job_id: int, effects: Any) -> None:
    """Says so without looking whether anything still runs."""
    attempt = state.ending_jobs.pop(job_id, None)
    if attempt is not None:
        state.cleaned[job_id] = attempt
        agent_steps.send(state, agentwire.JobCleaned(job_id=job_id, attempt=attempt), effects)


@mutation
def the_agent_says_clean_too_early(patch: Patch) -> None:
    patch.setattr(agent_steps, "_clean_if_done", _clean_at_once)


# ---------------------------------------------------------------------- the core


@mutation
def what_is_taken_stays_free(patch: Patch) -> None:
    patch.setattr(Pool, "take", lambda self, alloc, exclusive: None)
    patch.setattr(Pool, "give", lambda self, alloc, exclusive: None)
    patch.setattr(sim_controller, "check_state", lambda state: None)


@mutation
def what_is_given_back_stays_taken(patch: Patch) -> None:
    patch.setattr(Pool, "give", lambda self, alloc, exclusive: None)


@mutation
def what_strays_is_never_clean(patch: Patch) -> None:
    set_down = nodes.set_down

    def strayed(state: State, node: Any, reason: str, now_s: float) -> Any:
        state.strays[node.name][(0, 0)] = None
        return set_down(state, node, reason, now_s)

    patch.setattr(nodes, "set_down", strayed)


@mutation
def failure_counts_as_success(patch: Patch) -> None:
    finish = lifecycle.finish

    def rosy(state: State, job: Any, end_state: str, now_s: float, **more: Any) -> Any:
        end_state = "COMPLETED" if end_state == "FAILED" else end_state
        return finish(state, job, end_state, now_s, **more)

    patch.setattr(lifecycle, "finish", rosy)


@mutation
def jobs_are_ended_when_an_agent_registers(patch: Patch) -> None:
    on_register = nodes.on_register

    def harsh(state: State, name: str, message: Any, now_s: float) -> Any:
        effects = on_register(state, name, message, now_s)
        return effects + [
            fx.Send(node=name, message=agentwire.EndJob(job_id=i, attempt=state.jobs[i].attempt))
            for i in state.on_node[name]
        ]

    patch.setattr(nodes, "on_register", harsh)


@mutation
def agents_are_not_told_to_forget(patch: Patch) -> None:
    send = Controller._send

    def no_forget(self: Controller, node: str, message: Any) -> None:
        if not isinstance(message, agentwire.Forget):
            send(self, node, message)

    patch.setattr(Controller, "_send", no_forget)
