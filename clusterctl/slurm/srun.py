"""srun: run tasks in an allocation, or get one for them."""

from __future__ import annotations

import os
import time

from clusterctl.slurm import alloc, client, signals, stepin, stepout, steprun, values
from clusterctl.slurm.errors import CommandError, ControllerError
from clusterctl.slurm.getopt import Parser
from clusterctl.slurm.jobspec import Options
from clusterctl.slurm.options_job import ENV_SRUN, SRUN
from clusterctl.slurm.output import error, out, say, version_text
from clusterctl.slurm.submitenv import exported, submission_env
from scheduler.api.text import pack_os, show

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.slurm.getopt import Opt

_USAGE = "srun [OPTIONS(0)...] executable(0) [args(0)...]"
#: Ways for ranks to find each other; all of them speak PMI-1 on the wire.
_MPI = {"none": "none", "pmi1": "pmi1", "pmi2": "pmi1", "pmix": "pmi1"}
_LONGEST_PAUSE_S = 2.0


def _parse(argv: list[str]) -> tuple[Options, list[str]]:
    parser = Parser("srun", SRUN, usage_exit=255)
    given, rest = parser.parse(argv, permute=False)
    names = {opt.long for opt, _ in given}
    options = Options("srun")
    if "version" in names:
        out(version_text())
        options.extra["done"] = ""
    elif "help" in names:
        out(parser.help_text(_USAGE, "Run tasks in parallel, in a job or in one of their own."))
        options.extra["done"] = ""
    elif "usage" in names:
        out(f"Usage: {_USAGE}\n")
        options.extra["done"] = ""
    elif any(opt.long == "mpi" and value == "list" for opt, value in given):
        lines = "".join(f"\t{name}\n" for name in _MPI)
        out(f"MPI plugin types are...\n{lines}")
        options.extra["done"] = ""
    else:
        options.apply_env(parser, _environment(names))
        for opt, value in given:
            _apply(options, opt, value)
    return options, rest


def _environment(given: set[str]) -> dict[str, str]:
    """Variables to be read: those that the command line does not overrule in another way."""
    inside = "SLURM_JOB_ID" in os.environ or "jobid" in given
    dropped = set()
    if "ntasks" in given:
        dropped |= {"SLURM_NTASKS_PER_NODE"}
    if ("nodes" in given and os.environ.get("SLURM_NTASKS_PER_NODE")) or "ntasks-per-node" in given:
        dropped |= {"SLURM_NTASKS", "SLURM_NPROCS"}
    if "mem" in given:
        dropped |= {"SLURM_MEM_PER_CPU"}
    if "mem-per-cpu" in given:
        dropped |= {"SLURM_MEM_PER_NODE"}
    if inside:
        # They describe the job, not the step.
        dropped |= {"SLURM_JOB_NAME", "SLURM_PARTITION", "SLURM_QOS", "SLURM_ACCOUNT"}
    return {v: o for v, o in ENV_SRUN.items() if v not in dropped}


def _apply(options: Options, opt: Opt, value: str | None) -> None:
    if opt.long == "gres" and (value or "").lower() == "none":
        options.res["gres"] = {}
        options.extra["no-gres"] = ""
        return
    options.apply(opt, value)


def _check_mpi(options: Options) -> None:
    kind = options.extra.get("mpi", "pmi1")
    if kind not in _MPI:
        raise error(
            "srun", f"mpi/{kind}: invalid MPI type '{kind}', --mpi=list for acceptable types"
        )
    if kind not in ("none", "pmi1") and "quiet" not in options.extra:
        say("srun", f"warning: --mpi={kind} has no effect here: ranks are wired up by PMI-1")


class _Files:
    """Where the step's streams go: to srun, to files that srun writes, or to the nodes."""

    def __init__(self, options: Options) -> None:
        self.pattern: dict[int, str] = {
            1: options.spec.pop("std_out", ""),
            2: options.spec.pop("std_err", ""),
        }
        self.input: str = options.spec.pop("std_in", "")
        self.append = options.spec.get("open_mode") == "append"
        for fd, pattern in self.pattern.items():
            if pattern in ("none", "all"):
                self.pattern[fd] = os.devnull if pattern == "none" else ""
        if stepout.per_task(self.pattern[1]) and not self.pattern[2]:
            self.pattern[2] = ""  # the nodes put stderr with stdout

    def for_nodes(self, fd: int) -> str:
        """The pattern that the nodes are to open, "" when srun gets the stream."""
        pattern = self.pattern[fd]
        if stepout.per_task(pattern):
            return pattern
        if fd == 2 and pattern and stepout.per_task(self.pattern[1]):
            return pattern
        return ""

    def std_in(self) -> str:
        """``std_in`` of the step: "" for srun's own, "none", a task, or the nodes' pattern."""
        if self.input == "none" or self.input.isdigit() or stepout.per_task(self.input):
            return self.input
        return ""

    def source(self) -> stepin.Source | None:
        """Where srun reads the tasks' input from."""
        if self.input == "none" or stepout.per_task(self.input):
            return None
        if self.input and self.input != "all" and not self.input.isdigit():
            try:
                fd = os.open(self.input, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as bad:
                raise error("srun", f"Could not open stdin file: {bad.strerror}") from None
            return stepin.Source(fd, None)
        return stepin.Source(0, int(self.input) if self.input.isdigit() else None)

    def sinks(
        self, letters: dict[str, str], ntasks: int, *, label: bool, lines: bool
    ) -> tuple[stepout.Sink, stepout.Sink]:
        """The two streams as srun writes them; stderr goes with stdout's file."""
        mark = stepout.label_of(ntasks) if label else None
        found = []
        fds: dict[int, int] = {}
        for fd in (1, 2):
            pattern = "" if self.for_nodes(fd) else self.pattern[fd]
            if fd == 2 and not self.pattern[2] and self.pattern[1] and not self.for_nodes(1):
                fds[fd] = fds[1]
            elif pattern:
                path = stepout.expand(pattern, letters)
                fds[fd] = stepout.open_file(path, append=self.append)
            else:
                fds[fd] = fd
            found.append(stepout.Sink(fds[fd], mark, lines=lines))
        return found[0], found[1]


def _step_spec(options: Options, argv: list[str], files: _Files, *, inside: bool) -> dict[str, Any]:
    res, extra = options.res, options.extra
    export = extra.get("export", "ALL")
    env = submission_env(export)
    if inside:
        env |= exported(export, of_job=True)
    spec: dict[str, Any] = {
        "name": pack_os(options.spec.get("name") or os.path.basename(argv[0])),
        "argv": [pack_os(a) for a in argv],
        "env": env,
        "work_dir": pack_os(options.spec.get("work_dir") or os.getcwd()),
        "mpi": _MPI[options.extra.get("mpi", "pmi1")],
        "std_out": pack_os(files.for_nodes(1)),
        "std_err": pack_os(files.for_nodes(2)),
        "std_in": pack_os(files.std_in()),
        "open_mode": options.spec.get("open_mode", ""),
        "distribution": extra.get("distribution", "block"),
        "gres": {"none": 0} if "no-gres" in extra else res.get("gres", {}),
        "overlap": "overlap" in extra,
        "exact": "exact" in extra or bool(res.get("exclusive") and inside),
        "pty": "pty" in extra,
    }
    if res.get("ntasks"):
        spec["ntasks"], spec["ntasks_given"] = res["ntasks"], True
    if res.get("nodes_given"):
        spec["nodes"], spec["max_nodes"] = res["min_nodes"], res["max_nodes"]
    for field in (
        "ntasks_per_node",
        "cpus_per_task",
        "mem_per_node_mib",
        "mem_per_cpu_mib",
        "nodelist",
        "exclude",
    ):
        if field in res:
            spec[field] = res[field]
    _step_limits(options, spec)
    return spec


def _step_limits(options: Options, spec: dict[str, Any]) -> None:
    extra = options.extra
    if options.spec.get("time_limit_s") is not None:
        spec["time_limit_s"] = options.spec["time_limit_s"]
    if "kill-on-bad-exit" in extra:
        text = extra["kill-on-bad-exit"]
        if text not in ("", "0", "1"):
            raise values.bad("srun", "kill-on-bad-exit")
        spec["kill_on_bad_exit"] = text != "0"
    if "relative" in extra:
        spec["relative"] = values.number("srun", "relative", extra["relative"])


def _seconds(options: Options, name: str, default: int) -> int:
    text = options.extra.get(name)
    if text is None:
        return 0
    return values.number("srun", name, text) if text else default


def _create(job_id: int, spec: dict[str, Any], options: Options) -> dict[str, Any]:
    """Create the step; wait for its resources as long as other steps have them."""
    message = {"type": "CreateStep", "job_id": job_id, "spec": spec, "key": os.urandom(12).hex()}
    give_up = None
    if "immediate" in options.extra:
        give_up = time.monotonic() + _seconds(options, "immediate", 1)
    pause_s = 0.05
    told = False
    while True:
        try:
            created = client.call_again(message)
        except ControllerError as bad:
            if bad.code != "busy":
                raise CommandError(*_not_created(job_id, spec, bad)) from None
            if give_up is not None and time.monotonic() >= give_up:
                raise CommandError(*_not_created(job_id, spec, bad)) from None
            if not told and give_up is None and "quiet" not in options.extra:
                say(
                    "srun",
                    f"Job {job_id} step creation temporarily disabled, retrying ({bad.message})",
                )
            told = True
            time.sleep(pause_s)  # the controller has no queue of steps: ask again
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
            continue
        if told and give_up is None and "quiet" not in options.extra:
            say("srun", f"Step created for job {job_id}")
        return created


def _not_created(job_id: int, spec: dict[str, Any], bad: ControllerError) -> list[str]:
    if bad.code == "not_found":
        return [
            f"srun: error: Unable to confirm allocation for job {job_id}: {bad.message}",
            f"srun: Check SLURM_JOB_ID environment variable. Expired or invalid job {job_id}",
        ]
    if bad.code == "rejected" and spec.get("nodes"):
        jobs = client.call({"type": "GetJobs", "ids": [str(job_id)]})["jobs"]
        have = jobs[0].get("num_nodes", 1) if jobs else 0
        if have and spec["nodes"] > have:
            return [f"srun: error: Only allocated {have} nodes asked for {spec['nodes']}"]
    return [f"srun: error: Unable to create step for job {job_id}: {bad.message}"]


def _letters(job: dict[str, Any], created: dict[str, Any], spec: dict[str, Any]) -> dict[str, str]:
    from clusterctl.slurm.output import user_name

    job_id, step_id = job["id"], created["step_id"]
    task = job.get("array_task_id")
    return {
        "j": str(job_id),
        "J": f"{job_id}.{step_id}",
        "s": step_id,
        "A": str(job.get("array_job_id") or job_id),
        "a": str(task) if task is not None else "4294967294",
        "x": show(job.get("name") or spec["name"]),
        "u": user_name(os.getuid()),
    }


def _run_step(
    job: dict[str, Any],
    options: Options,
    argv: list[str],
    caught: signals.Signals,
    *,
    inside: bool,
) -> int:
    files = _Files(options)
    source = files.source()
    spec = _step_spec(options, argv, files, inside=inside)
    _hook(options, "prolog", job["id"], argv)
    try:
        return _launch(job, options, spec, files, source, caught)
    finally:
        _hook(options, "epilog", job["id"], argv)


def _hook(options: Options, name: str, job_id: int, argv: list[str]) -> None:
    """Run ``--prolog`` or ``--epilog`` here, with the step's command as its arguments."""
    program = options.extra.get(name, "none")
    if program.lower() == "none":
        return
    from subprocess import DEVNULL, call

    env = {**os.environ, "SLURM_JOB_ID": str(job_id), "SLURM_SCRIPT_CONTEXT": f"{name}_srun"}
    try:
        code = call([os.path.abspath(program), *argv], env=env, stdin=DEVNULL)
    except OSError as bad:
        say("srun", f"error: {name} {program} cannot be run: {bad.strerror}")
        return
    if code:
        say("srun", f"error: {name} {program} failed with status {code}")


def _launch(
    job: dict[str, Any],
    options: Options,
    spec: dict[str, Any],
    files: _Files,
    source: stepin.Source | None,
    caught: signals.Signals,
) -> int:
    created = _create(job["id"], spec, options)
    view = {**job, **created.get("job", {})}
    ntasks = sum(len(t) for t in created["layout"]["tasks"])
    unbuffered = "unbuffered" in options.extra or spec["pty"]
    sinks = files.sinks(
        _letters(view, created, spec), ntasks, label="label" in options.extra, lines=not unbuffered
    )
    step = steprun.StepRun(job["id"], created, sinks, source, caught)
    step.wait_s = _seconds(options, "wait", 0)
    step.kill_on_bad_exit = bool(spec.get("kill_on_bad_exit"))
    step.quit_on_interrupt = "quit-on-interrupt" in options.extra
    if not spec["pty"]:
        return step.run()
    from clusterctl.slurm.rawtty import RawTerminal

    with RawTerminal(0) as terminal:
        step.raw = terminal.raw
        return step.run()


def _job_of(options: Options) -> int | None:
    """The job to run in, None when there is none yet."""
    text = options.extra.get("jobid") or os.environ.get("SLURM_JOB_ID")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise CommandError(f"srun: error: Invalid job id {text}")
    return int(text)


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    options, command = _parse(argv)
    if "done" in options.extra:
        return 0
    if not command:
        raise CommandError("srun: fatal: No command given to execute.")
    _check_mpi(options)
    options.check()
    job_id = _job_of(options)
    with signals.Signals(steprun.CAUGHT) as caught:
        if job_id is not None:
            options.warnings()
            job = {"id": job_id, "array_job_id": _number("SLURM_ARRAY_JOB_ID")}
            job["array_task_id"] = _number("SLURM_ARRAY_TASK_ID")
            if os.environ.get("SLURM_JOB_NAME"):
                job["name"] = pack_os(os.environ["SLURM_JOB_NAME"])
            return _run_step(job, options, command, caught, inside=True)
        return _run_alone(options, command, caught)


def _number(variable: str) -> Any:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _run_alone(options: Options, command: list[str], caught: signals.Signals) -> int:
    """In an allocation made for this one step."""
    names = ["std_out", "std_err", "std_in"]
    files = {field: options.spec.pop(field) for field in names if field in options.spec}
    options.spec.setdefault("name", os.path.basename(command[0]))
    env = submission_env(options.extra.get("export", "ALL"))
    job_id = alloc.submit("srun", options, env)
    status, signum = 1, 0
    try:
        job = alloc.wait_allocated("srun", job_id, options, caught)
        _unpack(options)
        options.spec.update(files)
        if options.res.get("nodes_given"):  # all that it got of a range
            options.res["min_nodes"] = options.res["max_nodes"] = job.get("num_nodes", 1)
        status = _run_step(job, options, command, caught, inside=False)
        signum = status - 128 if 128 < status < 160 else 0
    finally:
        alloc.release(job_id, 0 if signum else status, signum)
    return status


def _unpack(options: Options) -> None:
    """Texts that went over the wire packed, as the step's options again."""
    from scheduler.api.text import unpack

    for field in ("name", "work_dir"):
        options.spec[field] = unpack(options.spec[field]).decode("utf-8", "surrogateescape")
