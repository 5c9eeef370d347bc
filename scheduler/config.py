"""The cluster file: one TOML document that describes a cluster.

``load`` reads and checks it; every key is declared in :mod:`scheduler.configkeys` and
documented in docs/cluster-file.md (a test compares the two).  All problems of a file are
reported together, each with its line where it can be found.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import os
import re
import socket
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuron_runtime.device import INSTANCE_TYPES, InstanceType
from scheduler.api import hostlist
from scheduler.api.errors import Rejected
from scheduler.api.records import Device, Node, Partition
from scheduler.configkeys import NODES, PARTITIONS, SECTIONS, Key, find_line
from scheduler.core.state import Settings

#: Name of the cluster file in a cluster's home.
FILE_NAME = "cluster.toml"

#: Most nodes of one cluster file; one home's loopback addresses are numbered within this.
MAX_NODES = 4000

_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


class ConfigError(Rejected):
    """The cluster file cannot be used; ``problems`` has one line for each mistake."""

    code = "config"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class SshOptions:
    """How one remote node is reached; the defaults are those of the ``ssh`` section."""

    user: str = ""
    port: int = 22
    identity: str = ""
    known_hosts: str = "~/.ssh/known_hosts"
    python: str = "python3"
    remote_dir: str = "~/.local/state/clusterctl/nodes"
    login_timeout_s: float = 15.0
    keepalive_s: float = 5.0
    max_dials: int = 10


@dataclass(frozen=True)
class NodeSpec:
    """One node of the cluster file with all defaults filled in."""

    name: str
    instance_type: InstanceType
    cpus: int
    mem_mib: int
    transport: str
    address: str
    features: tuple[str, ...] = ()
    weight: int = 1
    spare: bool = False
    ssh: SshOptions = field(default_factory=SshOptions)

    def record(self) -> Node:
        """The node as the core's state starts with it."""
        kind = self.instance_type
        return Node(
            name=self.name,
            addr=self.address,
            cpus=self.cpus,
            mem_mib=self.mem_mib,
            devices=[Device(index=i, cores=kind.cores_per_device) for i in range(kind.devices)],
            features=list(self.features),
            instance_type=kind.name,
            weight=self.weight,
            spare=self.spare,
            standby=self.spare,
        )


@dataclass(frozen=True)
class ClusterConfig:
    """A checked cluster file.  ``home`` is the cluster's state directory."""

    path: Path
    home: Path
    cluster: str
    isolate: bool
    heartbeat_s: float
    specs: dict[str, NodeSpec]
    _settings: Settings
    _partitions: tuple[Partition, ...]

    def settings(self) -> Settings:
        """The values that decide the core's behaviour (a fresh copy)."""
        return Settings(**{name: getattr(self._settings, name) for name in _FIELDS})

    def nodes(self) -> list[Node]:
        """Fresh node records in the order of the file."""
        return [spec.record() for spec in self.specs.values()]

    def partitions(self) -> list[Partition]:
        """Fresh partition records in the order of the file."""
        return [
            Partition(
                name=p.name,
                nodes=list(p.nodes),
                default=p.default,
                max_time_s=p.max_time_s,
                default_time_s=p.default_time_s,
                state=p.state,
                priority=p.priority,
                max_nodes=p.max_nodes,
            )
            for p in self._partitions
        ]

    def hosts(self) -> dict[str, str]:
        """Numeric address of every node by name: what /etc/hosts of the nodes gets.

        Nodes whose address is itself a name are left to the resolver.
        """
        return {n: s.address for n, s in self.specs.items() if _is_numeric(s.address)}

    def machines(self) -> dict[str, str]:
        """Which machine each node is on, by name: local nodes share this one."""
        own = socket.gethostname()
        return {
            name: own if spec.transport == "local" else spec.address
            for name, spec in self.specs.items()
        }

    def transport_for(self, name: str) -> str:
        """``local`` or ``ssh``: the kind of transport that opens links to node ``name``."""
        return self.specs[name].transport

    def node_dir(self, name: str) -> Path:
        """The directory of a local node: its agent's state, socket and devices."""
        return self.home / "nodes" / name


_FIELDS: tuple[str, ...] = Settings.__struct_fields__


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def home_dir() -> Path:
    """The cluster's home: ``$CLUSTERCTL_HOME``, else ``clusterctl`` in the XDG state directory."""
    given = os.environ.get("CLUSTERCTL_HOME")
    if given:
        return Path(os.path.abspath(given))
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(os.path.abspath(state)) / "clusterctl"


def local_address(home: Path, index: int) -> str:
    """Loopback address of the ``index``-th node of the cluster at ``home``.

    Two clusters on one machine differ in the 12 bits taken from the home's path; within a
    cluster the low 12 bits number the nodes (no ``.0`` and no ``.255``).
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(home))).digest()
    second = 64 + digest[0] % 180
    third = (digest[1] & 0xF0) + index // 254
    return f"127.{second}.{third}.{index % 254 + 1}"


def load(path: str | Path, home: str | Path | None = None) -> ClusterConfig:
    """Read and check the cluster file at ``path`` (a file, or a home that holds one).

    ``home`` is the cluster's state directory; by default the file's own folder.
    Raises ``ConfigError`` with every mistake found.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{file}: no such cluster file (clusterctl up writes one)"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: not UTF-8 at byte {error.start}"]) from None
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from None
    return parse(text, file, Path(home) if home is not None else file.parent)


def parse(text: str, path: Path, home: Path) -> ClusterConfig:
    """Check the text of a cluster file; ``path`` is for messages.  Raises ``ConfigError``."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from None
    return _Reader(text, path, Path(os.path.abspath(home))).read(document)


class _Reader:
    """Checks one document and collects its problems."""

    def __init__(self, text: str, path: Path, home: Path) -> None:
        self.lines = text.splitlines()
        self.path = path
        self.home = home
        self.problems: list[str] = []

    def read(self, document: dict[str, Any]) -> ClusterConfig:
        """The checked configuration.  Raises ``ConfigError``."""
        for name in document:
            if name not in SECTIONS:
                self._unknown("section", name, list(SECTIONS), "")
        values: dict[str, dict[str, Any]] = {}
        for name, keys in SECTIONS.items():
            if name in ("nodes", "partitions"):
                continue
            values[name] = self._table(document.get(name, {}), keys, name)
        if values["timeouts"]["node_timeout_s"] <= values["timeouts"]["heartbeat_s"]:
            self._problem(
                "[timeouts] node_timeout_s must be longer than heartbeat_s",
                "timeouts",
                "heartbeat_s",
            )
        specs = self._nodes(document.get("nodes", {}), values["ssh"])
        partitions = self._partitions(document.get("partitions", {}), specs)
        if self.problems:
            raise ConfigError(self.problems)
        given: dict[str, Any] = {}
        for name, keys in SECTIONS.items():
            for key in keys:
                if key.setting:
                    given[key.setting] = values[name][key.name]
        cluster = values["cluster"]
        return ClusterConfig(
            path=self.path,
            home=self.home,
            cluster=cluster["name"],
            isolate=cluster["isolate"],
            heartbeat_s=values["timeouts"]["heartbeat_s"],
            specs=specs,
            _settings=Settings(**given),
            _partitions=tuple(partitions),
        )

    # ------------------------------------------------------------ problems

    def _problem(self, message: str, section: str = "", key: str = "") -> None:
        line = find_line(self.lines, section, key)
        self.problems.append(f"{self.path}{f':{line}' if line else ''}: {message}")

    def _unknown(self, what: str, name: str, known: list[str], section: str) -> None:
        close = difflib.get_close_matches(name, known, 1, 0.5)
        where = f" in [{section}]" if section else ""
        hint = f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(known)
        if section:
            self._problem(f"unknown {what} {name!r}{where}; {hint}", section, name)
        else:
            self._problem(f"unknown {what} {name!r}; {hint}", name)

    def _table(self, table: object, keys: tuple[Key, ...], section: str) -> dict[str, Any]:
        """The values of one table with defaults for what is not given."""
        result = {key.name: key.default for key in keys}
        if not isinstance(table, dict):
            self._problem(f"[{section}] must be a table", section)
            return result
        by_name = {key.name: key for key in keys}
        for name, value in table.items():
            if name not in by_name:
                self._unknown("key", name, list(by_name), section)
                continue
            try:
                result[name] = by_name[name].check(value)
            except ValueError as error:
                self._problem(f"[{section}] {name}: {error}", section, name)
        for key in keys:
            if key.required and key.name not in table:
                self._problem(f"[{section}] needs the key {key.name!r}", section)
        return result

    def _tables(self, tables: object, section: str) -> dict[str, object]:
        if not isinstance(tables, dict):
            self._problem(f'[{section}] must hold tables such as [{section}."NAME"]', section)
            return {}
        return tables

    # ------------------------------------------------------------ nodes

    def _nodes(self, tables: object, ssh: dict[str, Any]) -> dict[str, NodeSpec]:
        specs: dict[str, NodeSpec] = {}
        for names, table in self._tables(tables, "nodes").items():
            section = f"nodes.{names}"
            values = self._table(table, NODES, section)
            for spec in self._group(names, section, values, ssh, len(specs)):
                if spec.name in specs:
                    self._problem(f"node {spec.name} is described twice", section)
                specs[spec.name] = spec
        if not specs and not self.problems:
            self._problem('no nodes: add a table such as [nodes."trn1-[001-004]"]')
        if len(specs) > MAX_NODES:
            self._problem(f"{len(specs)} nodes are more than the {MAX_NODES} of one cluster")
        if not self.problems and all(spec.spare for spec in specs.values()):
            self._problem("every node is a spare: at least one must not be")
        return specs

    def _group(
        self, names: str, section: str, values: dict[str, Any], ssh: dict[str, Any], first: int
    ) -> list[NodeSpec]:
        """The nodes of one ``[nodes."HOSTLIST"]`` table; ``first`` numbers local addresses."""
        expanded = self._expand(names, section, "")
        bad = [name for name in expanded if not _NODE_NAME.fullmatch(name)]
        if bad:
            self._problem(
                f"{bad[0]!r} is no host name (letters, digits and inner '-', at most 63)", section
            )
            return []
        kind = INSTANCE_TYPES.get(values["instance_type"])
        if kind is None:
            self._bad_type(values["instance_type"], section)
            return []
        addresses = self._addresses(expanded, section, values, first)
        options = {k: v for k, v in ssh.items() if v is not None}
        options |= {
            k: values[k]
            for k in ("user", "port", "identity", "python", "remote_dir")
            if values[k] is not None
        }
        return [
            NodeSpec(
                name=name,
                instance_type=kind,
                cpus=values["cpus"] or kind.vcpus,
                mem_mib=values["mem_mib"] or kind.mem_mib,
                transport=values["transport"],
                address=address,
                features=tuple(values["features"]),
                weight=values["weight"],
                spare=values["spare"],
                ssh=SshOptions(**options),
            )
            for name, address in zip(expanded, addresses, strict=True)
        ]

    def _bad_type(self, name: str, section: str) -> None:
        close = difflib.get_close_matches(name, INSTANCE_TYPES, 1, 0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        known = ", ".join(INSTANCE_TYPES)
        self._problem(
            f"[{section}] instance_type: unknown type {name!r}; {hint}known: {known}",
            section,
            "instance_type",
        )

    def _addresses(
        self, names: list[str], section: str, values: dict[str, Any], first: int
    ) -> list[str]:
        given = values["address"]
        if values["transport"] == "local":
            for key in ("address", "user", "port", "identity", "python", "remote_dir"):
                if values[key] is not None:
                    self._problem(
                        f'[{section}] {key} needs transport = "ssh"; local nodes have none',
                        section,
                        key,
                    )
            return [local_address(self.home, first + i) for i in range(len(names))]
        if given is None:
            return names
        addresses = self._expand(given, section, "address")
        if addresses and len(addresses) != len(names):
            self._problem(
                f"[{section}] address: {len(addresses)} addresses for {len(names)} nodes",
                section,
                "address",
            )
        return addresses if len(addresses) == len(names) else names

    def _expand(self, text: str, section: str, key: str) -> list[str]:
        try:
            names = hostlist.expand(text)
        except ValueError as error:
            self._problem(f"[{section}] {key or 'host list'}: {error}", section, key)
            return []
        if not names:
            self._problem(f"[{section}] {key or 'host list'}: no names in {text!r}", section, key)
        return names

    # ------------------------------------------------------------ partitions

    def _partitions(self, tables: object, specs: dict[str, NodeSpec]) -> list[Partition]:
        result = [
            self._partition(name, table, specs)
            for name, table in self._tables(tables, "partitions").items()
        ]
        if not result:
            return [Partition(name="main", nodes=list(specs), default=True)]
        defaults = [p.name for p in result if p.default]
        if len(defaults) > 1:
            names = " and ".join(defaults)
            self._problem(
                f"partitions {names} are both the default", f"partitions.{defaults[1]}", "default"
            )
        elif not defaults and len(result) == 1:
            result[0].default = True
        elif not defaults:
            self._problem("several partitions and none of them has default = true", "partitions")
        return result

    def _partition(self, name: str, table: object, specs: dict[str, NodeSpec]) -> Partition:
        section = f"partitions.{name}"
        values = self._table(table, PARTITIONS, section)
        if not _NODE_NAME.fullmatch(name.replace("_", "-")):
            self._problem(f"{name!r} is no partition name (letters, digits, '-', '_')", section)
        nodes = list(specs)
        if values["nodes"] != "ALL":
            nodes = self._expand(values["nodes"], section, "nodes")
            for node in nodes:
                if node not in specs and specs:
                    self._unknown_node(node, section, list(specs))
        most, default = values["max_time"], values["default_time"]
        if most is not None and default is not None and default > most:
            self._problem(
                f"[{section}] default_time is longer than max_time", section, "default_time"
            )
        return Partition(
            name=name,
            nodes=nodes,
            default=values["default"],
            max_time_s=most,
            default_time_s=default,
            state=values["state"],
            priority=values["priority"],
            max_nodes=values["max_nodes"],
        )

    def _unknown_node(self, node: str, section: str, known: list[str]) -> None:
        close = difflib.get_close_matches(node, known, 1, 0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        self._problem(f"[{section}] nodes: no node {node!r} in this file{hint}", section, "nodes")
