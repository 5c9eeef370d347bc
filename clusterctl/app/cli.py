"""The typer application: commands, options and how errors are shown."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from clusterctl.app.screen import Progress
from scheduler.api.errors import ClusterError
from scheduler.config import FILE_NAME, home_dir

app = typer.Typer(
    name="clusterctl",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A Slurm-style cluster of simulated Neuron devices on this machine or over SSH.",
    epilog="Slurm's commands are verbs too: clusterctl sbatch|srun|salloc|squeue|sinfo|scontrol|"
    "scancel|sacct ... (see their --help). CLUSTERCTL_HOME names the cluster's state directory.",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at the cluster file.")
app.add_typer(config_app, name="config")


def run(argv: list[str]) -> int:
    """Run one command line; returns the exit code, never raises for a user's mistake."""
    try:
        code = app(argv, prog_name="clusterctl", standalone_mode=True)
    except ClusterError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (head): nothing more to say
        return 141
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return code if isinstance(code, int) else 0


#: Administration commands that only need the controller's socket.
_FAR = frozenset(("status",))


def run_at(host: str, argv: list[str]) -> int:
    """``clusterctl --host HOST ...``: one command line for a cluster on another machine."""
    from clusterctl.main import VERBS

    verb = argv[0] if argv else ""
    if not host or not verb:
        return _fail("usage: clusterctl --host [USER@]HOST[:PORT] VERB ...", 2)
    if verb not in VERBS and verb not in _FAR:
        return _fail(f"{verb} does not work with --host: log in on {host} and run it there")
    from clusterctl.app import remote, rpc

    try:
        with remote.tunnel(host) as path:
            if verb in _FAR:
                rpc.tunnel = path
                return run(argv)
            os.environ["CLUSTERCTL_SOCKET"] = str(path)
            from clusterctl.slurm.entry import main as slurm_main

            return slurm_main(verb, argv[1:])
    except ClusterError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130


def _fail(message: str, code: int = 1) -> int:
    sys.stderr.write(f"clusterctl: error: {message}\n")
    return code


@app.command()
def up(
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes (a new cluster has 4).", min=1)
    ] = None,
    spares: Annotated[
        int | None, typer.Option(help="Spare nodes that replace lost ones (new: 1).", min=0)
    ] = None,
    instance_type: Annotated[
        str | None, typer.Option(help="Instance type of the nodes (new: trn1.32xlarge).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Take this cluster file for a new cluster.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what is wrong.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for controller and nodes.", min=1)
    ] = 60.0,
) -> None:
    """Start the cluster, or what of it does not run; wait until every node is ready."""
    from clusterctl.app.up import Wish
    from clusterctl.app.up import up as start

    wish = Wish(nodes, spares, instance_type, config)
    start(home_dir(), wish, Progress(quiet), timeout)


@app.command()
def down(
    keep_jobs: Annotated[
        bool, typer.Option(help="Stop the controller only; jobs go on until the next up.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what is wrong.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an end.", min=1)] = 60.0,
) -> None:
    """Stop the cluster: running jobs are cancelled, nothing is left behind."""
    from clusterctl.app.down import down as stop

    stop(home_dir(), Progress(quiet), keep_jobs, timeout)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show controller, nodes, agents and the queue in numbers."""
    from clusterctl.app.status import collect, render

    values = collect(home_dir())
    sys.stdout.write((json.dumps(values, indent=1) if as_json else render(values)) + "\n")


@app.command()
def logs(
    job: Annotated[str, typer.Argument(help="Job id, or ARRAY_TASK as 12_3.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends.")
    ] = False,
) -> None:
    """Print the standard output file of a job."""
    from clusterctl.app.logs import show

    show(home_dir(), job, follow)


@app.command()
def env(
    shell: Annotated[str, typer.Option(help="bash, zsh, sh or fish.")] = "bash",
) -> None:
    """Print the shell line that puts sbatch, squeue, ... on PATH: eval "$(clusterctl env)"."""
    from scheduler.api.errors import Rejected, Unavailable
    from scheduler.provision.local import HomePaths, write_dropins

    if shell not in ("bash", "zsh", "sh", "fish"):
        raise Rejected(f"unknown shell {shell!r}: bash, zsh, sh or fish")
    home = home_dir()
    folder = HomePaths(home).bin
    try:
        write_dropins(HomePaths(home))
    except OSError as error:
        raise Unavailable(f"cannot write {folder}: {error.strerror}") from None
    path, name = shlex.quote(str(folder)), shlex.quote(str(home))
    if shell == "fish":
        line = f"set -gx PATH {path} $PATH; set -gx CLUSTERCTL_HOME {name}"
    else:
        line = f'export PATH={path}:"$PATH"; export CLUSTERCTL_HOME={name}'
    sys.stdout.write(line + "\n")


@config_app.command("check")
def config_check(
    file: Annotated[
        Path | None, typer.Argument(help=f"A cluster file (else {FILE_NAME} of the home).")
    ] = None,
) -> None:
    """Check a cluster file and say every mistake in it."""
    from scheduler.config import load

    config = load(file or home_dir() / FILE_NAME, home_dir())
    sys.stdout.write(
        f"{config.path}: good: {len(config.specs)} nodes, {len(config.partitions())} partitions\n"
    )


@config_app.command("show")
def config_show(
    file: Annotated[
        Path | None, typer.Argument(help=f"A cluster file (else {FILE_NAME} of the home).")
    ] = None,
) -> None:
    """Print what a cluster file means, with every default filled in, as JSON."""
    import msgspec

    from scheduler.config import load

    config = load(file or home_dir() / FILE_NAME, home_dir())
    nodes = {
        name: {
            "address": spec.address,
            "instance_type": spec.instance_type.name,
            "cpus": spec.cpus,
            "mem_mib": spec.mem_mib,
            "transport": spec.transport,
            "spare": spec.spare,
            "weight": spec.weight,
            "features": spec.features,
        }
        for name, spec in config.specs.items()
    }
    settings = config.settings()
    values = {
        "cluster": config.cluster,
        "isolate": config.isolate,
        "heartbeat_s": config.heartbeat_s,
        "settings": {name: getattr(settings, name) for name in settings.__struct_fields__},
        "nodes": nodes,
        "partitions": {
            p.name: {name: getattr(p, name) for name in p.__struct_fields__ if name != "name"}
            for p in config.partitions()
        },
    }
    text = msgspec.json.format(msgspec.json.encode(values), indent=1).decode()
    sys.stdout.write(text + "\n")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        sys.stdout.write(installed("clusterctl") + "\n")
    except PackageNotFoundError:
        sys.stdout.write("not installed (running from a source tree)\n")
