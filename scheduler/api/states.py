"""Names of states and reasons, as Slurm's commands print them.

Standard library only: the drop-in commands import this module.
"""

from __future__ import annotations

# Job states: long name -> compact name (squeue %t).
JOB_STATES = {
    "PENDING": "PD",
    "RUNNING": "R",
    "SUSPENDED": "S",
    "COMPLETING": "CG",
    "COMPLETED": "CD",
    "CANCELLED": "CA",
    "FAILED": "F",
    "TIMEOUT": "TO",
    "NODE_FAIL": "NF",
    "PREEMPTED": "PR",
    "BOOT_FAIL": "BF",
    "DEADLINE": "DL",
    "OUT_OF_MEMORY": "OOM",
    "CONFIGURING": "CF",
    "REQUEUED": "RQ",
    "REQUEUE_HOLD": "RH",
    "RESIZING": "RS",
    "REVOKED": "RV",
    "SIGNALING": "SI",
    "SPECIAL_EXIT": "SE",
    "STAGE_OUT": "SO",
    "STOPPED": "ST",
}

#: Job states from which a job does not come back by itself.
TERMINAL = frozenset(
    {
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "DEADLINE",
        "BOOT_FAIL",
    }
)

# Step ids: numbered steps are 0, 1, ...; these two are not.
STEP_BATCH = "batch"
STEP_INTERACTIVE = "interactive"
