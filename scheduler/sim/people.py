"""People and clients: they ask for things, repeat what was not answered, and mend at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scheduler.api import wire
from scheduler.api.records import JobSpec, Payload, Resources, SignalAt, StepSpec
from scheduler.sim.acts import Act
from scheduler.sim.loop import Failure
from scheduler.sim.machine import Machine

if TYPE_CHECKING:
    from scheduler.sim.cluster import Cluster

_PARTITIONS = (["fast"], ["fast", "main"], ["main", "fast"], ["main"])
_KINDS = ("after", "afterany", "afterok", "afternotok")


class People:
    """Carries out acts.  A job is named by the how-manieth accepted one it is."""

    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.loop = world.loop
        self.audit = world.auditor
        self.accepted: list[int] = []
        self.allocations: list[int] = []
        self.lost_devices = False
        self._unanswered: dict[str, wire.Submit] = {}
        self._probes: dict[str, int] = {}

    # ------------------------------------------------------------ acts

    def do(self, act: Act) -> None:
        """One act, on what there is now."""
        self.loop.note(f"act {act.number}: {act.kind} {[round(p, 3) for p in act.picks]}")
        getattr(self, f"_{act.kind}")(act)

    def _job(self, pick: float) -> int | None:
        """A job; recent ones more often than old ones."""
        if not self.accepted:
            return None
        return self.accepted[-1 - int(pick * pick * len(self.accepted))]

    def _machine(self, pick: float) -> Machine:
        machines = list(self.world.machines.values())
        return machines[int(pick * len(machines))]

    def _resources(self, act: Act) -> Resources:
        plan, p = self.world.plan, act.picks
        res = Resources()
        if p[0] < 0.4:
            count = 1 + int(p[1] * plan.nodes)
            res = Resources(min_nodes=count, max_nodes=count, nodes_given=True)
        if p[2] < 0.3:
            res.ntasks = 1 + int(p[3] * plan.cpus * 1.5)
        elif p[2] < 0.4:
            res.cpus_per_task = 1 + int(p[3] * plan.cpus)
        elif p[2] < 0.5:
            res.exclusive = True
        elif p[2] < 0.6:
            res.mem_per_node_mib = int(p[3] * self.world.mem_mib)
        if plan.instance_type and p[4] < 0.6:
            most = 2 if plan.instance_type == "trn1.2xlarge" else 12
            if p[4] < 0.3:
                res.gres = {"neuroncore": 1 + int(p[3] * most)}
            else:
                res.gres = {"neuron": 1 + int(p[3] * most / 2)}
        return res

    def _spec(self, act: Act) -> JobSpec:
        p = act.picks
        return JobSpec(
            name=f"job{act.number}",
            resources=self._resources(act),
            time_limit_s=int(2 + 60 * p[5] * p[5]) if p[5] < 0.6 else -1,
            requeue=p[6] < 0.7,
            hold=p[7] < 0.03,
            begin_s=self.loop.now + 20 * p[6] if 0.03 < p[7] < 0.08 else None,
            kill_on_bad_exit=p[7] > 0.8,
            partitions=_PARTITIONS[int(p[1] * 20)] if p[0] > 0.4 and p[1] < 0.2 else [],
            signal=SignalAt(signum=10, before_s=5, batch=p[3] < 0.5) if p[4] > 0.9 else None,
        )

    def _submit(self, act: Act) -> None:
        self._send_job(f"key{act.number}", self._spec(act))

    def _alloc(self, act: Act) -> None:
        spec = self._spec(act)
        spec.batch = False
        self._send_job(f"key{act.number}", spec)

    def _array(self, act: Act) -> None:
        spec = self._spec(act)
        last, throttle = int(act.picks[6] * 6), int(act.picks[7] * 4)
        spec.array = f"0-{last}" + (f"%{throttle}" if throttle else "")
        self._send_job(f"key{act.number}", spec)

    def _after(self, act: Act) -> None:
        target = self._job(act.picks[1])
        if target is None:
            return
        spec = self._spec(act)
        spec.dependency = f"{_KINDS[int(act.picks[3] * 4)]}:{target}"
        spec.kill_on_invalid_dep = act.picks[2] < 0.5
        other = self._job(act.picks[5])
        if act.picks[4] < 0.3 and other is not None:
            spec.dependency += f",afterany:{other}"
        self._send_job(f"key{act.number}", spec)

    def _end_alloc(self, act: Act) -> None:
        if self.allocations:
            job_id = self.allocations[int(act.picks[0] * len(self.allocations))]
            code = int(act.picks[1] * 2)
            self.ask(wire.EndAllocation(job_id=job_id, code=code))

    def _step(self, act: Act) -> None:
        running = self.audit.running()
        if not running:
            return
        p = act.picks
        spec = StepSpec(
            name="step",
            argv=["true"],
            overlap=p[1] < 0.4,
            exact=p[2] < 0.4,
            kill_on_bad_exit=p[3] < 0.3 if p[4] < 0.6 else None,
            wait_s=5 if p[5] < 0.1 else 0,
            time_limit_s=5 if p[6] < 0.2 else None,
        )
        if p[7] < 0.5:
            spec.ntasks, spec.ntasks_given = 1 + int(p[7] * 6), True
        job_id = running[int(p[0] * len(running))]
        self.ask(wire.CreateStep(job_id=job_id, spec=spec, key=f"step{act.number}"))

    def _cancel(self, act: Act) -> None:
        job_id = self._job(act.picks[0])
        if job_id is not None:
            task = f"_{int(act.picks[1] * 4)}" if act.picks[2] < 0.2 else ""
            self.ask(wire.Cancel(ids=[f"{job_id}{task}"]))

    def _cancel_step(self, act: Act) -> None:
        job_id = self._job(act.picks[0])
        if job_id is not None:
            step_id = ("0", "1", "batch")[int(act.picks[1] * 3)]
            self.ask(wire.Cancel(ids=[f"{job_id}.{step_id}"]))

    def _signal_step(self, act: Act) -> None:
        job_id = self._job(act.picks[0])
        if job_id is not None:
            signum = 9 if act.picks[1] < 0.5 else 10
            self.ask(wire.StepSignal(job_id=job_id, step_id="0", signum=signum))

    def _control(self, act: Act, op: str) -> None:
        job_id = self._job(act.picks[0])
        if job_id is not None:
            self.ask(wire.Control(op=op, ids=[str(job_id)]))

    def _hold(self, act: Act) -> None:
        self._control(act, "hold" if act.picks[1] < 0.5 else "uhold")

    def _release(self, act: Act) -> None:
        self._control(act, "release")

    def _requeue(self, act: Act) -> None:
        self._control(act, "requeue")

    def _requeuehold(self, act: Act) -> None:
        self._control(act, "requeuehold")

    def _update_limit(self, act: Act) -> None:
        job_id = self._job(act.picks[0])
        if job_id is not None:
            limit_s = int(act.picks[1] * 60)
            self.ask(wire.UpdateJob(id=str(job_id), time_limit_s=limit_s))

    def _update_begin(self, act: Act) -> None:
        job_id = self._job(act.picks[0])
        if job_id is not None:
            begin_s = self.loop.now + int(act.picks[1] * 30) - 5
            self.ask(wire.UpdateJob(id=str(job_id), begin_s=begin_s))

    def _node(self, act: Act, state: str, reason: str | None = None) -> None:
        name = self._machine(act.picks[0]).name
        self.ask(wire.UpdateNode(names=[name], state=state, reason=reason))

    def _drain(self, act: Act) -> None:
        self._node(act, "DRAIN", "check")

    def _resume(self, act: Act) -> None:
        self._node(act, "RESUME")

    def _down(self, act: Act) -> None:
        self._node(act, "DOWN", "broken")

    # ------------------------------------------------------------ faults

    def _cut(self, act: Act) -> None:
        self.world.cut(self._machine(act.picks[0]))

    def _heal(self, act: Act) -> None:
        self._machine(act.picks[0]).cut = False

    def _kill_controller(self, act: Act) -> None:
        controller = self.world.controller
        if controller is None:
            return
        if act.picks[0] < 0.3:
            controller.crash()
        else:
            controller.crash_in = ("before", "after", "between")[int(act.picks[1] * 3)]

    def _disk_full(self, act: Act) -> None:
        self.world.disk.full = True
        self.loop.after(5 * act.picks[0], self._disk_empty)

    def _disk_empty(self) -> None:
        self.world.disk.full = False
        self.world.start_controller()

    def _crash_agent(self, act: Act) -> None:
        machine = self._machine(act.picks[0])
        machine.crash_agent()
        self.loop.after(20 * act.picks[1] ** 2, machine.start_agent)

    def _kill_node(self, act: Act) -> None:
        self._machine(act.picks[0]).power_off(keep_journal=act.picks[1] < 0.5)

    def _start_node(self, act: Act) -> None:
        self._machine(act.picks[0]).power_on()

    def _kill_supervisor(self, act: Act) -> None:
        machine = self._machine(act.picks[0])
        if machine.supervisors:
            victim = machine.supervisors[int(act.picks[1] * len(machine.supervisors))]
            self.audit.supervisor_killed(machine.name, victim.key)
            sweep_s = 0.1 if machine.agent is not None else None
            victim.killed(sweep_s=sweep_s)

    def _fork_fails(self, act: Act) -> None:
        self._machine(act.picks[0]).fork_fails = True

    def _lose_device(self, act: Act) -> None:
        machine = self._machine(act.picks[0])
        if machine.devices:
            self.lost_devices = True
            machine.devices[int(act.picks[1] * len(machine.devices))].present = False

    # ------------------------------------------------------------ requests

    def _send_job(self, key: str, spec: JobSpec) -> None:
        request = wire.Submit(spec=spec, payload=Payload(script="#!/bin/sh\n"), key=key)
        self._unanswered[key] = request
        self.audit.job_wanted(key, request.spec)
        self._submit_now(key)

    def _submit_now(self, key: str) -> None:
        controller = self.world.controller
        if controller is not None and key in self._unanswered:
            request = self._unanswered[key]
            controller.submit(request, lambda message: self._answered(key, message))

    def _answered(self, key: str, message: wire.Reply) -> None:
        request = self._unanswered.pop(key, None)
        if request is None:
            return  # a client that repeated itself has read one answer and left
        self.loop.note(f"{key}: {message}")
        if isinstance(message, wire.Submitted):
            self.audit.accepted(key, message.job_id, self.world.disk.job_rows())
            self.accepted.append(message.job_id)
            if not request.spec.batch:
                self.allocations.append(message.job_id)
            if key.startswith("probe"):
                self._probes[key] = message.job_id
        elif isinstance(message, wire.Error) and message.code == "unavailable":
            self._unanswered[key] = request
            self.loop.after(2.0, lambda: self._submit_now(key))

    def ask(self, request: Any) -> None:
        """A request that its client does not repeat."""
        controller = self.world.controller
        if controller is not None:
            self.audit.asked(request)
            controller.ask(request, lambda message: self.audit.answered(request, message))

    def controller_started(self) -> None:
        """Clients that got no answer ask again."""
        for key in list(self._unanswered):
            self.loop.after(0.5 * self.loop.draw(60), lambda k=key: self._submit_now(k))  # type: ignore[misc]

    # ------------------------------------------------------------ the end

    def mend(self) -> None:
        """Resume nodes, release holds, end allocations - again until all is over."""
        self._tend()

    def _tend(self) -> None:
        controller = self.world.controller
        if controller is not None:
            for name in self._bad_nodes():
                if controller.state.nodes[name].responding:
                    self.ask(wire.UpdateNode(names=[name], state="RESUME"))
            for job_id in self.audit.held():
                self.ask(wire.Control(op="release", ids=[str(job_id)]))
            for job_id in self.allocations:
                if self.audit.state_of(job_id) == "RUNNING":
                    self.ask(wire.EndAllocation(job_id=job_id))
            for job_id in self.audit.waiting_for("DependencyNeverSatisfied"):
                self.ask(wire.Cancel(ids=[str(job_id)]))
            for job_id in self.audit.waiting_for("PartitionTimeLimit"):
                self.ask(wire.UpdateJob(id=str(job_id), time_limit_s=30))
        if not self.at_rest():
            self.loop.after(20.0, self._tend)

    def at_rest(self) -> bool:
        """All that was asked for is answered, all that was accepted over, every node in order."""
        return not self._unanswered and not self.audit.open_jobs() and not self._bad_nodes()

    def _bad_nodes(self) -> list[str]:
        """Nodes that somebody has to look after."""
        controller = self.world.controller
        nodes = controller.state.nodes.values() if controller is not None else []
        return [n.name for n in nodes if n.drain or n.fail or n.state != "UP" or not n.responding]

    def unrest(self) -> str:
        """What is not over, in words."""
        bad = self._bad_nodes()
        return f"unanswered: {list(self._unanswered)}; nodes: {bad}; {self.audit.describe_open()}"

    def settle_spares(self) -> None:
        """Any change of a node has the controller choose anew who is a spare."""
        self.ask(wire.UpdateNode(names=[next(iter(self.world.machines))], weight=1))

    def probe(self) -> None:
        """A whole node for a moment, on every node: nothing may be held any more."""
        controller = self.world.controller
        assert controller is not None
        for node in controller.state.nodes.values():
            if not node.spare:
                whole = Resources(nodelist=[node.name], exclusive=True)
                if node.devices:
                    whole.gres = {"neuron": len(node.devices)}
                spec = JobSpec(name="probe", resources=whole, requeue=False, time_limit_s=250)
                self._send_job(f"probe{node.name}", spec)

    def probes_over(self) -> bool:
        """All of them ended."""
        return not self._unanswered and not self.audit.open_jobs()

    def check_probes(self) -> None:
        """Raises ``Failure`` when a node did not take its probe."""
        if not self.probes_over():
            controller = self.world.controller
            nodes = controller.state.nodes.values() if controller is not None else []
            text = "; ".join(
                f"{n.name} {n.state} drain={n.drain} responding={n.responding} {n.reason}"
                for n in nodes
            )
            raise Failure("leak", f"{self.unrest()}; {text}")
