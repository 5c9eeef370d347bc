"""Nodes: registration, silence, drains, and spares that take a lost node's place."""

from __future__ import annotations

from scheduler.api import agentwire, wire
from scheduler.api.errors import Denied, NotFound, Rejected
from scheduler.api.records import Job, Node, Partition, Step
from scheduler.core import reports
from scheduler.core.effects import AnyEffect, Launch, Reply, Send
from scheduler.core.events import Asked, LinkLost
from scheduler.core.lifecycle import current, node_cleaned, node_failed
from scheduler.core.placement import size_of
from scheduler.core.state import PARTITION_STATES, State
from scheduler.core.steps import end_step

SILENT = "Not responding"
DIED = "Node unexpectedly rebooted"


def on_register(
    state: State, name: str, message: agentwire.Register, now_s: float
) -> list[AnyEffect]:
    """An agent says who it is and all it runs; everything still owed to the node is sent again."""
    node = state.nodes[name]
    restarted = bool(node.agent_id) and node.agent_id != message.agent_id
    rebooted = bool(node.boot_id) and node.boot_id != message.boot_id
    node.responding = True
    node.last_seen_s = now_s
    node.boot_id, node.agent_id = message.boot_id, message.agent_id
    node.agent_pid, node.version = message.pid, message.version
    node.boot_s, node.agent_start_s = message.boot_s, message.start_s
    node.os, node.arch = message.os, message.arch
    state.touch_node(node)
    lost = [r for r in message.steps if r.lost and _is_news(state, name, r)]
    effects = _reconcile(state, node, message, now_s, rebooted=rebooted)
    if lost and restarted:
        effects += set_down(state, node, DIED, now_s)
    elif node.state == "UNKNOWN" or _comes_back(state, node):
        _to_service(node)
    _check_devices(node, message, now_s)
    balance_spares(state, now_s)
    state.want_schedule = True
    return effects


def _to_service(node: Node) -> None:
    """DOWN or UNKNOWN -> UP."""
    by_person = node.reason_by == "user" and node.state != "DOWN"
    node.state = "UP"
    if not node.drain and not by_person:
        node.reason, node.reason_s, node.reason_by = "", None, ""


def _is_news(state: State, name: str, report: agentwire.StepReport) -> bool:
    """Is the step, for all the controller knew, still there?  (Else its loss was told before.)"""
    found = reports.find(state, report.job_id, report.step_id, report.attempt)
    return found is not None and name not in found[1].ended


def _comes_back(state: State, node: Node) -> bool:
    if node.state != "DOWN":
        return False
    policy = state.settings.return_to_service
    return policy == 2 or (policy == 1 and node.reason == SILENT)


def _check_devices(node: Node, message: agentwire.Register, now_s: float) -> None:
    """Fewer devices than the instance type has: the node is drained until they are back."""
    want = [d.cores for d in node.devices]
    have = message.device_cores
    if len(have) >= len(want) and all(h >= w for h, w in zip(have, want, strict=False)):
        return
    if not node.drain:
        node.drain = True
        node.reason = (
            f"gres/neuron count reported lower than configured ({len(have)} < {len(want)})"
        )
        node.reason_s, node.reason_by = now_s, "auto"


def _reconcile(
    state: State, node: Node, message: agentwire.Register, now_s: float, *, rebooted: bool
) -> list[AnyEffect]:
    """Bring what the agent runs and what the state says together."""
    effects: list[AnyEffect] = []
    reported = {(r.job_id, r.step_id, r.attempt): r for r in message.steps}
    state.strays[node.name] = {}
    for report in message.steps:
        found = reports.find(state, report.job_id, report.step_id, report.attempt)
        over = found is None or node.name in found[1].ended
        if over and (report.running or report.lost):
            effects += _end_stray(state, node, report)
    for job_id in list(state.on_node[node.name]):
        job = state.jobs[job_id]
        for step in state.active_steps(job):
            if node.name in step.layout.nodes and node.name not in step.ended:
                key = (job.id, step.step_id, step.attempt)
                if rebooted and key not in reported:  # may have run before, unconfirmed
                    step.started.append(node.name)
                effects += _reconcile_step(state, node, job, step, reported.get(key), now_s)
        if job.completing and job.kill_at_s is None and job_id in state.on_node[node.name]:
            effects.append(_end_job(node, job.id, job.attempt))
    for job_id, attempt in message.cleaned:
        effects += on_job_cleaned(state, node.name, job_id, attempt, now_s)
    return effects


def _end_job(node: Node, job_id: int, attempt: int) -> Send:
    return Send(node=node.name, message=agentwire.EndJob(job_id=job_id, attempt=attempt))


def _end_stray(state: State, node: Node, report: agentwire.StepReport) -> list[AnyEffect]:
    """Something runs there that must not: ended before the node gets new work."""
    job = current(state, report.job_id, report.attempt)
    if job is not None and job.state == "RUNNING" and job.id in state.on_node[node.name]:
        end = agentwire.EndStep(job_id=job.id, step_id=report.step_id, attempt=report.attempt)
        return [Send(node=node.name, message=end)]
    state.strays[node.name][(report.job_id, report.attempt)] = None
    return [_end_job(node, report.job_id, report.attempt)]


def _reconcile_step(
    state: State,
    node: Node,
    job: Job,
    step: Step,
    report: agentwire.StepReport | None,
    now_s: float,
) -> list[AnyEffect]:
    if report is None and node.name not in step.started:
        if job.completing or step.killed:  # too late to start it
            step.ended.append(node.name)
            return reports.share_never_ran(state, job, step, now_s)
        return [Launch(node=node.name, job_id=job.id, step_id=step.step_id, attempt=step.attempt)]
    if report is None:
        detail = f"{node.name} lost the step's records"
        return node_failed(state, job, node.name, now_s, gone=False, detail=detail)
    if report.running and step.killed and not job.completing:
        return end_step(state, step, "")  # the first order may have been lost
    # That it has processes is said again by StepStarted, its end by StepEnded: a step that is
    # only on its way to them may get lost with the agent, and is then launched once more.
    return []


def on_job_cleaned(
    state: State, name: str, job_id: int, attempt: int, now_s: float
) -> list[AnyEffect]:
    """Nothing of the job is left on the node."""
    strays = state.strays[name]
    for key in [k for k in strays if k[0] == job_id and k[1] <= attempt]:
        del strays[key]
        state.want_schedule = True
    effects: list[AnyEffect] = [Send(node=name, message=agentwire.Forget(jobs=[(job_id, attempt)]))]
    job = current(state, job_id, attempt)
    if job is not None and job.completing:
        effects = node_cleaned(state, job, name, now_s) + effects
    return effects


def on_heartbeat(state: State, name: str, message: agentwire.Heartbeat, now_s: float) -> None:
    """The agent lives.  Load figures are not written to the store."""
    node = state.nodes[name]
    node.last_seen_s = now_s
    node.cpu_load, node.free_mem_mib = message.cpu_load, message.free_mem_mib
    if state.settings.return_to_service == 2 and node.responding and _comes_back(state, node):
        _to_service(node)
        state.touch_node(node)
        balance_spares(state, now_s)
        state.want_schedule = True


def on_link_lost(state: State, event: LinkLost) -> list[AnyEffect]:
    """Silence begins; the node is given ``node_timeout_s`` to come back."""
    node = state.nodes[event.node]
    if not node.responding:
        return []
    node.responding = False
    node.last_seen_s = event.now_s
    state.touch_node(node)
    state.at(event.now_s + state.settings.node_timeout_s, "silent", node.name)
    return []


def on_silent(state: State, name: str, now_s: float) -> list[AnyEffect]:
    """The node timeout is over: DOWN, and its jobs end or go elsewhere."""
    node = state.nodes.get(name)
    if node is None or node.responding:
        return []
    if now_s < node.last_seen_s + state.settings.node_timeout_s:
        return []
    effects = [] if node.state == "DOWN" else set_down(state, node, SILENT, now_s)
    for job_id in list(state.on_node[name]):
        effects += node_failed(state, state.jobs[job_id], name, now_s, gone=True)
    return effects


def set_down(state: State, node: Node, reason: str, now_s: float) -> list[AnyEffect]:
    """UP or UNKNOWN -> DOWN.

    Its jobs end now, but hold the node until the agent has cleaned it (or is silent too long).
    """
    node.state = "DOWN"
    if not (node.drain and node.reason_by == "user"):
        node.reason, node.reason_s, node.reason_by = reason, now_s, "auto"
        node.reason_uid = 0
    state.touch_node(node)
    effects: list[AnyEffect] = []
    for job_id in list(state.on_node[node.name]):
        effects += node_failed(state, state.jobs[job_id], node.name, now_s, gone=False)
    balance_spares(state, now_s)
    state.want_schedule = True
    return effects


def healthy(node: Node) -> bool:
    """Counts towards the size the cluster should have."""
    return (
        node.state in ("UP", "UNKNOWN")
        and not node.fail
        and not (node.drain and node.reason_by == "auto")
    )


def balance_spares(state: State, now_s: float) -> None:
    """Keep as many nodes of every partition in service as the cluster file says.

    A spare takes the place of a node that is down; when the lost node is back, an idle one
    becomes the spare again.  A drain set by a person takes no spare.
    """
    parts = {
        name: [p for p in state.partitions.values() if name in p.nodes] for name in state.nodes
    }
    more = {p.name: -size_of(state, p) for p in state.partitions.values()}  # serving - wanted
    serving = [n for n in state.nodes.values() if not n.spare and healthy(n)]
    spares = [n for n in state.nodes.values() if n.spare and n.state == "UP" and n.responding]
    for node in serving:
        _count(more, parts[node.name], 1)
    for node in spares:
        usable = not node.drain and not node.fail
        if usable and any(more[p.name] < 0 for p in parts[node.name]):
            node.spare = False
            _count(more, parts[node.name], 1)
            state.touch_node(node)
            state.want_schedule = True
    idle = [n for n in reversed(serving) if not state.on_node[n.name] and n.state == "UP"]
    idle.sort(key=lambda n: not n.standby)
    for node in idle:
        if parts[node.name] and all(more[p.name] > 0 for p in parts[node.name]):
            node.spare = True
            _count(more, parts[node.name], -1)
            state.touch_node(node)


def _count(more: dict[str, int], parts: list[Partition], change: int) -> None:
    for part in parts:
        more[part.name] += change


# ---------------------------------------------------------------------- scontrol update node


def on_update_node(state: State, event: Asked, request: wire.UpdateNode) -> list[AnyEffect]:
    """``scontrol update nodename=... state=... reason=...``."""
    if not event.caller.admin:
        raise Denied("Access/permission denied")
    for name in request.names:
        if name not in state.nodes:
            raise NotFound("Invalid node name specified")
    effects: list[AnyEffect] = []
    for name in request.names:
        effects += _update(state, state.nodes[name], event, request)
    balance_spares(state, event.now_s)
    state.want_schedule = True
    return [Reply(req=event.req, message=wire.Ok()), *effects]


def on_update_partition(
    state: State, event: Asked, request: wire.UpdatePartition
) -> list[AnyEffect]:
    """``scontrol update partitionname=... state=...``; kept over restarts."""
    if not event.caller.admin:
        raise Denied("Access/permission denied")
    part = state.partitions.get(request.name)
    if part is None:
        raise NotFound("Invalid partition name specified")
    if request.state.upper() not in PARTITION_STATES:
        raise Rejected("Invalid partition state specified")
    part.state = request.state.upper()
    state.set_meta(f"partition_state {part.name}", PARTITION_STATES.index(part.state))
    state.want_schedule = True
    return [Reply(req=event.req, message=wire.Ok())]


def _update(state: State, node: Node, event: Asked, request: wire.UpdateNode) -> list[AnyEffect]:
    word = request.state.upper()
    reason = (request.reason or "").strip()
    if reason.startswith("Action:"):
        raise Rejected(
            f"{reason} is not available: replacing and rebooting nodes is not built yet; "
            "use state=drain with a reason, then state=resume"
        )
    if word in ("DRAIN", "DOWN", "FAIL") and not reason:
        raise Rejected("You must specify a reason when DOWNING or DRAINING a node")
    if not word and request.reason == "":
        node.reason, node.reason_s, node.reason_by = "", None, ""
    if request.weight is not None:
        node.weight = request.weight
    effects: list[AnyEffect] = []
    if word == "DRAIN":
        node.drain = True
    elif word == "FAIL":
        node.fail = True
    elif word == "DOWN":
        effects = set_down(state, node, reason, event.now_s)
    elif word in ("RESUME", "UNDRAIN", "IDLE"):
        effects = _resume(state, node, word)
    elif word:
        raise Rejected("Invalid node state specified")
    if word in ("DRAIN", "DOWN", "FAIL") or (not word and reason):
        node.reason, node.reason_s = reason, event.now_s
        node.reason_by, node.reason_uid = "user", event.caller.uid
    state.touch_node(node)
    return effects


def _resume(state: State, node: Node, word: str) -> list[AnyEffect]:
    down = node.state == "DOWN"
    if word == "RESUME" and not (node.drain or node.fail or down):
        raise Rejected("Invalid node state specified")
    node.drain = node.fail = False
    node.reason, node.reason_s, node.reason_by = "", None, ""
    if down and word != "UNDRAIN":
        node.state = "UP" if node.responding else "UNKNOWN"
    return []
