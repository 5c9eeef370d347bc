"""From options to a ``JobSpec`` as a plain object (see :mod:`scheduler.api.records`)."""

from __future__ import annotations

import os

from clusterctl.slurm import values
from clusterctl.slurm.errors import CommandError
from clusterctl.slurm.getopt import INERT, NO, UNSUPPORTED
from clusterctl.slurm.options_job import NO_GPUS
from clusterctl.slurm.output import say, words
from scheduler.api.text import pack_os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from clusterctl.slurm.getopt import Opt, Parser

_MAIL_TYPES = (
    "NONE",
    "BEGIN",
    "END",
    "FAIL",
    "REQUEUE",
    "ALL",
    "INVALID_DEPEND",
    "STAGE_OUT",
    "TIME_LIMIT",
    "TIME_LIMIT_90",
    "TIME_LIMIT_80",
    "TIME_LIMIT_50",
    "ARRAY_TASKS",
)
_HINTS = ("compute_bound", "memory_bound", "multithread", "nomultithread")
#: Long options whose value goes into the specification as it is.
_TEXTS = {
    "account": "account",
    "qos": "qos",
    "comment": "comment",
    "wckey": "wckey",
    "dependency": "dependency",
    "array": "array",
    "job-name": "name",
}


class Options:
    """The options of one submission, applied in order (a later one wins).

    ``spec`` and ``res`` become the ``JobSpec`` and its ``Resources``; ``extra`` holds what only
    the command itself needs, by the option's long name.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.spec: dict[str, Any] = {}
        self.res: dict[str, Any] = {}
        self.extra: dict[str, str] = {}
        self.time_min_s: int | None = None
        self._warned: set[str] = set()
        self._inert: list[str] = []

    # ------------------------------------------------------------------ taking options

    def apply(self, opt: Opt, value: str | None) -> None:
        """One option.  Raises ``CommandError`` for a bad value or an option not built here."""
        name = opt.long
        special = _SPECIAL.get(name)
        if special is not None:
            special(self, value or "")
        elif opt.kind == INERT:
            self._note_inert(name)
        elif opt.kind == NO_GPUS:
            raise CommandError(
                f"{self.command}: error: Invalid generic resource (gres) specification",
                f"{self.command}: --{name} {opt.kind}",
            )
        elif opt.kind:
            raise CommandError(f"{self.command}: error: --{name} {opt.kind}")
        elif name in _TEXTS:
            self.spec[_TEXTS[name]] = value or ""
        else:
            self.extra[name] = value if value is not None else ""

    def apply_env(self, parser: Parser, names: Mapping[str, str]) -> None:
        """Options that environment variables set."""
        for variable, option in names.items():
            value = os.environ.get(variable)
            opt = parser.longs.get(option)
            if value is None or opt is None:
                continue
            if opt.arg == NO and value.lower() in ("0", "no", "false"):
                continue
            if value == "" and option != "exclusive" and opt.arg != NO:
                continue
            self.apply(opt, value if opt.arg != NO else None)

    def _note_inert(self, name: str) -> None:
        if name not in self._inert:
            self._inert.append(name)

    def warnings(self) -> None:
        """One line for each kind of option that is accepted and does nothing here."""
        if self.extra.get("quiet") is not None:
            return
        mail = [n for n in self._inert if n.startswith("mail-")]
        for name in self._inert:
            if name in mail:
                continue
            say(self.command, f"warning: --{name} has no effect here")
        if mail:
            say(self.command, f"warning: --{mail[0]} has no effect here: no mail is sent")

    # ------------------------------------------------------------------ options with checks

    def _set_nodes(self, text: str) -> None:
        low, high = values.nodes(self.command, text)
        self.res["min_nodes"] = low
        self.res["max_nodes"] = high
        self.res["nodes_given"] = True

    def _set_count(self, field: str, option: str) -> Callable[[str], None]:
        def store(text: str) -> None:
            self.res[field] = values.count(self.command, option, text)

        return store

    def _set_gres(self, text: str) -> None:
        self.res["gres"] = values.gres(self.command, text)

    def _set_exclusive(self, text: str) -> None:
        if text.lower() in ("user", "mcs"):
            raise CommandError(f"{self.command}: error: --exclusive={text} {UNSUPPORTED}")
        if text:
            raise values.bad(self.command, "exclusive")
        self.res["exclusive"] = True

    def _set_time(self, text: str) -> None:
        self.spec["time_limit_s"] = values.time_limit_s(self.command, "time", text)

    def _set_time_min(self, text: str) -> None:
        self.time_min_s = values.time_limit_s(self.command, "time-min", text)
        self._note_inert("time-min")

    def _set_hint(self, text: str) -> None:
        if text not in _HINTS:
            raise CommandError(
                f'{self.command}: error: unrecognized --hint argument "{text}", see --hint=help'
            )
        self._note_inert("hint")

    def _set_mail_type(self, text: str) -> None:
        if not all(part.upper() in _MAIL_TYPES for part in text.split(",")):
            raise values.bad(self.command, "mail-type")
        if text.upper() != "NONE":
            self._note_inert("mail-type")

    def _set_open_mode(self, text: str) -> None:
        known = {"a": "append", "append": "append", "t": "truncate", "truncate": "truncate"}
        if text not in known:
            raise values.bad(self.command, "open-mode")
        self.spec["open_mode"] = known[text]

    def _set_uid(self, text: str) -> None:
        from clusterctl.slurm.output import uid_of

        uid = uid_of(text)
        if uid is None:
            raise values.bad(self.command, "uid")
        if uid != os.getuid():
            raise CommandError(f"{self.command}: error: --uid of another user {UNSUPPORTED}")

    def _set_clusters(self, text: str) -> None:
        if text != "all":
            self.extra["clusters"] = text

    def _set_kill_on_invalid_dep(self, text: str) -> None:
        if text.lower() not in ("yes", "no"):
            raise values.bad(self.command, "kill-on-invalid-dep")
        self.spec["kill_on_invalid_dep"] = text.lower() == "yes"

    def _set_distribution(self, text: str) -> None:
        first = text.lower().split(":")[0].split(",")[0]
        if first == "*":
            first = "block"
        if first in ("plane", "arbitrary") or first.startswith("plane="):
            raise CommandError(f"{self.command}: error: --distribution={text} {UNSUPPORTED}")
        if first not in ("block", "cyclic"):
            raise values.bad(self.command, "distribution")
        self.extra["distribution"] = first

    def _set_wait_all_nodes(self, text: str) -> None:
        if text not in ("0", "1"):
            raise values.bad(self.command, "wait-all-nodes")

    def _no_license(self, text: str) -> None:
        raise CommandError(self.failed("Invalid license specification"))

    def _no_reservation(self, text: str) -> None:
        raise CommandError(
            self.failed("Requested reservation is invalid"),
            f"{self.command}: clusterctl has no reservations",
        )

    def _export_file(self, text: str) -> None:
        if not os.path.exists(text):
            raise CommandError(
                f"{self.command}: error: Could not open user environment file {text}"
            )
        raise CommandError(f"{self.command}: error: --export-file {UNSUPPORTED}")

    # ------------------------------------------------------------------ the result

    def failed(self, text: str) -> str:
        """The line for a request that cannot be met."""
        if self.command == "sbatch":
            return f"sbatch: error: Batch job submission failed: {text}"
        return f"{self.command}: error: Unable to allocate resources: {text}"

    def check(self) -> None:
        """What only the options together can tell."""
        res = self.res
        if "mem_per_node_mib" in res and "mem_per_cpu_mib" in res:
            raise CommandError(
                f"{self.command}: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually "
                "exclusive."
            )
        if res.get("nodes_given") and res["min_nodes"] == 0:
            raise CommandError(self.failed("Node count specification invalid"))
        limit_s = self.spec.get("time_limit_s")
        if self.time_min_s is not None and limit_s not in (None, -1):
            assert isinstance(limit_s, int)
            if self.time_min_s == -1 or self.time_min_s > limit_s:
                raise CommandError(
                    self.failed(
                        "Invalid time-min specification (exceeds job's time or other limits)"
                    )
                )
        self._check_nodelist()
        tasks = res.get("ntasks", 0)
        if tasks and res.get("nodes_given") and tasks < res["min_nodes"]:
            if self.extra.get("quiet") is None:
                say(
                    self.command,
                    f"Warning: can't run {tasks} processes on {res['min_nodes']} nodes, "
                    f"setting nnodes to {tasks}",
                )
            res["min_nodes"] = res["max_nodes"] = tasks

    def _check_nodelist(self) -> None:
        res = self.res
        names = len(set(res.get("nodelist", ())))
        if not names:
            return
        if res.get("nodes_given") and names > res["max_nodes"]:
            raise CommandError(
                f"{self.command}: error: invalid number of nodes (-N {names}-{res['max_nodes']})"
            )
        if names > res.get("min_nodes", 1):
            res["min_nodes"] = names
            if not res.get("nodes_given"):
                res["max_nodes"] = 0

    def finish(self) -> dict[str, Any]:
        """The ``JobSpec``; file names and texts packed for JSON."""
        spec = self.spec
        spec.setdefault("work_dir", os.getcwd())
        packed = ("work_dir", "command", "std_out", "std_err", "std_in", "name", "comment")
        for field in packed:
            if isinstance(spec.get(field), str):
                spec[field] = pack_os(spec[field])
        spec["submit_host"] = os.uname().nodename
        spec["alloc_sid"] = os.getsid(0)
        spec["resources"] = self.res
        return spec


def _res(field: str, option: str) -> Callable[[Options, str], None]:
    def store(options: Options, text: str) -> None:
        options.res[field] = values.count(options.command, option, text)

    return store


def _memory(field: str, option: str) -> Callable[[Options, str], None]:
    def store(options: Options, text: str) -> None:
        options.res[field] = values.memory_mib(options.command, option, text)

    return store


def _hosts(field: str) -> Callable[[Options, str], None]:
    def store(options: Options, text: str) -> None:
        options.res[field] = values.host_names(options.command, text)

    return store


def _spec(
    field: str, convert: Callable[[str], Any] | None = None
) -> Callable[[Options, str], None]:
    def store(options: Options, text: str) -> None:
        options.spec[field] = convert(text) if convert is not None else text

    return store


def _flag(field: str, value: bool) -> Callable[[Options, str], None]:
    def store(options: Options, text: str) -> None:
        options.spec[field] = value

    return store


def _nodefile(options: Options, text: str) -> None:
    path = text if "/" in text else os.path.join(".", text)
    options.res["nodelist"] = values.host_names(options.command, path)


def _constraint(options: Options, text: str) -> None:
    options.res["constraint"] = text


def _begin(options: Options, text: str) -> None:
    options.spec["begin_s"] = values.begin_s(options.command, "begin", text)


def _signal(options: Options, text: str) -> None:
    options.spec["signal"] = values.signal_at(options.command, text)


def _chdir(options: Options, text: str) -> None:
    options.spec["work_dir"] = os.path.abspath(text)


def _nice(options: Options, text: str) -> None:
    options.spec["nice"] = values.loose_number(text) if text else 100


_SPECIAL: dict[str, Callable[[Options, str], None]] = {
    "nodes": Options._set_nodes,
    "ntasks": _res("ntasks", "ntasks"),
    "ntasks-per-node": _res("ntasks_per_node", "ntasks-per-node"),
    "cpus-per-task": _res("cpus_per_task", "cpus-per-task"),
    "mem": _memory("mem_per_node_mib", "mem"),
    "mem-per-cpu": _memory("mem_per_cpu_mib", "mem-per-cpu"),
    "gres": Options._set_gres,
    "exclusive": Options._set_exclusive,
    "nodelist": _hosts("nodelist"),
    "nodefile": _nodefile,
    "exclude": _hosts("exclude"),
    "constraint": _constraint,
    "partition": _spec("partitions", words),
    "time": Options._set_time,
    "time-min": Options._set_time_min,
    "hold": _flag("hold", True),
    "requeue": _flag("requeue", True),
    "no-requeue": _flag("requeue", False),
    "begin": _begin,
    "signal": _signal,
    "nice": _nice,
    "priority": _spec("priority", values.loose_number),
    "chdir": _chdir,
    "output": _spec("std_out"),
    "error": _spec("std_err"),
    "input": _spec("std_in"),
    "open-mode": Options._set_open_mode,
    "kill-on-invalid-dep": Options._set_kill_on_invalid_dep,
    "distribution": Options._set_distribution,
    "uid": Options._set_uid,
    "clusters": Options._set_clusters,
    "hint": Options._set_hint,
    "mail-type": Options._set_mail_type,
    "wait-all-nodes": Options._set_wait_all_nodes,
    "licenses": Options._no_license,
    "reservation": Options._no_reservation,
    "export-file": Options._export_file,
}
