"""The columns of sinfo.  A row is a group of nodes of one partition that look alike."""

from __future__ import annotations

from clusterctl.slurm.jobview import stamp
from scheduler.api.times import format_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from clusterctl.slurm.tableformat import Field

#: Base states by number: the order of Slurm's tables.
_BASE_ORDER = {"UNKNOWN": 0, "DOWN": 1, "IDLE": 2, "ALLOCATED": 3, "MIXED": 5}
_COMPACT = {
    "ALLOCATED": "alloc",
    "COMPLETING": "comp",
    "DOWN": "down",
    "DRAINED": "drain",
    "DRAINING": "drng",
    "FAIL": "fail",
    "FAILING": "failg",
    "IDLE": "idle",
    "MIXED": "mix",
    "RESERVED": "resv",
    "UNKNOWN": "unk",
}


def state_word(flags: list[str]) -> str:
    """The one word for a node's state: ``DRAINED`` for IDLE with DRAIN, and so on."""
    base = flags[0] if flags else "UNKNOWN"
    busy = base in ("ALLOCATED", "MIXED") or "COMPLETING" in flags
    if "DRAIN" in flags:
        return "DRAINING" if busy else "DRAINED"
    if "FAIL" in flags:
        return "FAILING" if busy else "FAIL"
    if "RESERVED" in flags:
        return "RESERVED"
    return "COMPLETING" if "COMPLETING" in flags else base


def state_long(node: dict[str, Any]) -> str:
    """``mixed``, ``drained``, with ``*`` while the node does not respond."""
    flags = node.get("flags") or []
    return state_word(flags).lower() + ("*" if "NOT_RESPONDING" in flags else "")


def state_compact(node: dict[str, Any]) -> str:
    """``mix``, ``drain``, with ``*`` while the node does not respond."""
    flags = node.get("flags") or []
    word = state_word(flags)
    return _COMPACT.get(word, word.lower()) + ("*" if "NOT_RESPONDING" in flags else "")


def state_full(node: dict[str, Any]) -> str:
    """``idle+drain``."""
    return "+".join(flag.lower() for flag in node.get("flags") or ["UNKNOWN"])


def state_order(node: dict[str, Any]) -> tuple[int, int]:
    """Nodes with flags come after those without; then by base state."""
    flags = node.get("flags") or ["UNKNOWN"]
    return len(flags) - 1, _BASE_ORDER.get(flags[0], 9)


def _usable(node: dict[str, Any]) -> bool:
    flags = node.get("flags") or ["UNKNOWN"]
    return flags[0] in ("IDLE", "ALLOCATED", "MIXED") and not (
        {"DRAIN", "FAIL", "RESERVED"}.intersection(flags)
    )


def _busy(node: dict[str, Any]) -> bool:
    return (node.get("flags") or ["UNKNOWN"])[0] in ("ALLOCATED", "MIXED")


class Group:
    """Nodes of one row; ``partition`` {} in a cluster without any."""

    __slots__ = ("nodes", "partition")

    def __init__(self, partition: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        self.partition = partition
        self.nodes = nodes

    @property
    def node(self) -> dict[str, Any]:
        """One of the nodes: they look alike in every column of the row that tells of one."""
        return self.nodes[0] if self.nodes else {}

    def names(self) -> str:
        from scheduler.api.hostlist import fold

        return fold(n["name"] for n in self.nodes)

    def node_counts(self) -> tuple[int, int, int, int]:
        """Allocated, idle, other, total."""
        busy = sum(1 for n in self.nodes if _busy(n))
        idle = sum(1 for n in self.nodes if not _busy(n) and _usable(n))
        total = len(self.nodes)
        return busy, idle, total - busy - idle, total

    def cpu_counts(self) -> tuple[int, int, int, int]:
        busy = sum(n.get("alloc_cpus", 0) for n in self.nodes)
        idle = sum(n.get("cpus", 1) - n.get("alloc_cpus", 0) for n in self.nodes if _usable(n))
        total = sum(n.get("cpus", 1) for n in self.nodes)
        return busy, idle, total - busy - idle, total

    def of_node(self, text: Callable[[dict[str, Any]], str]) -> str:
        """A text about the nodes, ``n/a`` when the row has none."""
        return text(self.node) if self.nodes else "n/a"


def gres_total(node: dict[str, Any]) -> dict[str, int]:
    """Devices and neuron cores of a node by gres name."""
    devices = node.get("devices") or []
    found = {"neuron": len(devices), "neuroncore": sum(d.get("cores", 0) for d in devices)}
    return {name: n for name, n in found.items() if n}


def gres_used(node: dict[str, Any]) -> dict[str, int]:
    """What of them is allocated."""
    used = {
        "neuron": len(node.get("alloc_devices") or []),
        "neuroncore": len(node.get("alloc_cores") or []),
    }
    return {name: used[name] for name in gres_total(node)}


def gres_text(counts: dict[str, int], missing: str = "(null)") -> str:
    return ",".join(f"{name}:{n}" for name, n in counts.items()) or missing


def features(node: dict[str, Any]) -> str:
    return ",".join(node.get("features") or []) or "(null)"


def _slashes(counts: tuple[int, ...]) -> str:
    return "/".join(str(n) for n in counts)


def _limit(seconds: float | None) -> str:
    return "infinite" if seconds is None else format_limit(seconds)


def _default_time(seconds: float | None) -> str:
    return "n/a" if seconds is None else format_limit(seconds)


def _size(partition: dict[str, Any]) -> str:
    most = partition.get("max_nodes")
    return f"1-{'infinite' if most is None else most}"


def _name(partition: dict[str, Any]) -> str:
    return str(partition.get("name", "")) + ("*" if partition.get("default") else "")


def _available(partition: dict[str, Any]) -> str:
    state = str(partition.get("state", "UP")).lower()
    return {"inactive": "inact"}.get(state, state)


def _user(node: dict[str, Any]) -> str:
    if not node.get("reason"):
        return "Unknown"
    from clusterctl.slurm.output import user_name

    return user_name(node.get("reason_uid", 0))


def _user_long(node: dict[str, Any]) -> str:
    name = _user(node)
    return name if name == "Unknown" else f"{name}({node.get('reason_uid', 0)})"


def _reason(node: dict[str, Any]) -> str:
    """Slurm shows it of nodes that are out of service only."""
    out_of_service = {"DOWN", "DRAIN", "FAIL"} & set(node.get("flags", ()))
    return (node.get("reason") or "none") if out_of_service else "none"


def _reason_time(node: dict[str, Any]) -> str:
    return stamp(node.get("reason_s") if node.get("reason") else None, "Unknown")


def _const(text: str) -> Callable[[Group], str]:
    return lambda _: text


def _part(text: Callable[[dict[str, Any]], str]) -> Callable[[Group], str]:
    return lambda g: text(g.partition)


def _node(text: Callable[[dict[str, Any]], str]) -> Callable[[Group], str]:
    return lambda g: g.of_node(text)


#: Letters whose text tells of the whole group; all others split the nodes into groups.
AGGREGATES = frozenset("ACDFNno")

LETTERS: dict[str, Field] = {
    "a": ("AVAIL", _part(_available)),
    "A": ("NODES(A/I)", lambda g: _slashes(g.node_counts()[:2])),
    "b": ("ACTIVE_FEATURES", _node(features)),
    "B": ("MAX_CPUS_PER_NODE", _const("UNLIMITED")),
    "c": ("CPUS", _node(lambda n: str(n.get("cpus", 1)))),
    "C": ("CPUS(A/I/O/T)", lambda g: _slashes(g.cpu_counts())),
    "d": ("TMP_DISK", _node(lambda n: "0")),
    "D": ("NODES", lambda g: str(len(g.nodes))),
    "e": ("FREE_MEM", _node(lambda n: str(n.get("free_mem_mib", 0)))),
    "E": ("REASON", _node(_reason)),
    "f": ("AVAIL_FEATURES", _node(features)),
    "F": ("NODES(A/I/O/T)", lambda g: _slashes(g.node_counts())),
    "g": ("GROUPS", _const("all")),
    "G": ("GRES", _node(lambda n: gres_text(gres_total(n)))),
    "h": ("OVERSUBSCRIBE", _const("NO")),
    "H": ("TIMESTAMP", _node(_reason_time)),
    "I": ("PRIO_JOB_FACTOR", _part(lambda p: str(p.get("priority", 1)))),
    "l": ("TIMELIMIT", _part(lambda p: _limit(p.get("max_time_s")))),
    "L": ("DEFAULTTIME", _part(lambda p: _default_time(p.get("default_time_s")))),
    "m": ("MEMORY", _node(lambda n: str(n.get("mem_mib", 1024)))),
    "M": ("PREEMPT_MODE", _const("OFF")),
    "n": ("HOSTNAMES", lambda g: g.names()),
    "N": ("NODELIST", lambda g: g.names()),
    "o": ("NODE_ADDR", lambda g: ",".join(n.get("addr") or n["name"] for n in g.nodes)),
    "O": ("CPU_LOAD", _node(lambda n: f"{n.get('cpu_load', 0.0):.2f}")),
    "p": ("PRIO_TIER", _part(lambda p: str(p.get("priority", 1)))),
    "P": ("PARTITION", _part(_name)),
    "r": ("ROOT", _const("no")),
    "R": ("PARTITION", _part(lambda p: str(p.get("name", "")))),
    "s": ("JOB_SIZE", _part(_size)),
    "S": ("ALLOCNODES", _const("all")),
    "t": ("STATE", _node(state_compact)),
    "T": ("STATE", _node(state_long)),
    "u": ("USER", _node(_user)),
    "U": ("USER", _node(_user_long)),
    "v": ("VERSION", _node(lambda n: n.get("version", ""))),
    "V": ("CLUSTER", _const("N/A")),
    "w": ("WEIGHT", _node(lambda n: str(n.get("weight", 1)))),
    "X": ("SOCKETS", _node(lambda n: str(n.get("cpus", 1)))),
    "Y": ("CORES", _node(lambda n: "1")),
    "z": ("S:C:T", _node(lambda n: f"{n.get('cpus', 1)}:1:1")),
    "Z": ("THREADS", _node(lambda n: "1")),
}

_SAME = {
    "allocnodes": "S",
    "available": "a",
    "cluster": "V",
    "cores": "Y",
    "cpus": "c",
    "cpusload": "O",
    "cpusstate": "C",
    "defaulttime": "L",
    "disk": "d",
    "features": "f",
    "features_act": "b",
    "freemem": "e",
    "gres": "G",
    "groups": "g",
    "maxcpuspernode": "B",
    "memory": "m",
    "nodeaddr": "o",
    "nodeai": "A",
    "nodeaiot": "F",
    "nodehost": "n",
    "nodelist": "N",
    "nodes": "D",
    "oversubscribe": "h",
    "partition": "P",
    "partitionname": "R",
    "preemptmode": "M",
    "priorityjobfactor": "I",
    "prioritytier": "p",
    "reason": "E",
    "root": "r",
    "share": "h",
    "size": "s",
    "socketcorethread": "z",
    "sockets": "X",
    "statecompact": "t",
    "statelong": "T",
    "threads": "Z",
    "time": "l",
    "timestamp": "H",
    "user": "u",
    "userlong": "U",
    "version": "v",
    "weight": "w",
}

#: Names of ``-O`` in lower case.
NAMES: dict[str, Field] = {
    **{name: LETTERS[letter] for name, letter in _SAME.items()},
    "allocmem": ("ALLOCMEM", _node(lambda n: str(n.get("alloc_mem_mib", 0)))),
    "comment": ("COMMENT", _node(lambda n: "(null)")),
    "extra": ("EXTRA", _node(lambda n: "(null)")),
    "gresused": ("GRES_USED", _node(lambda n: gres_text(gres_used(n)))),
    "port": ("PORT", _node(lambda n: "0")),
    "statecomplete": ("STATECOMPLETE", _node(state_full)),
}

#: Names of ``-O`` whose text tells of the whole group.
AGGREGATE_NAMES = frozenset(name for name, letter in _SAME.items() if letter in AGGREGATES)
