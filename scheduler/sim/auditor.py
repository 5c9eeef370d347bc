"""Decides from what happened alone - never from the cores' state - what is allowed.

Rules (the name that a failure carries): ``lost``, ``resubmitted``, ``twice``, ``uncommitted``,
``fencing``, ``double use``, ``early end``, ``end state``, ``rerun``, ``undone cancel``,
``held``, ``drain``, ``throttle``, ``dependency``, ``killed``.
"""

from __future__ import annotations

from nodeagent.order import Key
from scheduler.api import agentwire, wire
from scheduler.api.records import Job, JobSpec, TaskExit
from scheduler.api.states import STEP_BATCH
from scheduler.core.state import Settings
from scheduler.sim.facts import SLACK_S, Facts, Live, Row
from scheduler.sim.loop import Failure, Loop
from scheduler.store import TurnRows


class Auditor:
    """Told of everything that happens; raises ``Failure`` when it must not."""

    def __init__(self, loop: Loop, settings: Settings, mem_mib: int) -> None:
        self.loop = loop
        self.mem_mib = mem_mib
        self.facts = Facts(loop, settings.node_timeout_s)
        self._open: dict[int, None] = {}

    # ------------------------------------------------------------ people

    def job_wanted(self, key: str, spec: JobSpec) -> None:
        """A client sends this submission until it is answered."""
        self.facts.wanted[spec.name] = spec.dependency

    def accepted(self, key: str, job_id: int, stored: dict[int, tuple[int, str]]) -> None:
        """A client read that its job has this id."""
        if job_id not in stored:
            raise Failure("lost", f"job {job_id} was promised before it was in the store")
        if job_id in self.facts.by_key.values():
            raise Failure("lost", f"job id {job_id} was given out twice")
        self.facts.by_key[key] = job_id

    def asked(self, request: wire.Message) -> None:
        """A request reached the controller; it may be lost with it."""
        facts = self.facts
        facts.requests.append((self.loop.now, request))
        if isinstance(request, wire.UpdateNode):
            for name in request.names:
                if request.state == "RESUME":
                    facts.drained.pop(name, None)
                elif request.state == "DOWN":
                    facts.troubles.setdefault(name, []).append(self.loop.now)
        if isinstance(request, wire.Control) and "requeue" in request.op:
            for job_id in list(facts.cancelled):
                if _requeues(facts, request, facts.rows[job_id]):
                    del facts.cancelled[job_id]

    def answered(self, request: wire.Message, reply: wire.Reply) -> None:
        """The controller answered: from now on the request counts."""
        facts = self.facts
        later = facts.since(request)
        if isinstance(request, wire.UpdateNode) and request.state == "DRAIN":
            undone = [
                n
                for other in later
                if isinstance(other, wire.UpdateNode) and other.state == "RESUME"
                for n in other.names
            ]
            if isinstance(reply, wire.Ok):
                facts.drained.update({n: None for n in request.names if n not in undone})
        elif isinstance(request, wire.Cancel) and isinstance(reply, wire.Results):
            for result in reply.results:
                if not result.code and result.id.isdecimal():
                    for row in facts.members(int(result.id)):
                        if not any(_requeues(facts, other, row) for other in later):
                            facts.cancelled[row.id] = self.loop.now

    # ------------------------------------------------------------ the store

    def committed(self, rows: TurnRows) -> None:
        """A turn's rows are durable: anybody may see them."""
        facts = self.facts
        for step in rows.steps:
            facts.step_rows[Key(step.job_id, step.step_id, step.attempt)] = step
        changed = [self._job_committed(job) for job in rows.jobs]
        for row, before in changed:
            if row.attempt > before.attempt:
                facts.began[row.id, row.attempt] = self.loop.now
                self._check_start(row, before)
            if row.over:
                self._open.pop(row.id, None)
                self._check_end(row)
            else:
                self._open[row.id] = None
            if not row.runs and not row.completing:
                self._check_nothing_left(row)

    def _job_committed(self, job: Job) -> tuple[Row, Row]:
        facts = self.facts
        row = facts.rows.get(job.id)
        if row is None:
            row = facts.rows[job.id] = Row(job.id)
            if job.array_job_id:
                facts.arrays.setdefault(job.array_job_id, []).append(job.id)
        before = Row(
            row.id, attempt=row.attempt, started_s=row.started_s, nodes=row.nodes, held=row.held
        )
        row.update(job, self.loop.now)
        return row, before

    def _check_start(self, row: Row, before: Row) -> None:
        facts = self.facts
        what = f"job {row.id} attempt {row.attempt}"
        for node in row.nodes:
            if node in facts.drained:
                raise Failure("drain", f"{what} was started on {node}, which is drained")
        if before.held and row.held:
            raise Failure("held", f"{what} was started while held")
        asked_s = facts.cancelled.get(row.id)
        if asked_s is not None and asked_s < self.loop.now:
            raise Failure("undone cancel", f"{what} was started after its cancellation")
        if row.array and row.throttle:
            count = sum(1 for other in facts.members(row.array) if other.runs)
            if count > row.throttle:
                raise Failure("throttle", f"{count} tasks of array {row.array} run")
        if row.attempt > before.attempt + 1:
            raise Failure("uncommitted", f"{what} follows attempt {before.attempt}")
        if before.attempt and not self._may_run_again(row, before):
            raise Failure("rerun", f"{what}: nothing happened to attempt {before.attempt}")
        if not before.attempt:
            self._check_dependency(row)

    def _may_run_again(self, row: Row, before: Row) -> bool:
        facts = self.facts
        if facts.asked_for(row, wire.Control, before.started_s):
            return True
        return row.requeue and any(facts.trouble(n, before.started_s) for n in before.nodes)

    def _check_dependency(self, row: Row) -> None:
        for part in filter(None, self.facts.wanted.get(row.name, "").split(",")):
            kind, target = part.split(":")
            rows = self.facts.members(int(target))
            good = {
                "after": all(r.ever_started or r.ever_over for r in rows),
                "afterany": all(r.ever_over for r in rows),
                "afterok": all(r.ever_good for r in rows),
                "afternotok": any(r.ever_bad for r in rows),
            }[kind]
            if not good:
                raise Failure("dependency", f"job {row.id} was started against {part}")

    def _check_nothing_left(self, row: Row) -> None:
        for (node, key), live in self.facts.live.items():
            if key.job_id == row.id and not self.facts.silent(node, live.since_s):
                raise Failure(
                    "early end", f"job {row.id} is {row.state} while {key} runs on {node}"
                )

    # ------------------------------------------------------------ ends

    def _check_end(self, row: Row) -> None:
        rule = getattr(self, f"_may_be_{row.state.lower()}", None)
        if rule is None or not rule(row):
            raise Failure("end state", f"job {row.id} attempt {row.attempt} is {row.state}")

    def _script_ended(self, row: Row) -> bool:
        """The row shows how the script of this attempt ended."""
        ended = self.facts.batch_exit(row)
        return ended is not None and (ended.code, ended.signal) == (row.code, row.signal)

    def _may_be_completed(self, row: Row) -> bool:
        if row.batch:
            return self._script_ended(row) and (row.code, row.signal) == (0, 0)
        return self.facts.asked_for(row, wire.EndAllocation, row.started_s)

    def _may_be_failed(self, row: Row) -> bool:
        if not row.batch:
            return self.facts.asked_for(row, wire.EndAllocation, row.started_s)
        batch = Key(row.id, STEP_BATCH, row.attempt)
        if batch in self.facts.no_launch:
            return True
        if batch not in self.facts.exits and self.facts.step_end_asked(batch):
            return (row.code, row.signal) == (0, 9)  # ended before it began
        return self._script_ended(row) and (row.code, row.signal) != (0, 0)

    def _may_be_out_of_memory(self, row: Row) -> bool:
        ended = self.facts.batch_exit(row)
        return ended is not None and ended.oom

    def _may_be_cancelled(self, row: Row) -> bool:
        facts = self.facts
        if row.kill_on_bad_dep and row.attempt == 0:
            return True
        ended = not row.batch and facts.asked_for(row, wire.EndAllocation, row.started_s)
        return ended or facts.asked_for(row, wire.Cancel, row.started_s)

    def _may_be_timeout(self, row: Row) -> bool:
        return row.limit_s is not None and self._overdue(row)

    def _overdue(self, row: Row) -> bool:
        return self.loop.now >= row.started_s + row.least_limit_s - SLACK_S

    def _may_be_node_fail(self, row: Row) -> bool:
        return any(self.facts.trouble(n, row.started_s) for n in row.nodes)

    # ------------------------------------------------------------ processes

    def started(self, node: str, launch: agentwire.Launch) -> None:
        """Processes of a step begin on a node."""
        facts = self.facts
        key = Key(launch.job_id, launch.step_id, launch.attempt)
        if (node, key) in facts.ever:
            raise Failure("twice", f"{key} was started again on {node}")
        facts.ever[node, key] = None
        row = facts.rows.get(key.job_id)
        if row is None or row.attempt < key.attempt:
            raise Failure("uncommitted", f"{key} was started, but no row says so")
        newest = facts.newest.get(key.job_id, 0)
        began_s = facts.began.get((key.job_id, key.attempt), self.loop.now)
        if newest > key.attempt and not facts.trouble(node, began_s):
            raise Failure("fencing", f"{key} was started on {node} after attempt {newest}")
        facts.newest[key.job_id] = max(newest, key.attempt)
        mem_mib: dict[int, int] = {key.job_id: launch.mem_mib}
        for (where, other), live in facts.live.items():
            if other.job_id == key.job_id:
                if other.attempt < key.attempt and (
                    where == node or not facts.silent(where, live.since_s)
                ):
                    raise Failure("fencing", f"{key} was started while {other} runs on {where}")
            elif where == node:
                self._check_shared(node, launch, live.launch)
            if where == node:
                job_mib = mem_mib.get(other.job_id, 0)
                mem_mib[other.job_id] = max(job_mib, live.launch.mem_mib)
        if sum(mem_mib.values()) > self.mem_mib:
            raise Failure("double use", f"memory of {node}: {mem_mib}")
        facts.live[node, key] = Live(launch, self.loop.now)

    def _check_shared(self, node: str, one: agentwire.Launch, two: agentwire.Launch) -> None:
        for what in ("cpu_ids", "cores"):
            both = [i for i in getattr(one, what) if i in getattr(two, what)]
            if both:
                raise Failure(
                    "double use", f"{what} {both} of {node} by jobs {one.job_id} and {two.job_id}"
                )

    def task_exited(self, node: str, key: Key, ended: TaskExit) -> None:
        """A task ended and its supervisor saw how."""
        self.facts.exits.setdefault(key, []).append(ended)

    def gone(self, node: str, key: Key) -> None:
        """No process of the step is left on the node."""
        self.facts.live.pop((node, key), None)
        self.facts.gone_at[key] = self.loop.now

    def launch_failed(self, node: str, key: Key) -> None:
        """The node could not start the step."""
        self.facts.no_launch[key] = None

    def ordered(self, node: str, key: Key, signum: int) -> None:
        """A supervisor was told to end its tasks: there must be a reason."""
        if not self._may_be_ended(key):
            raise Failure("killed", f"{key} on {node} was sent signal {signum} for no reason")

    def _may_be_ended(self, key: Key) -> bool:
        facts = self.facts
        row = facts.rows[key.job_id]
        since_s = row.started_s
        batch = Key(row.id, STEP_BATCH, row.attempt)
        if row.attempt > key.attempt or batch in facts.gone_at or batch in facts.no_launch:
            return True
        if any(facts.asked_for(row, kind, since_s) for kind in _ENDING):
            return True
        if facts.step_end_asked(key) or facts.step_end_asked(batch) or self._overdue(row):
            return True
        if any(facts.trouble(n, since_s) for n in row.nodes):
            return True
        step = facts.step_rows.get(key)
        if step is None:
            return False
        if step.time_limit_s is not None and self.loop.now >= step.start_s + step.time_limit_s:
            return True
        exits = facts.exits.get(key, [])
        bad = any(e.code or e.signal for e in exits)
        waited = step.spec is not None and bool(step.spec.wait_s) and bool(exits)
        return (bad and step.kill_on_bad_exit) or waited or key in facts.no_launch

    # ------------------------------------------------------------ losses

    def node_died(self, node: str) -> None:
        """Power off."""
        self.facts.troubles.setdefault(node, []).append(self.loop.now)
        self.facts.died[node] = None

    def supervisor_killed(self, node: str, key: Key) -> None:
        """Somebody killed a supervisor."""
        self.facts.troubles.setdefault(node, []).append(self.loop.now)

    def link_up(self, node: str) -> None:
        """The controller hears the node again."""
        facts = self.facts
        down_s = facts.down_since.get(node)
        if down_s is not None and self.loop.now >= down_s + facts.node_timeout_s - 0.001:
            facts.silences.setdefault(node, []).append(self.loop.now)
        facts.down_since[node] = None
        facts.died.pop(node, None)

    def link_down(self, node: str) -> None:
        """The controller knows that it does not reach the node (or is not there itself)."""
        facts = self.facts
        if facts.down_since.get(node) is None:
            facts.down_since[node] = self.loop.now
        if node in facts.died:  # until now jobs may have been sent to a dead machine
            facts.troubles.setdefault(node, []).append(self.loop.now)

    # ------------------------------------------------------------ what people can see

    def running(self) -> list[int]:
        """Jobs that run."""
        return [i for i in self._open if self.facts.rows[i].runs]

    def held(self) -> list[int]:
        """Jobs that wait for a release."""
        return [i for i in self._open if self.facts.rows[i].held]

    def waiting_for(self, reason: str) -> list[int]:
        """Jobs that wait for this reason."""
        return [i for i in self._open if self.facts.rows[i].reason == reason]

    def state_of(self, job_id: int) -> str:
        """Its state, "" when nobody knows it."""
        row = self.facts.rows.get(job_id)
        return row.state if row is not None else ""

    def open_jobs(self) -> bool:
        """Is any job not over?"""
        return bool(self._open)

    def describe_open(self) -> str:
        """The jobs that are not over, in words."""
        rows = [self.facts.rows[i] for i in self._open]
        return "; ".join(
            f"job {r.id} {r.state}{' completing' if r.completing else ''} ({r.reason}) "
            f"attempt {r.attempt} on {r.nodes}"
            for r in rows
        )

    def rest(self, stored: dict[int, tuple[int, str]]) -> None:
        """At the end of a history."""
        facts = self.facts
        for key, job_id in facts.by_key.items():
            if job_id not in stored:
                raise Failure("lost", f"job {job_id} ({key}) was accepted and is not in the store")
        if facts.live:
            raise Failure("early end", f"all jobs are over, but these run: {list(facts.live)}")
        first: dict[str, int] = {}
        for row in facts.rows.values():
            base = row.array or row.id
            if first.setdefault(row.name, base) != base and row.name != "probe":
                raise Failure("resubmitted", f"{row.name} is job {first[row.name]} and {base}")


def _requeues(facts: Facts, request: wire.Message, row: Row) -> bool:
    """Does ``request`` ask to run the job again?"""
    if not isinstance(request, wire.Control) or "requeue" not in request.op:
        return False
    return any(text in facts.names(row) for text in request.ids)


_ENDING: tuple[type[wire.Message], ...] = (wire.Cancel, wire.Control, wire.EndAllocation)
