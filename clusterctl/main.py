"""The ``clusterctl`` command.

A Slurm verb goes straight to its own small module, so that ``clusterctl squeue`` starts as
fast as the drop-in ``squeue``; only the administration commands import typer.
"""

from __future__ import annotations

import os
import sys

#: Slurm's commands, also to be had as drop-ins in ``HOME/bin``.
VERBS = frozenset(("sbatch", "squeue", "sinfo", "scontrol", "scancel", "sacct", "srun", "salloc"))

_SOCKET = "controller.sock"

#: Verbs that bring up the local cluster when there is none.
_SUBMITTING = frozenset(("sbatch", "srun", "salloc"))

#: In a job, or with another controller named, no cluster is started.
_PLACED = frozenset(("SLURM_JOB_ID", "CLUSTERCTL_SOCKET"))

#: Options after which nothing is submitted.
_NO_SUBMIT = frozenset(("-h", "--help", "--usage", "-V", "--version"))


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    argv = sys.argv[1:]
    if argv and argv[0] in VERBS:
        verb, rest = argv[0], argv[1:]
        if verb in _SUBMITTING and not _PLACED & os.environ.keys():
            code = _ensure_cluster(rest)
            if code:
                return code
        return _slurm(verb, rest)
    if argv == ["relay"]:
        from clusterctl.relay import main as relay

        return relay(os.environ.get("CLUSTERCTL_SOCKET") or os.path.join(_home(), _SOCKET))
    if argv and argv[0].partition("=")[0] == "--host":
        return _at_host(argv)
    from clusterctl.app.cli import run

    return run(argv)


def _slurm(verb: str, argv: list[str]) -> int:
    from clusterctl.slurm.entry import main as slurm_main

    return slurm_main(verb, argv)


def _at_host(argv: list[str]) -> int:
    """``--host HOST VERB ...``."""
    from clusterctl.app.cli import run_at

    host, rest = argv[0].partition("=")[2], argv[1:]
    if not host and rest:
        host, rest = rest[0], rest[1:]
    return run_at(host, rest)


def _home() -> str:
    """The cluster's home, as :func:`scheduler.config.home_dir` has it (which loads too much)."""
    given = os.environ.get("CLUSTERCTL_HOME")
    if given:
        return os.path.abspath(given)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(os.path.abspath(state), "clusterctl")


def _ensure_cluster(argv: list[str]) -> int:
    """Start the local cluster where no controller listens; an exit code, 0 when there is one."""
    home = _home()
    if not _NO_SUBMIT.isdisjoint(argv) or _listens(home):
        return 0
    sys.stderr.write(f"clusterctl: no cluster runs yet: starting the local one in {home}\n")
    sys.stderr.flush()
    from clusterctl.app.cli import run

    return run(["up", "--quiet"])


def _listens(home: str) -> bool:
    """True when somebody accepts connections on the controller's socket."""
    import _socket

    from scheduler.api.frames import unix_address

    fd = None
    try:
        address, fd = unix_address(os.path.join(home, _SOCKET))
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            sock.connect(address)
        finally:
            sock.close()
        return True
    except OSError:
        return False
    finally:
        if fd is not None:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
