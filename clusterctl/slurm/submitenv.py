"""The environment that a submission carries."""

from __future__ import annotations

import os

from clusterctl.slurm.output import words
from scheduler.api.text import pack_os

#: Variables of an enclosing job or step; they would lie in the new one.
_OF_A_JOB = (
    "SLURM_JOB",
    "SLURM_STEP",
    "SLURM_TASK",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NNODES",
    "SLURM_NODE",
    "SLURM_CPUS",
    "SLURM_MEM_PER",
    "SLURM_GTIDS",
    "SLURM_LOCALID",
    "SLURM_PROCID",
    "SLURM_ARRAY",
    "SLURM_RESTART",
    "SLURM_LAUNCH",
    "SLURM_SRUN",
    "SLURM_TOPOLOGY",
    "SLURM_DISTRIBUTION",
    "SLURM_PRIO_PROCESS",
    "SLURM_WORKING_CLUSTER",
    "SLURMD_",
    "PMI_",
    "CLUSTERCTL_STEP",
)

_LIMITS = ("CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "MEMLOCK", "AS")


def _usable(name: str) -> bool:
    return bool(name) and not any(0xD800 <= ord(c) <= 0xDFFF for c in name)


def exported(export: str, *, of_job: bool) -> dict[str, str]:
    """The caller's environment as ``--export`` narrows it, values packed.

    ``ALL`` takes all, ``NONE`` none, a list of ``NAME`` and ``NAME=value`` takes those (``ALL`` may
    be one of them).  SLURM_* and SPANK_* always go along, except, with ``of_job`` False, what
    describes the job that the caller itself runs in.
    """
    parts = words(export)
    everything = not parts or any(p.upper() == "ALL" for p in parts)
    nothing = not everything and any(p.upper() in ("NONE", "NIL") for p in parts)
    chosen: dict[str, str] = {}
    for name, value in os.environ.items():
        own = name.startswith(("SLURM_", "SPANK_", "CLUSTERCTL_"))
        if (everything or own) and _usable(name):
            chosen[name] = value
    if not nothing:
        for part in parts:
            name, equals, value = part.partition("=")
            if equals and _usable(name):
                chosen[name] = value
            elif name in os.environ and _usable(name):
                chosen[name] = os.environ[name]
    if not of_job:
        chosen = {n: v for n, v in chosen.items() if not n.startswith(_OF_A_JOB)}
    return {name: pack_os(value) for name, value in chosen.items()}


def submission_env(export: str) -> dict[str, str]:
    """Environment of a batch job: what is exported, where it was submitted, umask and limits."""
    import resource

    env = exported(export, of_job=False)
    mask = os.umask(0)
    os.umask(mask)
    env["SLURM_UMASK"] = f"{mask:04o}"
    env["SLURM_SUBMIT_DIR"] = pack_os(os.getcwd())
    env["SLURM_SUBMIT_HOST"] = pack_os(os.uname().nodename)
    for name in _LIMITS:
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            soft = resource.getrlimit(number)[0]
            env[f"SLURM_RLIMIT_{name}"] = str(soft)
    return env
