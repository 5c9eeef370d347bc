"""Messages between commands, controller and agents.

Every message is one frame (:mod:`scheduler.api.frames`) holding a JSON object whose ``type``
names the class.  Here ``Request`` (command -> controller) and ``Reply``; what controller and
agents say to each other is in :mod:`scheduler.api.agentwire`.  ``PROTOCOL`` grows when a message
changes its meaning; unknown fields are ignored, so adding one does not need a new number.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.api.records import (
    JobSpec,
    Payload,
    StepSpec,
    TaskExit,
    TaskLayout,
)

PROTOCOL = 1


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    """Base of all messages; the tag is the class name."""


# ---------------------------------------------------------------- command -> controller


class Ping(Message):
    """Answered by ``Pong``."""


class Submit(Message):
    """Answered by ``Submitted`` after the commit.

    ``key`` makes the request safe to repeat: a second one with the same key gets the same id.
    """

    spec: JobSpec
    payload: Payload
    key: str = ""
    test_only: bool = False


class GetJobs(Message):
    """Answered by ``Jobs``.  Empty filters match all; ``finished`` also reads the store."""

    ids: list[str] = msgspec.field(default_factory=list)  # "12", "12_3"
    users: list[str] = msgspec.field(default_factory=list)  # names or uids
    states: list[str] = msgspec.field(default_factory=list)  # long names; [] = active; ["all"]
    partitions: list[str] = msgspec.field(default_factory=list)
    names: list[str] = msgspec.field(default_factory=list)
    nodes: list[str] = msgspec.field(default_factory=list)
    accounts: list[str] = msgspec.field(default_factory=list)
    qos: list[str] = msgspec.field(default_factory=list)
    steps: bool = False


class GetAccounting(Message):
    """Answered by ``Jobs`` with steps, finished jobs included, ordered by id.

    Without ``ids``: jobs that were in a state of ``states`` (or in any) within the window.
    """

    ids: list[str] = msgspec.field(default_factory=list)
    users: list[str] = msgspec.field(default_factory=list)
    names: list[str] = msgspec.field(default_factory=list)
    states: list[str] = msgspec.field(default_factory=list)
    partitions: list[str] = msgspec.field(default_factory=list)
    accounts: list[str] = msgspec.field(default_factory=list)
    start_s: float | None = None
    end_s: float | None = None


class GetNodes(Message):
    """Answered by ``Nodes`` (nodes and partitions)."""


class GetConfig(Message):
    """Answered by ``Config``."""


class GetStatus(Message):
    """Answered by ``Status``."""


class GetScript(Message):
    """The batch script of a job; answered by ``Script``."""

    job_id: int


class Cancel(Message):
    """Cancel or signal jobs, array tasks (``"12_3"``, ``"12_[1-4]"``) or steps (``"12.0"``).

    ``signal`` 0 cancels.  Answered by ``Results``.
    """

    ids: list[str] = msgspec.field(default_factory=list)
    users: list[str] = msgspec.field(default_factory=list)
    states: list[str] = msgspec.field(default_factory=list)
    partitions: list[str] = msgspec.field(default_factory=list)
    names: list[str] = msgspec.field(default_factory=list)
    accounts: list[str] = msgspec.field(default_factory=list)
    nodes: list[str] = msgspec.field(default_factory=list)
    qos: list[str] = msgspec.field(default_factory=list)
    signal: int = 0
    batch_only: bool = False  # scancel -b
    full: bool = False  # scancel -f: batch script and steps


class Control(Message):
    """``scontrol hold|uhold|release|requeue|requeuehold|suspend|resume`` (op); -> ``Results``."""

    op: str
    ids: list[str]
    state: str = ""


class UpdateJob(Message):
    """``scontrol update job``: only the given fields change; -> ``Results``."""

    id: str
    name: str | None = None
    time_limit_s: int | None = None  # -1 unlimited
    priority: int | None = None
    nice: int | None = None
    partitions: list[str] | None = None
    dependency: str | None = None
    begin_s: float | None = None
    comment: str | None = None
    requeue: bool | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    nodelist: list[str] | None = None
    exclude: list[str] | None = None
    array_throttle: int | None = None
    account: str | None = None


class UpdatePartition(Message):
    """``scontrol update partition``; ``state`` UP, DOWN, DRAIN or INACTIVE; -> ``Ok``."""

    name: str
    state: str


class UpdateNode(Message):
    """``scontrol update node``; ``state`` DRAIN, RESUME, UNDRAIN, DOWN, FAIL, IDLE; -> ``Ok``."""

    names: list[str]
    state: str = ""
    reason: str | None = None
    weight: int | None = None


class CreateStep(Message):
    """srun in an allocation; answered by ``StepCreated`` or an error ``busy``.

    ``key`` makes it safe to repeat.
    """

    job_id: int
    spec: StepSpec
    key: str = ""


class AttachStep(Message):
    """Turns the connection into the step's stream; answered by ``StepEvent`` frames.

    ``offsets`` maps ``"TASK:FD"`` to the bytes already received, so a client that lost its
    connection goes on where it stopped.
    """

    job_id: int
    step_id: str
    offsets: dict[str, int] = msgspec.field(default_factory=dict)


class StepInput(Message):
    """On an attached connection: bytes for the tasks' stdin (packed), at ``offset``."""

    data: str = ""
    offset: int = 0
    eof: bool = False
    task: int | None = None


class StepAck(Message):
    """On an attached connection: bytes up to ``offsets["TASK:FD"]`` are written out."""

    offsets: dict[str, int]


class StepSignal(Message):
    """On an attached connection (or alone): signal to all tasks of the step."""

    job_id: int
    step_id: str
    signum: int


class WaitJob(Message):
    """Answered by ``Jobs`` when the job is ``allocated`` (or ended) or ``ended``."""

    job_id: int
    until: str = "ended"


class EndAllocation(Message):
    """salloc or srun gives its allocation back; ``code`` is its command's exit code; -> Ok."""

    job_id: int
    code: int = 0
    signal: int = 0


class Shutdown(Message):
    """Stop the controller; with ``agents`` also the agents and what they run; -> ``Ok``."""

    agents: bool = False


Request = (
    Ping
    | Submit
    | GetJobs
    | GetAccounting
    | GetNodes
    | GetConfig
    | GetStatus
    | GetScript
    | Cancel
    | Control
    | UpdateJob
    | UpdateNode
    | UpdatePartition
    | CreateStep
    | AttachStep
    | StepInput
    | StepAck
    | StepSignal
    | WaitJob
    | EndAllocation
    | Shutdown
)

# ---------------------------------------------------------------- controller -> command


class Pong(Message):
    version: str
    protocol: int
    cluster: str
    host: str
    pid: int


class Ok(Message):
    """Done, nothing else to say; ``warning`` is for stderr."""

    warning: str = ""


class Error(Message):
    """``code`` is one of :mod:`scheduler.api.errors`, ``message`` Slurm's text.

    ``warning``, when set, is a sentence more (which limit, what to do), printed as an error
    line of its own before the message.
    """

    code: str
    message: str
    warning: str = ""


class Submitted(Message):
    """``start_s`` and what follows answer ``test_only``: when and where it could start."""

    job_id: int
    warning: str = ""
    start_s: float | None = None
    num_cpus: int = 0
    node_list: str = ""
    partition: str = ""


class Result(Message):
    """Outcome for one id of a request; ``code`` "" is success."""

    id: str
    code: str = ""
    message: str = ""


class Results(Message):
    results: list[Result]


class Jobs(Message):
    """``jobs``: ``Job`` records as plain objects, each with ``steps`` when asked for.

    Beside the record's own fields a view has: ``steps`` (list of Step), ``node_list`` (folded),
    ``num_nodes``, ``num_cpus``, ``num_tasks``, ``est_start_s``, ``req_tres``, ``alloc_tres``
    (dict name -> number, mem in MiB).  Defaults are omitted.
    """

    jobs: list[dict[str, Any]]
    now_s: float = 0.0
    missing: list[str] = msgspec.field(default_factory=list)  # ids nobody knows


class Nodes(Message):
    """``nodes``: Node records, each with ``alloc_cpus``, ``alloc_mem_mib``, ``alloc_cores``,
    ``alloc_devices`` (lists of ids), ``jobs`` (count), ``partitions``, ``flags`` (list: base state
    word first, e.g. ["MIXED", "DRAIN", "NOT_RESPONDING"]); ``partitions``: Partition records.
    """

    nodes: list[dict[str, Any]]
    partitions: list[dict[str, Any]]
    now_s: float = 0.0
    cluster: str = ""


class Config(Message):
    """``values``: scontrol show config's names -> printed values."""

    values: dict[str, str]
    now_s: float = 0.0


class Status(Message):
    values: dict[str, Any]


class Script(Message):
    script: str  # packed


class StepCreated(Message):
    step_id: str
    attempt: int
    layout: TaskLayout
    job: dict[str, Any] = msgspec.field(default_factory=dict)  # view of the job


class StepEvent(Message):
    """What an attached srun sees.  Exactly one of the fields is set.

    ``output``: {"task", "fd", "offset", "data" (packed), "node"}; ``exits``: tasks that ended;
    ``node``: where they ran; ``started``: a node confirmed its tasks; ``done``: final Step record.
    ``killed``: why the step is being ended ("TIME LIMIT", "CANCELLED", "NODE FAILURE").
    """

    output: dict[str, Any] | None = None
    exits: list[TaskExit] | None = None
    node: str = ""
    started: list[int] | None = None
    done: dict[str, Any] | None = None
    killed: str = ""
    gone: bool = False  # unknown step: ended before and purged


Reply = (
    Pong
    | Ok
    | Error
    | Submitted
    | Results
    | Jobs
    | Nodes
    | Config
    | Status
    | Script
    | StepCreated
    | StepEvent
)
