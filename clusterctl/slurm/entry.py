"""Where a Slurm verb enters: ``main("squeue", argv)``."""

from __future__ import annotations

import os
import sys

from clusterctl.slurm.errors import CommandError, ControllerError, NoController

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: The commands that exist, and the exit status of each when nobody answers.
VERBS = ("sbatch", "squeue", "sinfo", "scontrol", "scancel", "sacct", "srun", "salloc")


def _command(verb: str) -> Callable[[list[str]], int]:
    """The function of a verb; only its own modules are imported."""
    if verb not in VERBS:
        raise CommandError(f"clusterctl: error: {verb} is no Slurm command that clusterctl has")
    module = __import__(f"clusterctl.slurm.{verb}", fromlist=["run"])
    run: Callable[[list[str]], int] = module.run
    return run


def _no_contact(verb: str, error: NoController) -> None:
    from clusterctl.slurm.client import NO_CONTACT
    from clusterctl.slurm.output import err

    texts = {
        "sbatch": f"sbatch: error: Batch job submission failed: {NO_CONTACT}",
        "srun": f"srun: error: Unable to allocate resources: {NO_CONTACT}",
        "salloc": f"salloc: error: Unable to allocate resources: {NO_CONTACT}",
        "sinfo": f"slurm_load_partitions: {NO_CONTACT}",
        "squeue": f"slurm_load_jobs error: {NO_CONTACT}",
        "scancel": f"scancel: error: {NO_CONTACT}",
    }
    err(f"{texts.get(verb, f'{verb}: error: {NO_CONTACT}')}\n{verb}: {error.hint}\n")


def main(verb: str, argv: list[str]) -> int:
    """Run one command; its exit status.  ``argv`` is without the command's name."""
    from clusterctl.slurm.output import err

    try:
        status = _command(verb)(argv)
        sys.stdout.flush()
    except CommandError as error:
        sys.stdout.flush()
        err("".join(line + "\n" for line in error.lines))
        return error.exit_code
    except ControllerError as error:
        sys.stdout.flush()
        err(f"{verb}: error: {error.message}\n")
        return 1
    except NoController as error:
        _no_contact(verb, error)
        return 1
    except BrokenPipeError:
        # The reader went away (`squeue | head`): quiet, as other tools are.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    return status
