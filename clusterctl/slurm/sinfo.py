"""sinfo: partitions and nodes."""

from __future__ import annotations

import os
import time

from clusterctl.slurm import client, tableformat
from clusterctl.slurm.errors import CommandError
from clusterctl.slurm.getopt import Parser
from clusterctl.slurm.options_query import SINFO, SINFO_ENV
from clusterctl.slurm.output import err, error, out, version_text, words
from clusterctl.slurm.sinfo_fields import (
    AGGREGATE_NAMES,
    AGGREGATES,
    LETTERS,
    NAMES,
    Group,
    state_order,
    state_word,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_USAGE = "sinfo [OPTIONS]"
_DEFAULT = "%9P %.5a %.10l %.6D %.6t %N"
_LONG = "%9P %.5a %.10l %.10s %.4r %.8h %.10g %.6D %.11T %N"
_SUMMARY = "%9P %.5a %.10l %.16F %N"
_NODE = "%{width}N %.5D %.9P %6t"
_NODE_LONG = "%{width}N %.5D %.9P %.11T %4c %.8z %.6m %.8d %.6w %.8f %20E"
_REASONS = "%20E %9u %19H %N"
_REASONS_LONG = "%20E %12U %19H %6t %N"

#: Long and compact state names of ``-t`` -> test on a node's flags.
_STATE_NAMES = {
    "unk": "unknown",
    "alloc": "allocated",
    "mix": "mixed",
    "drng": "draining",
    "comp": "completing",
    "no_resp": "no_respond",
    "failg": "failing",
    "resv": "reserved",
}
_VALID = (
    "unknown,down,idle,allocated,?,mixed,future,drain,drained,draining,no_respond,reserved,"
    "perfctrs,cloud,completing,powering_down,powered_down,power_down,powering_up,fail,maint,"
    "reboot,reboot^,unknown"
)


def _in_state(flags: list[str], name: str) -> bool:
    """Is a node with these flags in the state ``-t NAME``?"""
    base = flags[0] if flags else "UNKNOWN"
    if name == "all":
        return True
    if name == "allocated":
        return base in ("ALLOCATED", "MIXED") or "COMPLETING" in flags
    if name == "idle" and "RESERVED" in flags:
        return False
    if name in ("idle", "mixed", "down", "unknown"):
        return base == name.upper()
    if name in ("drain", "fail", "completing"):
        return name.upper() in flags
    if name == "no_respond":
        return "NOT_RESPONDING" in flags
    return state_word(flags) == name.upper()  # drained, draining, failing; others never are


class _Options:
    def __init__(self, argv: list[str]) -> None:
        self.parser = Parser("sinfo", SINFO, usage_exit=1)
        given, rest = self.parser.parse(argv, permute=True)
        self.values: dict[str, str] = {}
        for variable, name in SINFO_ENV.items():
            if os.environ.get(variable):
                self.values[name] = os.environ[variable]
        for opt, value in given:
            if opt.kind == "iterate":
                text = value or ""
                if not (text.isascii() and text.isdigit()):
                    raise error("sinfo", f"--iterate={text}")
                raise error("sinfo", "--iterate is not supported; use `watch sinfo`")
            if opt.kind:
                raise error("sinfo", f"--{opt.long} {opt.kind}")
            if opt.long in ("format", "Format"):
                self.values.pop("format", None)
                self.values.pop("Format", None)
            self.values[opt.long] = value or ""
        if rest:
            raise CommandError(f"sinfo: error: Unrecognized option: {rest[0]}", f"Usage: {_USAGE}")

    def has(self, *names: str) -> bool:
        return any(name in self.values for name in names)

    def states(self) -> list[str]:
        """Long names in lower case; raises for an unknown one."""
        found = []
        for part in words(self.values.get("states")):
            name = _STATE_NAMES.get(part.lower(), part.lower())
            if name != "all" and name not in _VALID.split(",") and name != "failing":
                raise CommandError(
                    f'sinfo: error: Bad state string: "{part}"',
                    f"sinfo: error: valid states: {_VALID}",
                )
            found.append(name)
        return found

    def filter(self) -> Callable[[dict[str, Any]], bool]:
        """Which nodes are shown."""
        states = self.states()
        names = None
        if self.has("nodes"):
            from clusterctl.slurm.values import host_names

            names = set(host_names("sinfo", self.values["nodes"]))

        def shown(node: dict[str, Any]) -> bool:
            flags = node.get("flags") or []
            silent = "NOT_RESPONDING" in flags
            return (
                (names is None or node["name"] in names)
                and (not states or any(_in_state(flags, s) for s in states))
                and not (self.has("dead") and not silent)
                and not (self.has("responding") and silent)
                and not (self.has("list-reasons") and not node.get("reason"))
            )

        return shown


def _columns(options: _Options, width: int) -> list[tableformat.Column]:
    if options.has("Format"):
        return tableformat.by_name("sinfo", options.values["Format"], NAMES, "job")
    long = options.has("long")
    if options.has("format"):
        text = options.values["format"]
    elif options.has("summarize"):
        text = _SUMMARY
    elif options.has("list-reasons"):
        text = _REASONS_LONG if long else _REASONS
    elif options.has("Node"):
        text = (_NODE_LONG if long else _NODE).replace("{width}", str(width))
    else:
        text = _LONG if long else _DEFAULT
    return tableformat.percent("sinfo", text, LETTERS, "node", tell=lambda line: err(f"{line}\n"))


def _aggregate(column: tableformat.Column) -> bool:
    return column.field is None or column.name in AGGREGATES or column.name in AGGREGATE_NAMES


def _groups(
    options: _Options, reply: dict[str, Any], columns: list[tableformat.Column]
) -> list[Group]:
    """Nodes by partition, those together that look alike in the columns asked for."""
    shown = options.filter()
    by_name = {n["name"]: n for n in reply["nodes"]}
    wanted = set(words(options.values.get("partition")))
    partitions = [p for p in reply["partitions"] if not wanted or p["name"] in wanted]
    each = options.has("Node")
    groups: dict[Any, Group] = {}
    for partition in partitions:
        nodes = [by_name[name] for name in partition.get("nodes", ()) if name in by_name]
        nodes = [n for n in nodes if shown(n)]
        if not nodes and not each and not options.has("list-reasons"):
            groups[("empty", partition["name"])] = Group(partition, [])
        for node in nodes:
            alone = Group(partition, [node])
            if each:
                key: Any = (partition["name"], node["name"])
            else:
                key = tuple(c.field[1](alone) for c in columns if c.field and not _aggregate(c))
            known = groups.setdefault(key, Group(partition, []))
            if all(n["name"] != node["name"] for n in known.nodes):
                known.nodes.append(node)
    return list(groups.values())


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: digits by value."""
    found: list[tuple[int, int, str]] = []
    word = ""
    for char in name + "\0":
        if word and (char.isdigit() != word[-1].isdigit() or char == "\0"):
            found.append((0, int(word), "") if word[-1].isdigit() else (1, 0, word))
            word = ""
        word += char
    return found


def _sort(options: _Options, groups: list[Group], partitions: list[dict[str, Any]]) -> None:
    order = {p["name"]: i for i, p in enumerate(partitions)}

    def partition_key(group: Group) -> int:
        return order.get(group.partition.get("name", ""), 0)

    def node_key(group: Group) -> Any:
        return _natural(group.nodes[0]["name"]) if group.nodes else []

    def state_key(group: Group) -> Any:
        return state_order(group.node) if group.nodes else (-1, -1)

    if options.has("sort"):
        text = options.values["sort"]
    elif options.has("Node"):
        groups.sort(key=partition_key, reverse=options.has("format"))
        text = "N"
    elif options.has("list-reasons"):
        text = "-t,E,N"
    else:
        text = "#P,-t"
    for word in reversed(words(text)):
        down = word.startswith("-")
        for letter in reversed(word.lstrip("+-#")):
            if letter not in LETTERS:
                raise error("sinfo", f"Invalid sort specification: {letter}")
            if letter == "P" and "#" in word:
                key: Callable[[Group], Any] = partition_key
            else:
                keys = {"N": node_key, "n": node_key, "t": state_key, "T": state_key}
                key = keys.get(letter) or LETTERS[letter][1]
            groups.sort(key=key, reverse=down)


def _about(options: _Options) -> bool:
    if options.has("help"):
        out(options.parser.help_text(_USAGE, "Show partitions and nodes."))
    elif options.has("usage"):
        out(f"Usage: {_USAGE}\n")
    elif options.has("version"):
        out(version_text())
    elif options.has("reservation"):
        client.call({"type": "Ping"})
        out("No reservations in the system\n")
    else:
        return False
    return True


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    options = _Options(argv)
    if _about(options):
        return 0
    if options.has("clusters") and options.values["clusters"] != "all":
        from clusterctl.slurm.sbatch import check_cluster

        check_cluster("sinfo", options.values["clusters"])
    options.states()
    reply = client.call({"type": "GetNodes"})
    width = max([10, *(len(n["name"]) for n in reply["nodes"])])
    columns = _columns(options, width)
    groups = _groups(options, reply, columns)
    _sort(options, groups, reply["partitions"])
    lines = []
    if not options.has("noheader"):
        if options.has("long"):
            lines.append(time.strftime("%a %b %d %H:%M:%S %Y"))
        lines.append(tableformat.header(columns))
    lines += [tableformat.line(columns, group) for group in groups]
    out("".join(line + "\n" for line in lines))
    return 0
