"""``scontrol show config``: Slurm's names with the values that hold here.

Only what this controller really has; a name that means nothing here is left out.
"""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

from scheduler.core.state import State

#: The Slurm whose behaviour the commands follow.
SLURM_VERSION = "22.05.8"


def _seconds(value: float) -> str:
    return f"{value:g} sec"


def _days(value_s: float) -> str:
    """D-HH:MM:SS as Slurm prints PriorityMaxAge."""
    whole = int(value_s)
    days, rest = divmod(whole, 86400)
    return f"{days}-{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def config_values(
    state: State, home: Path, config_path: Path, host: str, started_s: float
) -> dict[str, str]:
    """Printed values by name, in Slurm's (alphabetical) order."""
    s = state.settings
    user = f"{_own_name()}({os.getuid()})"
    values = {
        "AccountingStorageEnforce": "none",
        "AccountingStorageHost": "localhost",
        "AccountingStorageTRES": "cpu,mem,node,billing,gres/neuron,gres/neuroncore",
        "AccountingStorageType": "accounting_storage/sqlite",
        "AuthType": "auth/peercred",
        "BatchStartTimeout": _seconds(s.launch_timeout_s),
        "BOOT_TIME": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started_s)),
        "ClusterName": s.cluster,
        "DefMemPerNode": "UNLIMITED",
        "DisableRootJobs": "No",
        "EnforcePartLimits": s.enforce_part_limits,
        "FirstJobId": str(s.first_job_id),
        "GresTypes": "neuron,neuroncore",
        "JobRequeue": str(int(s.job_requeue)),
        "KillOnBadExit": "0",
        "KillWait": _seconds(s.kill_wait_s),
        "MaxArraySize": str(s.max_array_size),
        "MaxJobCount": str(s.max_job_count),
        "MinJobAge": _seconds(s.min_job_age_s),
        "MpiDefault": "pmi1",
        "NEXT_JOB_ID": str(state.meta["next_job_id"]),
        "PreemptMode": "OFF",
        "PriorityMaxAge": _days(s.priority_max_age_s),
        "PriorityType": "priority/multifactor",
        "PriorityWeightAge": str(s.priority_weight_age),
        "PriorityWeightJobSize": str(s.priority_weight_size),
        "PriorityWeightPartition": str(s.priority_weight_partition),
        "ReturnToService": str(s.return_to_service),
        "SchedulerType": "sched/backfill" if s.backfill else "sched/builtin",
        "SelectType": "select/cons_res",
        "SelectTypeParameters": "CR_CORE_MEMORY",
        "SlurmUser": user,
        "SlurmctldHost[0]": host,
        "SlurmctldLogFile": str(home / "log" / "controller.log"),
        "SlurmctldTimeout": _seconds(s.node_timeout_s),
        "SlurmdTimeout": _seconds(s.node_timeout_s),
        "SlurmdUser": user,
        "SLURM_CONF": str(config_path),
        "SLURM_VERSION": SLURM_VERSION,
        "StateSaveLocation": str(home),
        "TaskPlugin": "task/none",
        "TopologyPlugin": "topology/none",
    }
    if s.default_mem_per_cpu_mib:
        del values["DefMemPerNode"]
        values["DefMemPerCPU"] = str(s.default_mem_per_cpu_mib)
        values = dict(sorted(values.items(), key=lambda kv: kv[0].lower()))
    return values
