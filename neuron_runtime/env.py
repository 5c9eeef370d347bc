"""The ``NEURON_RT_*`` variables this runtime honours, read once per nrt_init.

A value that cannot be used is refused with the variable's name, what was given and what is allowed:
a typing error must not silently select other cores.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from neuron_runtime.errors import NRT_STATUS, NrtError

#: Seconds an execution may wait before it counts as hung (NEURON_RT_EXEC_TIMEOUT's default).
DEFAULT_EXEC_TIMEOUT_S = 30.0

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def _bad(name: str, value: str, wanted: str) -> NrtError:
    return NrtError(NRT_STATUS.NRT_INVALID, f"{name}={value!r} is invalid: {wanted}")


def parse_core_list(text: str, name: str = "NEURON_RT_VISIBLE_CORES") -> tuple[int, ...]:
    """Core ids of a list such as ``0``, ``0-3`` or ``0,2,4-5``, in the order written.

    Raises:
        NrtError: NRT_INVALID, malformed or with a core named twice.
    """
    wanted = "give core ids and ranges, for instance 0, 0-3 or 0,2,4-5"
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part, re.ASCII)
        if match is None:
            raise _bad(name, text, wanted)
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise _bad(name, text, f"range {part.strip()} runs backwards")
        cores.extend(range(first, last + 1))
    if len(set(cores)) != len(cores):
        raise _bad(name, text, "a core is named twice")
    return tuple(cores)


def _integer(environ: Mapping[str, str], name: str, least: int) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least:
        raise _bad(name, text, f"give a whole number of at least {least}")
    return int(text)


def _boolean(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in ("", "0", "false"):
        return False
    if text in ("1", "true"):
        return True
    raise _bad(name, text, "give 0, 1, true or false")


def _timeout(environ: Mapping[str, str]) -> float:
    name = "NEURON_RT_EXEC_TIMEOUT"
    text = environ.get(name, "").strip()
    if not text:
        return DEFAULT_EXEC_TIMEOUT_S
    if not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text, re.ASCII) or float(text) <= 0:
        raise _bad(name, text, "give a number of seconds above 0")
    return float(text)


def parse_root_comm_id(text: str) -> tuple[str, int]:
    """Host and port of a ``NEURON_RT_ROOT_COMM_ID`` (``ip:port``, ``[ipv6]:port``, ``host:port``).

    Raises:
        NrtError: NRT_INVALID.
    """
    name, wanted = "NEURON_RT_ROOT_COMM_ID", "give <ip or host name>:<port>, port 1-65535"
    host, colon, port_text = text.rpartition(":")
    if not colon or not re.fullmatch(r"\d{1,5}", port_text, re.ASCII):
        raise _bad(name, text, wanted)
    port = int(port_text)
    if not 1 <= port <= 65535:
        raise _bad(name, text, wanted)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _bad(name, text, wanted) from None
        return host, port
    if re.fullmatch(r"[\d.]+", host, re.ASCII):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise _bad(name, text, wanted) from None
    elif not _HOST_NAME.fullmatch(host):
        raise _bad(name, text, wanted)
    return host, port


@dataclass(frozen=True)
class RuntimeConfig:
    """What the environment asks of one runtime.

    ``visible_cores`` is None when NEURON_RT_VISIBLE_CORES is unset and () when it is set and empty,
    as in a job that was given no devices; ``num_cores`` is 0 for "all".
    """

    visible_cores: tuple[int, ...] | None
    num_cores: int
    exec_timeout_s: float
    validate_hash: bool
    report_numerical_errors: bool
    root_comm_id: tuple[str, int] | None
    lnc: int | None


def _visible(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return parse_core_list(text.strip()) if text.strip() else ()


def read(environ: Mapping[str, str]) -> RuntimeConfig:
    """Read the configuration.

    Raises:
        NrtError: NRT_INVALID naming the variable that cannot be used.
    """
    root_text = environ.get("NEURON_RT_ROOT_COMM_ID", "").strip()
    lnc = _integer(environ, "NEURON_LOGICAL_NC_CONFIG", 1)
    if lnc is None:
        lnc = _integer(environ, "NEURON_RT_VIRTUAL_CORE_SIZE", 1)
    verbosity = environ.get("NEURON_RT_NUMERICAL_ERRORS_VERBOSITY", "").strip().lower()
    return RuntimeConfig(
        visible_cores=_visible(environ.get("NEURON_RT_VISIBLE_CORES")),
        num_cores=_integer(environ, "NEURON_RT_NUM_CORES", 0) or 0,
        exec_timeout_s=_timeout(environ),
        validate_hash=_boolean(environ, "NEURON_RT_VALIDATE_HASH"),
        report_numerical_errors=verbosity not in ("", "0", "none"),
        root_comm_id=parse_root_comm_id(root_text) if root_text else None,
        lnc=lnc,
    )
