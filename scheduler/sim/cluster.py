"""The simulated cluster: machines, wire, controller and people, and what happens to them."""

from __future__ import annotations

from scheduler.api.records import Device, Node, Partition
from scheduler.core.events import Caller
from scheduler.core.state import Settings
from scheduler.sim.acts import Plan
from scheduler.sim.auditor import Auditor
from scheduler.sim.controller import Controller
from scheduler.sim.loop import START_S, Failure, Loop
from scheduler.sim.machine import Machine
from scheduler.sim.people import People
from scheduler.sim.rows import Disk
from scheduler.sim.wire import Link

#: Simulated seconds after the last fault in which everything must come to rest.
REST_S = 5000.0
#: The longest that one end of a cut link does not notice.
NOTICE_S = 15.0


class Cluster:
    """Everything.  ``run`` plays the plan's acts, then mends all and waits for rest."""

    def __init__(self, plan: Plan, *, trace: bool = False) -> None:
        self.plan = plan
        self.loop = Loop(plan.seed)
        if trace:
            self.loop.trace = []
        self.cluster_name = "sim"
        self.mem_mib = 1024 * plan.cpus
        self.calm = False
        self.caller = Caller(uid=0, gid=0, user="root", group="root", admin=True)
        self.settings = Settings(
            cluster=self.cluster_name,
            kill_wait_s=plan.kill_wait_s,
            node_timeout_s=plan.node_timeout_s,
            return_to_service=plan.return_to_service,
            min_job_age_s=plan.min_job_age_s,
            requeue_delay_s=plan.requeue_delay_s,
            max_array_size=32,
        )
        names = [f"n{i}" for i in range(1, plan.nodes + plan.spares + 1)]
        self.machines = {name: Machine(self, name, i) for i, name in enumerate(names)}
        self.partitions = [
            Partition(name="main", nodes=names, default=True),
            Partition(name="fast", nodes=names[: len(names) // 2 + 1], priority=3, max_time_s=40),
        ]
        self.auditor = Auditor(self.loop, self.settings, self.mem_mib)
        self.disk = Disk()
        self.controller: Controller | None = None
        self.people = People(self)
        self._links = 0

    def node_records(self) -> list[Node]:
        """The nodes as the cluster file has them."""
        return [
            Node(
                name=name,
                cpus=self.plan.cpus,
                mem_mib=self.mem_mib,
                devices=[Device(index=d.index, cores=len(d.cores)) for d in machine.devices],
                spare=machine.number >= self.plan.nodes,
                standby=machine.number >= self.plan.nodes,
            )
            for name, machine in self.machines.items()
        ]

    # ------------------------------------------------------------ the whole history

    def run(self) -> None:
        """Raises ``Failure``."""
        for machine in self.machines.values():
            machine.start_agent()
        self.start_controller()
        for act in self.plan.acts:
            self.loop.run_until(START_S + act.at_s)
            self.people.do(act)
        self.mend()
        self.rest()

    def mend(self) -> None:
        """No more faults, and everything that is broken is repaired."""
        self.loop.note("all is mended")
        self.calm = True
        self.disk.full = False
        if self.controller is not None:
            self.controller.crash_in = ""
        for machine in self.machines.values():
            machine.cut = False
            machine.calm()
            for device in machine.devices:
                device.present = True
            if self.people.lost_devices:
                machine.crash_agent()
            machine.power_on()
        self.start_controller()
        self.people.mend()

    def rest(self) -> None:
        """Wait until all jobs are over and nobody holds anything any more."""
        end_s = self.loop.now + REST_S
        self.loop.run_until(end_s, self.people.at_rest)
        if not self.people.at_rest():
            raise Failure("liveness", self.people.unrest())
        self.people.settle_spares()
        self.loop.run_until(self.loop.now + 5)
        self.people.probe()
        self.loop.run_until(self.loop.now + 300, self.people.probes_over)
        self.people.check_probes()
        self.loop.run_until(self.loop.now + 2 * NOTICE_S)
        for machine in self.machines.values():
            agent = machine.agent
            assert agent is not None
            left = [*agent.state.steps, *agent.state.ending_jobs, *agent.state.cleaned]
            left += [*machine.journal]
            if left:
                raise Failure("leftover", f"{machine.name} still remembers {left}")
        self.auditor.rest(self.disk.job_rows())

    # ------------------------------------------------------------ the controller

    def start_controller(self) -> None:
        """Start one unless it runs; raises ``sqlite3.Error`` never: a full disk waits."""
        if self.controller is None and not self.disk.full:
            self.loop.note("controller starts")
            self.controller = Controller(self)
            self.people.controller_started()

    def controller_gone(self, controller: Controller) -> None:
        """It died; it comes back by itself after a while."""
        self.loop.note("controller dies")
        self.controller = None
        for name, peer in controller.peers.items():
            self.auditor.link_down(name)
            if peer.link is not None:
                self.sever(peer.link, self.machines[name])
        self.loop.after(8.0 * self.loop.draw(50), self.start_controller)

    def targets(self, dependency: str) -> list[str]:
        """The ids that a dependency names."""
        return [t for part in dependency.split(",") for t in part.split(":")[1:]]

    # ------------------------------------------------------------ the wire

    def connect(self, controller: Controller, name: str) -> Link | None:
        """A connection to the node's agent; None when it cannot be reached."""
        machine = self.machines[name]
        agent = machine.agent
        if machine.cut or agent is None:
            return None
        self._links += 1
        return Link(
            self.loop,
            self._links,
            lambda link, body: agent.arrived(link, body),
            lambda link, body: controller.arrived(name, link, body),
        )

    def sever(self, link: Link, machine: Machine) -> None:
        """The controller is at one end and knows; the agent will notice."""
        link.sever()
        agent = machine.agent
        if agent is not None:
            wait_s = NOTICE_S * self.loop.draw(51, link.number) ** 3
            self.loop.after(wait_s, lambda: agent.link_closed(link))

    def _lost(self, machine: Machine, longest_s: float) -> None:
        """The controller notices within ``longest_s`` that a node's link is gone."""
        controller = self.controller
        if controller is None:
            return
        link = controller.peers[machine.name].link
        if link is not None:
            self.sever(link, machine)
            wait_s = longest_s * self.loop.draw(52, link.number)
            self.loop.after(wait_s, lambda: controller.link_ended(machine.name, link))

    def cut(self, machine: Machine) -> None:
        """The network to the node is down until it is healed."""
        machine.cut = True
        self._lost(machine, NOTICE_S)

    def agent_gone(self, machine: Machine) -> None:
        """The agent's process ended: the kernel closes its link."""
        self._lost(machine, 0.1)

    def node_gone(self, machine: Machine) -> None:
        """Nobody is there to close anything."""
        self._lost(machine, NOTICE_S)

    def agent_closed(self, machine: Machine, link: Link) -> None:
        """The agent closed a link."""
        controller = self.controller
        link.sever()
        if controller is not None:
            self.loop.after(0.01, lambda: controller.link_ended(machine.name, link))
