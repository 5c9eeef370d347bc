"""Messages between controller and agents (see :mod:`scheduler.api.wire` for the form).

The controller opens the link and speaks first (``Welcome``); the agent answers with ``Register``.
Delivery within a link is in order; after a cut both sides say again what is not yet known to
have arrived, so every message here is safe to repeat.
"""

from __future__ import annotations

import msgspec

from scheduler.api.records import Payload, TaskExit, TaskLayout, Usage
from scheduler.api.wire import Message

# ---------------------------------------------------------------- controller -> agent


class Welcome(Message):
    """First message on a link.  ``node`` and ``cluster`` must match the agent's own.

    ``hosts`` maps every node name to its address (for /etc/hosts of local nodes), ``epoch``
    grows with every start of the controller; the agent drops links of an older epoch.
    """

    protocol: int
    cluster: str
    node: str
    epoch: int
    hosts: dict[str, str] = msgspec.field(default_factory=dict)
    heartbeat_s: float = 5.0
    kill_wait_s: float = 30.0


class Launch(Message):
    """Start one node's share of a step.  Safe to repeat (job, step, attempt is the key).

    ``tasks`` are the global ranks to start here; ``layout`` the whole step.  For the batch
    step: ``payload.script`` is written to the spool as slurm_script and run with
    ``payload.argv``; ``ntasks`` is 1.  For other steps ``argv`` is executed.  ``env`` is the
    complete environment of the user (packed values) before the agent adds per-task variables;
    ``vars`` are the SLURM_* of job and step that are the same for all tasks.
    ``std_out`` etc. are patterns (%j %t ... expanded by the agent with ``names``); "" means the
    stream goes to srun.  ``cpu_ids``/``mem_mib``/``cores``/``devices``: this node's share.
    """

    job_id: int
    step_id: str
    attempt: int
    uid: int
    gid: int
    layout: TaskLayout
    node_index: int
    tasks: list[int]
    user: str = ""
    argv: list[str] = msgspec.field(default_factory=list)
    payload: Payload | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)
    vars: dict[str, str] = msgspec.field(default_factory=dict)
    names: dict[str, str] = msgspec.field(default_factory=dict)  # pattern letters -> text
    work_dir: str = "/"
    std_out: str = ""
    std_err: str = ""
    std_in: str = ""
    open_mode: str = ""
    cpus: int = 1
    cpus_per_task: int = 1
    cpu_ids: list[int] = msgspec.field(default_factory=list)
    mem_mib: int = 0  # 0: no limit
    devices: list[int] = msgspec.field(default_factory=list)
    cores: list[int] = msgspec.field(default_factory=list)
    mpi: str = "pmi1"
    node_hosts: dict[str, str] = msgspec.field(default_factory=dict)  # node -> real host, for PMI
    pty: bool = False
    wait_s: int = 0


class Signal(Message):
    """Signal tasks of a step on this node.  ``all_steps``: of every step of the job.

    ``batch_shell``: only the batch script itself; default for the batch step is its whole
    session.  Older attempts than ``attempt`` are dropped.  ``notice``: a line for the step's
    stderr (the agent puts ``slurmstepd-NODE: error: `` before it and the local time in place of
    ``<at>``), printed once.
    """

    job_id: int
    step_id: str
    attempt: int
    signum: int
    all_steps: bool = False
    batch_shell: bool = False
    notice: str = ""


class EndStep(Message):
    """SIGKILL every process of the step on this node; answered by ``StepEnded``.

    ``notice`` as in ``Signal``.
    """

    job_id: int
    step_id: str
    attempt: int
    notice: str = ""


class EndJob(Message):
    """SIGKILL everything of the job (this attempt and older) here; answered by ``JobCleaned``.

    ``notice`` as in ``Signal``, for the batch script only.
    """

    job_id: int
    attempt: int
    notice: str = ""


class Forget(Message):
    """``StepEnded``/``JobCleaned`` of these are committed: drop them from the journal."""

    steps: list[tuple[int, str, int]] = msgspec.field(default_factory=list)  # job, step, attempt
    jobs: list[tuple[int, int]] = msgspec.field(default_factory=list)


class Input(Message):
    """Bytes for stdin of the step's tasks on this node."""

    job_id: int
    step_id: str
    attempt: int
    data: str = ""
    offset: int = 0
    eof: bool = False
    task: int | None = None


class OutputAck(Message):
    """Output up to these offsets reached srun; ``attach`` (re)starts the flow from there."""

    job_id: int
    step_id: str
    attempt: int
    offsets: dict[str, int] = msgspec.field(default_factory=dict)
    attach: bool = False


class PmiBarrierOut(Message):
    """All nodes entered barrier ``seq``; ``kvs`` holds the pairs of all nodes."""

    job_id: int
    step_id: str
    attempt: int
    seq: int
    kvs: dict[str, str]


class RelayFrame(Message):
    """An answer for a command connected to the agent's socket; ``close`` ends it."""

    conn: int
    data: str = ""  # the JSON text of the frame
    close: bool = False


class Stop(Message):
    """End the agent.  ``kill``: first SIGKILL everything it runs."""

    kill: bool = False


ToAgent = (
    Welcome
    | Launch
    | Signal
    | EndStep
    | EndJob
    | Forget
    | Input
    | OutputAck
    | PmiBarrierOut
    | RelayFrame
    | Stop
)

# ---------------------------------------------------------------- agent -> controller


class StepReport(Message):
    """A step the agent knows when it registers: running, or ended and not yet forgotten."""

    job_id: int
    step_id: str
    attempt: int
    tasks: list[int]
    running: bool
    lost: bool = False  # its supervisor died without a word
    exits: list[TaskExit] = msgspec.field(default_factory=list)
    usage: Usage | None = None


class Register(Message):
    """First answer to ``Welcome``; the full truth about this node."""

    protocol: int
    version: str
    node: str
    boot_id: str
    agent_id: str
    pid: int
    cpus: int
    mem_mib: int
    device_cores: list[int]  # cores per device found, by device index
    boot_s: float
    start_s: float
    os: str = ""
    arch: str = ""
    steps: list[StepReport] = msgspec.field(default_factory=list)
    cleaned: list[tuple[int, int]] = msgspec.field(default_factory=list)  # (job, attempt)


class Heartbeat(Message):
    cpu_load: float = 0.0
    free_mem_mib: int = 0


class StepStarted(Message):
    job_id: int
    step_id: str
    attempt: int
    pids: dict[str, int] = msgspec.field(default_factory=dict)  # task -> pid


class LaunchFailed(Message):
    """Nothing of the step runs here.  ``errno_text`` goes to ``scontrol show job``."""

    job_id: int
    step_id: str
    attempt: int
    reason: str
    errno_text: str = ""


class TasksExited(Message):
    job_id: int
    step_id: str
    attempt: int
    exits: list[TaskExit]


class StepEnded(Message):
    """All tasks of the step here ended and their remaining processes are gone.

    Repeated on every link until ``Forget``.  ``clean``: nothing of the whole job is left here.
    ``exits`` has every task of this node (also those sent before).
    """

    job_id: int
    step_id: str
    attempt: int
    exits: list[TaskExit]
    usage: Usage = msgspec.field(default_factory=Usage)
    clean: bool = False
    lost: bool = False


class JobCleaned(Message):
    """Nothing of the job's attempts up to ``attempt`` is left here."""

    job_id: int
    attempt: int


class Output(Message):
    """Bytes of one task's stdout or stderr at ``offset``; sent again until acknowledged."""

    job_id: int
    step_id: str
    attempt: int
    task: int
    fd: int
    offset: int
    data: str
    eof: bool = False


class PmiBarrierIn(Message):
    """All ranks of this node entered barrier ``seq``; repeated on a new link until answered."""

    job_id: int
    step_id: str
    attempt: int
    seq: int
    kvs: dict[str, str]


class RelayRequest(Message):
    """A command on this node sent a frame; ``uid`` is the peer's."""

    conn: int
    uid: int
    gid: int = 0
    data: str = ""
    close: bool = False


FromAgent = (
    Register
    | Heartbeat
    | StepStarted
    | LaunchFailed
    | TasksExited
    | StepEnded
    | JobCleaned
    | Output
    | PmiBarrierIn
    | RelayRequest
)
