"""The runtime's log lines, in libnrt's format.

``2025-Sep-19 18:57:20.782962  4444:4444  ERROR  TDRV:function_name      text``
is time (local), pid:tid, level, COMPONENT:function, text. NEURON_RT_LOG_LEVEL (or, for one
component, NEURON_RT_LOG_LEVEL_TDRV and so on) sets the level, NEURON_RT_LOG_LOCATION where lines
go: ``console`` (standard error, default) or ``syslog``.
"""

from __future__ import annotations

import os
import sys
import syslog
import threading
from datetime import datetime
from enum import IntEnum


class Level(IntEnum):
    """Log levels; a line is written when its level is at most the configured one."""

    QUIET = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    DEBUG = 4
    TRACE = 5


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_ALIASES = {"WARN": Level.WARNING, "FATAL": Level.ERROR}
_SYSLOG = {
    Level.ERROR: syslog.LOG_ERR,
    Level.WARNING: syslog.LOG_WARNING,
    Level.INFO: syslog.LOG_INFO,
    Level.DEBUG: syslog.LOG_DEBUG,
    Level.TRACE: syslog.LOG_DEBUG,
}


def level_for(component: str) -> Level:
    """The level the environment sets for ``component``; ERROR if unset or unknown."""
    text = os.environ.get(f"NEURON_RT_LOG_LEVEL_{component}")
    text = (text or os.environ.get("NEURON_RT_LOG_LEVEL") or "ERROR").strip().upper()
    if text in _ALIASES:
        return _ALIASES[text]
    return Level.__members__.get(text, Level.ERROR)


def format_line(when: datetime, level: Level, component: str, function: str, text: str) -> str:
    """One log line without its line end."""
    stamp = f"{when.year:04d}-{_MONTHS[when.month - 1]}-{when.day:02d} {when:%H:%M:%S.%f}"
    where = f"{component}:{function}"
    ids = f"{os.getpid()}:{threading.get_native_id()}"
    return f"{stamp}  {ids}  {level.name:<5}  {where:<23} {text}"


def log(level: Level, component: str, function: str, text: str) -> None:
    """Write one line if the component's level allows it. Never raises for a closed stream."""
    if level > level_for(component):
        return
    line = format_line(datetime.now(), level, component, function, text)
    if os.environ.get("NEURON_RT_LOG_LOCATION", "console").strip().lower() == "syslog":
        syslog.syslog(_SYSLOG[level], line)
        return
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # The console is gone; a log line is no reason to fail an execution.
        return
