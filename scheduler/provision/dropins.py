"""The drop-in commands of a cluster: small files named sbatch, squeue, ... in ``HOME/bin``.

Each starts this very interpreter in isolated mode, names its cluster and hands over to
``clusterctl.slurm.entry.main``.  They are written anew when the installation moved.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from scheduler.provision.proc import needs_path, package_root, write_atomic

#: The commands, by Slurm's names.
VERBS = ("sbatch", "squeue", "sinfo", "scontrol", "scancel", "sacct", "srun", "salloc")

#: Longest interpreter line that every Linux kernel takes (BINPRM_BUF_SIZE was 128 before 5.1).
_SHEBANG_LIMIT = 127

_SHARED = ".dropin.py"


def _body(verb: str, first: int, environment: dict[str, str], root: str | None) -> str:
    """Program text; ``verb`` is an expression, ``first`` where the arguments start in argv."""
    path = f"sys.path.insert(0, {root!r})\n" if root else ""
    settings = "".join(f"os.environ[{k!r}] = {v!r}\n" for k, v in sorted(environment.items()))
    return (
        f"import os\nimport sys\n\n{path}{settings}"
        "from clusterctl.slurm.entry import main\n\n"
        f"sys.exit(main({verb}, sys.argv[{first}:]))\n"
    )


def contents(environment: dict[str, str]) -> dict[str, str]:
    """File name -> text of the drop-ins for this interpreter and installation."""
    root = str(package_root()) if needs_path() else None
    shebang = f"#!{sys.executable} -I\n"
    if len(shebang) - 1 <= _SHEBANG_LIMIT and not any(c.isspace() for c in sys.executable):
        return {verb: shebang + _body(repr(verb), 1, environment, root) for verb in VERBS}
    # A kernel splits the line at blanks and cuts a long one: go through sh.
    return {_SHARED: _body("sys.argv[1]", 2, environment, root)} | {
        verb: (
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I "${{0%/*}}/{_SHARED}" {verb} "$@"\n'
        )
        for verb in VERBS
    }


def write(folder: Path, environment: dict[str, str]) -> None:
    """Write the drop-ins into ``folder``; files that are right already stay untouched.

    ``environment`` is set before the command runs (``CLUSTERCTL_HOME`` names the cluster).
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents(environment).items():
        file = folder / name
        data = text.encode("utf-8", "surrogateescape")
        try:
            if file.read_bytes() == data:
                continue
        except OSError:
            pass
        write_atomic(file, data, 0o755)
