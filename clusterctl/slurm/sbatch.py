"""sbatch: submit a batch script."""

from __future__ import annotations

import os

from clusterctl.slurm import client, directives
from clusterctl.slurm.errors import CommandError, ControllerError
from clusterctl.slurm.getopt import Parser
from clusterctl.slurm.jobspec import Options
from clusterctl.slurm.options_job import ENV_SBATCH, SBATCH
from clusterctl.slurm.output import out, say, version_text, warn_reply
from clusterctl.slurm.submitenv import submission_env
from scheduler.api.text import pack, pack_os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.slurm.getopt import Opt

_USAGE = "sbatch [OPTIONS(0)...] [script [args...]]"

#: Errors of the controller that Slurm's command finds by itself, hence without the usual lead-in.
_BARE = ("Invalid generic resource (gres) specification",)


def _parse(argv: list[str]) -> tuple[Options, list[str], bytes]:
    """Options from script, environment and command line, the script's arguments, the script."""
    parser = Parser("sbatch", SBATCH, usage_exit=255)
    given, rest = parser.parse(argv, permute=False)
    names = {opt.long for opt, _ in given}
    if names & {"help", "usage", "version"}:
        return _about(parser, names), [], b""
    wrap = next((value for opt, value in reversed(given) if opt.long == "wrap"), None)
    if wrap is not None:
        if rest:
            raise CommandError("sbatch: error: Script arguments not permitted with --wrap option")
        script = _wrapped(wrap)
    else:
        script = directives.read_script(_find_script(rest[0]) if rest else None)
    options = Options("sbatch")
    if wrap is None:
        for opt, value in _directive_options(parser, script):
            options.apply(opt, value)
    options.apply_env(parser, ENV_SBATCH)
    for opt, value in given:
        options.apply(opt, value)
    _name_and_command(options, rest, wrap)
    return options, rest[1:], script


def _about(parser: Parser, names: set[str]) -> Options:
    if "version" in names:
        out(version_text())
    elif "help" in names:
        about = "Submit a batch script.  #SBATCH lines at its top are read as options."
        out(parser.help_text(_USAGE, about))
    else:
        out(f"Usage: {_USAGE}\n")
    options = Options("sbatch")
    options.extra["done"] = ""
    return options


def _wrapped(command: str) -> bytes:
    text = command.encode("utf-8", "surrogateescape")
    body = b"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n" + text + b"\n"
    if len(body) > directives.MAX_SCRIPT:
        raise CommandError(
            "sbatch: error: Batch job submission failed: "
            f"Job script exceeds maximum size ({directives.MAX_SCRIPT} bytes)"
        )
    return body


def _find_script(name: str) -> str:
    """The script's path: as given, else (a bare name) on PATH."""
    if "/" in name or os.path.exists(name):
        return name
    for folder in os.environ.get("PATH", "").split(":"):
        path = os.path.join(folder, name)
        if folder and os.path.isfile(path):
            return path
    return name


def _directive_options(parser: Parser, script: bytes) -> list[tuple[Opt, str | None]]:
    found: list[tuple[Opt, str | None]] = []
    for words in directives.directives(script):
        given, extra = parser.parse(words, permute=True)
        if extra:
            raise CommandError(
                f"sbatch: error: unexpected words in a #SBATCH line: {' '.join(extra)}",
                exit_code=255,
            )
        found += [(opt, value) for opt, value in given if opt.long not in ("help", "wrap")]
    return found


def _name_and_command(options: Options, rest: list[str], wrap: str | None) -> None:
    spec = options.spec
    if rest:
        path = _find_script(rest[0])
        spec.setdefault("name", os.path.basename(path))
        spec["command"] = os.path.abspath(path)
    else:
        spec.setdefault("name", "sbatch" if wrap is None else "wrap")
    for field in ("std_out", "std_err", "std_in"):
        if spec.get(field) == "":
            del spec[field]


def _submission(options: Options, args: list[str], script: bytes) -> dict[str, Any]:
    export = options.extra.get("export", "ALL")
    spec = options.finish()
    spec["export"] = export
    distribution = options.extra.get("distribution")
    env = submission_env(export)
    if distribution:
        env["SLURM_DISTRIBUTION"] = distribution
    return {
        "type": "Submit",
        "spec": spec,
        "payload": {
            "script": pack(script),
            "argv": [pack_os(a) for a in args],
            "env": env,
        },
        "key": os.urandom(12).hex(),
        "test_only": "test-only" in options.extra,
    }


def unknown_partitions(names: list[str]) -> list[str]:
    """Those of ``names`` that the cluster does not have."""
    known = {p.get("name") for p in client.call({"type": "GetNodes"})["partitions"]}
    return [name for name in names if name not in known]


def refused(command: str, lead: str, error: ControllerError, spec: dict[str, Any]) -> CommandError:
    """What a refusal by the controller looks like: details first, then the reason."""
    lines = []
    if error.message == "Invalid partition name specified":
        wrong = unknown_partitions(spec.get("partitions", []))
        if wrong:
            lines.append(f"{command}: error: invalid partition specified: {','.join(wrong)}")
    lines += [f"{command}: error: {line}" for line in error.warning.splitlines()]
    if error.message in _BARE:
        lines.append(f"{command}: error: {error.message}")
    else:
        lines.append(f"{command}: error: {lead}: {error.message}")
    return CommandError(*lines)


def check_cluster(command: str, wanted: str) -> None:
    """``--clusters``: only the own name can be met.  Raises ``CommandError``."""
    own = client.call({"type": "Ping"}).get("cluster", "")
    for name in wanted.split(","):
        if name != own:
            raise CommandError(
                f"{command}: error: No cluster '{name}' known by database.",
                f"{command}: error: '{name}' can't be reached now, or it is an invalid entry for "
                "--cluster.  Use 'sacctmgr list clusters' to see available clusters.",
            )


def _test_result(reply: dict[str, Any]) -> int:
    from scheduler.api.times import format_stamp

    if reply.get("start_s") is None:
        say("sbatch", "Job can run on this cluster; when it would start is not known")
        return 0
    say(
        "sbatch",
        f"Job {reply.get('job_id', 0)} to start at {format_stamp(reply['start_s'])} using "
        f"{reply.get('num_cpus', 1)} processors on nodes {reply.get('node_list', '')} "
        f"in partition {reply.get('partition', '')}",
    )
    return 0


def run(argv: list[str]) -> int:
    """The command; its exit status."""
    options, args, script = _parse(argv)
    if "done" in options.extra:
        return 0
    options.check()
    client.ensure_cluster("sbatch")
    if "clusters" in options.extra:
        check_cluster("sbatch", options.extra["clusters"])
    request = _submission(options, args, script)
    options.warnings()
    try:
        reply = client.call_again(request)
    except ControllerError as error:
        if request["test_only"]:
            raise CommandError(f"allocation failure: {error.message}") from None
        raise refused("sbatch", "Batch job submission failed", error, options.spec) from None
    if request["test_only"]:
        return _test_result(reply)
    warn_reply("sbatch", reply)
    job_id = reply["job_id"]
    quiet = "quiet" in options.extra
    if "parsable" in options.extra:
        out(f"{job_id}\n")
    elif not quiet:
        out(f"Submitted batch job {job_id}\n")
    if "wait" in options.extra:
        return _wait(job_id, quiet)
    return 0


def _wait(job_id: int, quiet: bool) -> int:
    """``--wait``: the job's exit code, the largest of an array's; 1 for any other bad end."""
    import sys

    sys.stdout.flush()
    jobs = client.call_again(
        {"type": "WaitJob", "job_id": job_id, "until": "ended"}, patience_s=client.FOREVER_S
    )["jobs"]
    return max((exit_status(job) for job in jobs), default=0)


def exit_status(job: dict[str, Any]) -> int:
    """What ``--wait`` makes of an ended job."""
    if job.get("signal_code"):
        return 1
    code: int = job.get("code", 0)
    if code:
        return code
    return 0 if job.get("state") == "COMPLETED" else 1
