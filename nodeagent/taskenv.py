"""The environment of a task: the user's, the step's variables, and what only the node knows."""

from __future__ import annotations

import os
import pwd
import sys
from dataclasses import dataclass, field

from nodeagent.order import Order
from scheduler.api.text import unpack

#: Wire-up of another launcher or an outer step: would mislead MPI in this one.
_FOREIGN = (
    "PMI_FD",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_PORT",
    "PMI_ID",
    "PMI_SPAWNED",
    "NEURON_RT_VISIBLE_CORES",
)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_THREADS_MARK = "CLUSTERCTL_DEFAULT_THREADS"
_LIMIT_PREFIX = "SLURM_RLIMIT_"
_LOGIN_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(slots=True, kw_only=True)
class NodeConfig:
    """NODE_DIR/node.json as the provisioner wrote it.

    ``bin``: folder of the drop-in commands; ``home``: CLUSTERCTL_HOME of jobs; ``socket``: where
    commands in jobs find the controller.
    """

    dir: str
    cluster: str
    node: str
    cpus: int = 1
    mem_mib: int = 1024
    instance_type: str = ""
    hosts: dict[str, str] = field(default_factory=dict)
    isolate: bool = False
    bin: str = ""
    home: str = ""
    socket: str = ""


def ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 6]`` as ``0-2,6``."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if previous is not None and number != previous + 1:
            parts.append(f"{start}" if start == previous else f"{start}-{previous}")
            start = number
        elif previous is None:
            start = number
        previous = number
    return ",".join(parts)


def cores_of_task(cores: list[int], local_rank: int, local_tasks: int) -> list[int]:
    """A task's share of the node's cores: an even split in order, else all of them."""
    if local_tasks and len(cores) % local_tasks == 0 and len(cores) >= local_tasks:
        share = len(cores) // local_tasks
        return sorted(cores)[local_rank * share : (local_rank + 1) * share]
    return sorted(cores)


def ranks_on_host(order: Order, node: str) -> int:
    """Tasks of the step on the real machine that ``node`` is on."""
    host = order.node_hosts.get(node, node)
    return sum(
        len(ranks)
        for name, ranks in zip(order.nodes, order.node_tasks, strict=True)
        if order.node_hosts.get(name, name) == host
    )


def mpi_library() -> str:
    """libmpi of the mpich wheel, which lies in this interpreter's prefix; "" when absent."""
    for name in ("libmpi.so.12", "libmpi.so"):
        path = os.path.join(sys.prefix, "lib", name)
        if os.path.exists(path):
            return path
    return ""


def take_limits(env: dict[str, str]) -> dict[str, int]:
    """Remove ``SLURM_RLIMIT_*`` from ``env``: soft limits of the submitting shell by name."""
    limits = {}
    for name in [name for name in env if name.startswith(_LIMIT_PREFIX)]:
        text = env.pop(name)
        if text.lstrip("-").isdigit():
            limits[name.removeprefix(_LIMIT_PREFIX)] = int(text)
    return limits


def _threads(env: dict[str, str], order: Order) -> None:
    wanted = str(max(1, min(order.cpus_per_task, os.cpu_count() or 1)))
    inherited = env.get(_THREADS_MARK)
    for name in _THREADS:
        if env.get(name) in (None, inherited):
            env[name] = wanted
    env[_THREADS_MARK] = wanted


def _search_path(env: dict[str, str], config: NodeConfig, *, batch: bool) -> None:
    if batch:
        env.setdefault("PATH", _LOGIN_PATH)
    if not config.bin or "PATH" not in env:
        return
    rest = [part for part in env["PATH"].split(":") if part != config.bin]
    env["PATH"] = ":".join([config.bin, *rest])


def _login(env: dict[str, str], uid: int) -> None:
    """What a login would set, where the user exported nothing (``sbatch --export=NONE``)."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return
    env.setdefault("HOME", entry.pw_dir)
    env.setdefault("USER", entry.pw_name)
    env.setdefault("LOGNAME", entry.pw_name)
    env.setdefault("SHELL", entry.pw_shell or "/bin/sh")


def common(order: Order, config: NodeConfig) -> dict[str, str]:
    """What all tasks of the step on this node share (values still packed)."""
    env = {name: value for name, value in order.env.items() if name not in _FOREIGN}
    env.update(order.vars)
    node = config.node
    env.update(
        SLURMD_NODENAME=node,
        SLURM_NODEID=str(order.node_index),
        SLURM_CPUS_ON_NODE=str(order.cpus),
        SLURM_GTIDS=",".join(map(str, order.tasks)),
        SLURM_TOPOLOGY_ADDR=node,
        SLURM_TOPOLOGY_ADDR_PATTERN="node",
        NEURON_DEVICE_DIR=os.path.join(config.dir, "devices"),
        CLUSTERCTL_PYTHON=sys.executable,
        CLUSTERCTL_STEP=f"{order.key}@{config.dir}",
    )
    if config.home:
        env["CLUSTERCTL_HOME"] = config.home
    if config.socket:
        env["CLUSTERCTL_SOCKET"] = config.socket
    _search_path(env, config, batch=order.batch)
    if order.batch:
        _login(env, order.uid)
    _threads(env, order)
    library = mpi_library()
    if library:
        env.setdefault("MPI4PY_LIBMPI", library)
    if ranks_on_host(order, node) > (os.cpu_count() or 1):
        env.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    return env


def of_task(shared: dict[str, str], order: Order, local_rank: int) -> dict[bytes, bytes]:
    """The bytes for ``execve`` of one task; SLURM_TASK_PID is added by the process itself."""
    env = dict(shared)
    env["SLURM_PROCID"] = str(order.tasks[local_rank])
    env["SLURM_LOCALID"] = str(local_rank)
    # An empty value says "no core", where no value would say "all cores of the node".
    mine = cores_of_task(order.cores, local_rank, len(order.tasks))
    env["NEURON_RT_VISIBLE_CORES"] = ranges(mine)
    return {
        name.encode("utf-8", "surrogateescape"): unpack(value)
        for name, value in env.items()
        if name and "=" not in name and "\0" not in name
    }
