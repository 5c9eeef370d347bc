"""The ``clusterctl`` command.

A Slurm verb goes straight to its own small module, so that ``clusterctl squeue`` starts as
fast as the drop-in ``squeue``; only the administration commands import typer.
"""

from __future__ import annotations

import os
import sys

#: Slurm's commands, also to be had as drop-ins in ``HOME/bin``.
VERBS = frozenset(("sbatch", "squeue", "sinfo", "scontrol", "scancel", "sacct", "srun", "salloc"))

#: Verbs that bring up the local cluster when there is none.
_SUBMITTING = frozenset(("sbatch", "srun", "salloc"))

#: Options after which nothing is submitted.
_NO_SUBMIT = frozenset(("-h", "--help", "--usage", "-V", "--version"))


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    argv = sys.argv[1:]
    if argv and argv[0] in VERBS:
        verb, rest = argv[0], argv[1:]
        if verb in _SUBMITTING and "SLURM_JOB_ID" not in os.environ:
            code = _ensure_cluster(verb, rest)
            if code:
                return code
        from clusterctl.slurm.entry import main as slurm_main

        return slurm_main(verb, rest)
    from clusterctl.app.cli import run

    return run(argv)


def _ensure_cluster(verb: str, argv: list[str]) -> int:
    """Start the local cluster where no controller listens; an exit code, 0 when there is one."""
    home = os.environ.get("CLUSTERCTL_HOME") or os.path.join(
        os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "clusterctl"
    )
    home = os.path.abspath(os.path.expanduser(home))
    if not _NO_SUBMIT.isdisjoint(argv) or _listens(home):
        return 0
    sys.stderr.write(f"clusterctl: no cluster runs yet: starting the local one in {home}\n")
    sys.stderr.flush()
    from clusterctl.app.cli import run

    return run(["up", "--quiet"])


def _listens(home: str) -> bool:
    """True when somebody accepts connections on the controller's socket."""
    import socket

    from scheduler.api.frames import unix_address

    fd = None
    try:
        address, fd = unix_address(os.path.join(home, "controller.sock"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(address)
        return True
    except OSError:
        return False
    finally:
        if fd is not None:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
