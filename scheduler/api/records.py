"""Records shared by the controller, the agents and the commands (msgspec structs).

Times are seconds since the epoch (``*_s``), memory is MiB (``*_mib``).  ``None`` means "not
given" or "unknown".  Byte strings that may not be UTF-8 (paths, environment, scripts) are
packed by :mod:`scheduler.api.text`.
"""

from __future__ import annotations

import msgspec


class Struct(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of mutable records."""


class SignalAt(Struct):
    """``--signal=[B:]SIG[@SECONDS]``: send ``signum`` ``before_s`` seconds before the limit."""

    signum: int
    before_s: int = 60
    batch: bool = False  # B: to the batch shell only, else to all steps


class Resources(Struct):
    """What a job asks for; zero or None where the user said nothing."""

    min_nodes: int = 1
    max_nodes: int = 0  # 0: same as min_nodes when nodes_given, else as many as tasks need
    nodes_given: bool = False
    ntasks: int = 0  # 0: not given
    ntasks_per_node: int = 0
    cpus_per_task: int = 0
    mem_per_node_mib: int | None = None  # 0: all memory of the node
    mem_per_cpu_mib: int | None = None
    gres: dict[str, int] = msgspec.field(default_factory=dict)  # per node: neuron, neuroncore
    exclusive: bool = False
    nodelist: list[str] = msgspec.field(default_factory=list)  # -w, expanded
    exclude: list[str] = msgspec.field(default_factory=list)  # -x, expanded
    constraint: str = ""  # -C, features joined by & (only AND is built)


class Payload(Struct):
    """The bulky part of a submission; kept in the store, not in the core's memory."""

    script: str | None = None  # packed
    argv: list[str] = msgspec.field(default_factory=list)  # packed, arguments of the script
    env: dict[str, str] = msgspec.field(default_factory=dict)  # names plain, values packed


class JobSpec(Struct):
    """A submission as sbatch, salloc or srun send it, all values already normalised.

    ``batch`` False is an allocation (salloc, srun).  ``array`` and ``dependency`` are the
    user's text; the core parses them.  ``std_*`` are file name patterns (packed).
    """

    name: str
    batch: bool = True
    resources: Resources = msgspec.field(default_factory=Resources)
    partitions: list[str] = msgspec.field(default_factory=list)
    time_limit_s: int | None = None  # None: partition's default; -1: unlimited
    account: str = ""
    qos: str = ""
    comment: str = ""
    wckey: str = ""
    nice: int = 0
    priority: int | None = None  # --priority
    hold: bool = False
    begin_s: float | None = None
    requeue: bool | None = None
    dependency: str = ""
    kill_on_invalid_dep: bool | None = None
    array: str = ""
    signal: SignalAt | None = None
    open_mode: str = ""  # "", "append" or "truncate"
    command: str | None = None  # absolute path of the script; None for --wrap
    work_dir: str = "/"
    std_out: str = ""  # pattern, "" = default
    std_err: str = ""  # "" = with stdout
    std_in: str = "/dev/null"
    export: str = "ALL"  # recorded for display
    submit_host: str = ""
    alloc_sid: int = 0
    immediate: bool = False  # srun/salloc --immediate: fail rather than queue
    kill_on_bad_exit: bool = False


class NodeAlloc(Struct):
    """What one job holds on one node.  Core ids are node-wide (device x cores + k)."""

    node: str
    cpus: int
    cpu_ids: list[int] = msgspec.field(default_factory=list)
    mem_mib: int = 0
    devices: list[int] = msgspec.field(default_factory=list)  # whole or shared devices touched
    cores: list[int] = msgspec.field(default_factory=list)  # neuron cores held
    tasks: int = 1
    cleaned: bool = False  # agent said that nothing of the job is left there


class FirstFailure(Struct):
    """The first rank that failed in a step, as accounting names it."""

    task: int
    node: str
    code: int = 0
    signal: int = 0
    at_s: float = 0.0


class TaskLayout(Struct):
    """Where the tasks of a step run: ``tasks[i]`` are the global ranks on ``nodes[i]``."""

    nodes: list[str]
    tasks: list[list[int]]


class StepSpec(Struct):
    """A step as srun asks for it inside an allocation."""

    name: str
    argv: list[str]  # packed
    env: dict[str, str] = msgspec.field(default_factory=dict)  # packed values; whole environment
    work_dir: str = "/"
    ntasks: int = 0
    ntasks_given: bool = False
    nodes: int = 0  # -N, 0: not given
    max_nodes: int = 0
    ntasks_per_node: int = 0
    cpus_per_task: int = 0
    mem_per_node_mib: int | None = None
    mem_per_cpu_mib: int | None = None
    gres: dict[str, int] = msgspec.field(default_factory=dict)  # per node
    nodelist: list[str] = msgspec.field(default_factory=list)
    exclude: list[str] = msgspec.field(default_factory=list)
    overlap: bool = False
    exact: bool = False
    kill_on_bad_exit: bool | None = None
    wait_s: int = 0  # --wait: after the first task ended, seconds until the others are ended
    time_limit_s: int | None = None
    distribution: str = "block"  # block | cyclic
    mpi: str = "pmi1"  # pmi1 | none
    std_out: str = ""  # "" = to srun; else pattern opened on the nodes (packed)
    std_err: str = ""
    std_in: str = ""  # "" = srun's stdin to all tasks; "none"; or a number = that task only
    open_mode: str = ""
    relative: int = 0
    pty: bool = False


class TaskExit(Struct):
    """One task's end.  ``code`` 0..255, ``signal`` 0 when it exited by itself."""

    task: int
    code: int = 0
    signal: int = 0
    at_s: float = 0.0
    in_mpi: bool = False  # ended between MPI_Init and MPI_Finalize
    oom: bool = False
    launch_error: str = ""  # errno text when exec failed


class Usage(Struct):
    """Resource use of one step on one node."""

    user_cpu_s: float = 0.0
    system_cpu_s: float = 0.0
    max_rss_mib: int = 0


class Step(Struct):
    """A step in the controller's state."""

    job_id: int
    step_id: str  # "0", "1", ... or "batch", "interactive"
    attempt: int
    name: str
    layout: TaskLayout
    state: str = "RUNNING"
    ntasks: int = 1
    cpus: int = 1
    cpus_per_task: int = 1
    mem_mib: int = 0
    allocs: list[NodeAlloc] = msgspec.field(default_factory=list)
    overlap: bool = False
    kill_on_bad_exit: bool = False
    start_s: float = 0.0
    end_s: float | None = None
    time_limit_s: int | None = None
    code: int = 0  # largest exit code of the tasks
    signal: int = 0
    first_failure: FirstFailure | None = None
    started: list[str] = msgspec.field(default_factory=list)  # nodes that confirmed the launch
    ended: list[str] = msgspec.field(default_factory=list)  # nodes on which all tasks ended
    exits: int = 0
    oom: bool = False
    killed: bool = False
    reason: str = ""
    usage: dict[str, Usage] = msgspec.field(default_factory=dict)  # by node
    kill_at_s: float | None = None  # when TERM turns into KILL
    spec: StepSpec | None = None  # kept while a launch may have to be sent again
    key: str = ""  # of the request, so that a repeated one gets the same step
    wait_kill_s: float | None = None  # srun --wait: when the rest is ended


class Job(Struct):
    """A job in the controller's state and in the store.

    One record stands for all tasks of an array that have not started yet (``array_tasks``
    holds them); a task that starts gets a record of its own.  ``attempt`` is the fencing
    number: it grows with every launch, messages about an older attempt are dropped.
    """

    id: int
    name: str
    uid: int
    gid: int
    user: str
    group: str
    account: str = ""
    qos: str = "normal"
    partition: str = ""
    partitions: list[str] = msgspec.field(default_factory=list)
    batch: bool = True
    state: str = "PENDING"
    completing: bool = False
    reason: str = "None"  # one word, as squeue %r
    detail: str = ""  # a sentence for people (scontrol show job, explain)
    priority: int = 0
    nice: int = 0
    admin_priority: int | None = None
    held: str = ""  # "", "user" or "admin"
    res: Resources = msgspec.field(default_factory=Resources)
    submit_s: float = 0.0
    eligible_s: float | None = None
    begin_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    time_limit_s: int | None = None  # None: unlimited
    requeue: bool = True
    restarts: int = 0
    attempt: int = 0
    dependency: str = ""  # what is left of it, Slurm's form with states
    deps: list[tuple[str, str]] = msgspec.field(
        default_factory=list
    )  # unmet: (kind, "12" or "12_3")
    dep_any: bool = False  # '?' separated: one is enough
    kill_on_invalid_dep: bool = False
    array_job_id: int = 0  # 0: not an array
    array_task_id: int | None = None
    array_tasks: list[int] = msgspec.field(default_factory=list)  # pending ids, ascending
    array_throttle: int = 0
    array_all: tuple[int, int, int, int] | None = None  # count, min, max, step
    signal: SignalAt | None = None
    signalled: bool = False
    open_mode: str = ""
    command: str | None = None
    work_dir: str = "/"
    std_out: str = ""
    std_err: str = ""
    std_in: str = "/dev/null"
    comment: str = ""
    wckey: str = ""
    submit_host: str = ""
    alloc_sid: int = 0
    kill_on_bad_exit: bool = False
    allocs: list[NodeAlloc] = msgspec.field(default_factory=list)
    last_nodes: list[str] = msgspec.field(default_factory=list)  # of the ended allocation
    exclude_nodes: list[str] = msgspec.field(default_factory=list)  # by recovery, this job only
    next_step: int = 0
    code: int = 0
    signal_code: int = 0  # signal that ended the batch script
    derived_code: int = 0
    derived_signal: int = 0
    first_failure: FirstFailure | None = None
    end_state: str = ""  # decided state while COMPLETING
    requeue_after: str = ""  # "", "requeue", "hold": what happens when cleaned
    cancelled_by: int | None = None
    kill_at_s: float | None = None
    request_key: str = ""


class Device(Struct):
    """One accelerator of a node as the scheduler sees it."""

    index: int
    cores: int
    healthy: bool = True


class Node(Struct):
    """A node: configured size, state flags and what its agent last said.

    ``state`` is the base state UNKNOWN, DOWN or UP (shown as IDLE, MIXED or ALLOCATED by
    what is allocated); the flags add DRAIN, FAIL, the ``*`` of not responding, and so on.
    """

    name: str
    addr: str = ""
    cpus: int = 1
    mem_mib: int = 1024
    devices: list[Device] = msgspec.field(default_factory=list)
    features: list[str] = msgspec.field(default_factory=list)
    instance_type: str = ""
    weight: int = 1
    state: str = "UNKNOWN"
    drain: bool = False
    fail: bool = False
    responding: bool = False
    spare: bool = False  # kept free now
    standby: bool = False  # the cluster file calls it a spare
    reason: str = ""
    reason_s: float | None = None
    reason_uid: int = 0
    reason_by: str = ""  # "user" or "auto": who set the drain
    boot_id: str = ""
    agent_id: str = ""  # changes with every start of the agent
    agent_pid: int = 0
    boot_s: float | None = None
    agent_start_s: float | None = None
    last_busy_s: float | None = None
    last_seen_s: float = 0.0
    version: str = ""
    os: str = ""
    arch: str = ""
    cpu_load: float = 0.0
    free_mem_mib: int = 0


class Partition(Struct):
    """A partition of the cluster file."""

    name: str
    nodes: list[str]
    default: bool = False
    max_time_s: int | None = None
    default_time_s: int | None = None
    state: str = "UP"
    priority: int = 1
    max_nodes: int | None = None
