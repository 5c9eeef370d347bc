"""Every key of the cluster file: its type, default, limits and what it sets.

docs/cluster-file.md has one row for each; a test compares names, types and defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler.api import times
from scheduler.core.state import Settings

Check = Callable[[object], Any]


@dataclass(frozen=True)
class Key:
    """One key: ``kind`` is the word the documentation uses, ``setting`` the core's name for it.

    ``check`` turns the TOML value into the stored one; it raises ``ValueError`` with what is
    wrong.  ``default`` None means "not given"; ``shown`` is the default as documented.
    """

    name: str
    kind: str
    check: Check
    default: Any = None
    shown: str = ""
    setting: str = ""
    required: bool = False

    def default_text(self) -> str:
        """The default as the documentation prints it."""
        if self.required:
            return "required"
        if self.shown:
            return self.shown
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, float) and self.default.is_integer():
            return str(int(self.default))
        return f'"{self.default}"' if isinstance(self.default, str) else str(self.default)


def _shown(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "text", list: "a list"}
    return f"{names.get(type(value), type(value).__name__)} ({value!r})"


def boolean(value: object) -> bool:
    """TOML ``true`` or ``false``."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_shown(value)}")
    return value


def integer(low: int, high: int = 2**31 - 1) -> Check:
    """An integer of ``low`` to ``high``."""

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be an integer, not {_shown(value)}")
        if not low <= value <= high:
            raise ValueError(f"must be {low} to {high}, not {value}")
        return value

    return check


def seconds(low: float, high: float = 1e9) -> Check:
    """A number of seconds, ``low`` to ``high``."""

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a number of seconds, not {_shown(value)}")
        if not low <= value <= high:
            raise ValueError(f"must be {low:g} to {high:g} seconds, not {value:g}")
        return float(value)

    return check


def text(value: object) -> str:
    """Text that is not empty and has no control characters."""
    if not isinstance(value, str):
        raise ValueError(f"must be text in quotes, not {_shown(value)}")
    if not value or not value.isprintable():
        raise ValueError(f"must be printable and not empty, not {value!r}")
    return value


def one_of(*choices: str) -> Check:
    """One of ``choices``, exactly as written."""

    def check(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {_shown(value)}")
        return str(value)

    return check


def words(value: object) -> list[str]:
    """A list of names without blanks or commas."""
    if not isinstance(value, list):
        raise ValueError(f'must be a list such as ["a", "b"], not {_shown(value)}')
    for word in value:
        if (
            not isinstance(word, str)
            or not word
            or not all(c.isalnum() or c in "_-." for c in word)
        ):
            raise ValueError(f"must hold names of letters, digits, '_', '-' and '.', not {word!r}")
    return list(value)


def cluster_name(value: object) -> str:
    """A cluster's name: 1 to 40 letters, digits, ``-`` and ``_``."""
    name = text(value)
    if len(name) > 40 or not all((c.isalnum() and c.isascii()) or c in "-_" for c in name):
        raise ValueError(f"must be 1 to 40 letters, digits, '-' and '_', not {name!r}")
    return name


def duration(value: object) -> int | None:
    """A time limit in Slurm's forms, seconds; ``UNLIMITED`` is None."""
    try:
        limit_s = times.parse_limit(text(value))
    except ValueError:
        raise ValueError(
            f'must be a time such as "30" (minutes), "1:00:00" or "2-00:00:00", not {value!r}'
        ) from None
    return None if limit_s < 0 else limit_s


_CORE = Settings()


def _core(name: str, kind: str, check: Check, setting: str = "") -> Key:
    """A key that sets the core's ``setting`` (by default of the same name) and has its default."""
    setting = setting or name
    return Key(name, kind, check, getattr(_CORE, setting), setting=setting)


CLUSTER = (
    _core("name", "text", cluster_name, "cluster"),
    Key("isolate", "boolean", boolean, True),
)

SCHEDULING = (
    _core("enforce_part_limits", "ALL or NO", one_of("ALL", "NO")),
    _core("backfill", "boolean", boolean),
    _core("job_requeue", "boolean", boolean),
    _core("max_array_size", "integer", integer(1, 4_000_001)),
    _core("max_job_count", "integer", integer(1, 10_000_000)),
    _core("first_job_id", "integer", integer(1, 0x03FFFFFF)),
    _core("return_to_service", "integer", integer(0, 2)),
    _core("default_mem_per_cpu_mib", "integer", integer(0)),
)

PRIORITY = (
    _core("weight_age", "integer", integer(0), "priority_weight_age"),
    _core("max_age_s", "seconds", seconds(1), "priority_max_age_s"),
    _core("weight_size", "integer", integer(0), "priority_weight_size"),
    _core("weight_partition", "integer", integer(0), "priority_weight_partition"),
)

TIMEOUTS = (
    Key("heartbeat_s", "seconds", seconds(0.05, 3600), 5.0),
    _core("node_timeout_s", "seconds", seconds(0.2, 86400)),
    _core("launch_timeout_s", "seconds", seconds(1, 86400)),
    _core("kill_wait_s", "seconds", seconds(0, 86400)),
    _core("requeue_delay_s", "seconds", seconds(0, 86400)),
    _core("min_job_age_s", "seconds", seconds(0)),
)

SSH = (
    Key("user", "text", text, None, shown="your login name"),
    Key("port", "integer", integer(1, 65535), 22),
    Key("identity", "text", text, None, shown="ssh's usual keys"),
    Key("known_hosts", "text", text, "~/.ssh/known_hosts"),
    Key("python", "text", text, "python3"),
    Key("remote_dir", "text", text, "~/.local/state/clusterctl/nodes"),
    Key("login_timeout_s", "seconds", seconds(1, 600), 15.0),
    Key("keepalive_s", "seconds", seconds(0.1, 3600), 5.0),
    Key("max_dials", "integer", integer(1, 100), 10),
)

NODES = (
    Key("instance_type", "text", text, "", required=True),
    Key("cpus", "integer", integer(1, 65535), None, shown="the type's"),
    Key("mem_mib", "integer", integer(1), None, shown="the type's"),
    Key("transport", "local or ssh", one_of("local", "ssh"), "local"),
    Key("address", "host list", text, None, shown="the node's name"),
    Key("spare", "boolean", boolean, False),
    Key("weight", "integer", integer(1, 2**31 - 1), 1),
    Key("features", "list of text", words, [], shown="[]"),
    Key("user", "text", text, None, shown="[ssh] user"),
    Key("port", "integer", integer(1, 65535), None, shown="[ssh] port"),
    Key("identity", "text", text, None, shown="[ssh] identity"),
    Key("python", "text", text, None, shown="[ssh] python"),
    Key("remote_dir", "text", text, None, shown="[ssh] remote_dir"),
)

PARTITIONS = (
    Key("nodes", "host list or ALL", text, "ALL"),
    Key("default", "boolean", boolean, False, shown="true if it is the only one"),
    Key("max_time", "time", duration, None, shown='"UNLIMITED"'),
    Key("default_time", "time", duration, None, shown="max_time"),
    Key("state", "UP, DOWN, DRAIN or INACTIVE", one_of("UP", "DOWN", "DRAIN", "INACTIVE"), "UP"),
    Key("priority", "integer", integer(1, 65533), 1),
    Key("max_nodes", "integer", integer(1), None, shown="no limit"),
)

#: Section -> its keys, in the order of the documentation.
SECTIONS: dict[str, tuple[Key, ...]] = {
    "cluster": CLUSTER,
    "nodes": NODES,
    "partitions": PARTITIONS,
    "timeouts": TIMEOUTS,
    "scheduling": SCHEDULING,
    "priority": PRIORITY,
    "ssh": SSH,
}


_HEADER = re.compile(r"\s*\[+(?P<name>[^#]*?)\]+\s*(#.*)?$")


def find_line(lines: list[str], section: str, key: str) -> int:
    """1-based line of ``key`` in ``[section]`` (of the header without ``key``), 0 if not found.

    tomllib keeps no positions; this finds the usual ways to write a key and is for messages.
    """
    current, header_at = "", 0
    for number, line in enumerate(lines, 1):
        header = _HEADER.match(line)
        if header and "=" not in line.split("]")[0]:
            current = header["name"].replace('"', "").replace("'", "").strip()
            if current == section:
                header_at = number
                if not key:
                    return number
            continue
        name = line.split("=", 1)[0].strip().strip("\"'") if "=" in line else ""
        if current == section and key and name == key:
            return number
        if not current and name == section:
            return number
    return header_at
