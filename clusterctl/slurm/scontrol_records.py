"""``scontrol show``: jobs, steps, nodes and partitions as blocks of ``Key=value``."""

from __future__ import annotations

from clusterctl.slurm.jobview import JobView, stamp
from clusterctl.slurm.sinfo_fields import features, gres_text, gres_total, gres_used
from clusterctl.slurm.tableformat import mem_text, tres_text
from scheduler.api.hostlist import fold
from scheduler.api.times import format_limit, format_padded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def block(lines: list[str], *, oneliner: bool) -> str:
    """Lines of a record, indented, or all in one."""
    return (" " if oneliner else "\n   ").join(lines)


def _null(text: str | None) -> str:
    return text or "(null)"


def _hosts(names: list[str] | None) -> str:
    return fold(names) if names else "(null)"


def _first_line(j: JobView) -> str:
    line = f"JobId={j.id} "
    if j.get("array_job_id"):
        line += f"ArrayJobId={j.array_id} ArrayTaskId={j.task_text()} "
        if j.get("array_throttle"):
            line += f"ArrayTaskThrottle={j.get('array_throttle')} "
    return line + f"JobName={j.text('name')}"


def _times(j: JobView) -> list[str]:
    eligible = j.get("eligible_s")
    if eligible is None:
        eligible = j.get("begin_s")
    waiting_task = j.is_head or j.get("of_head")
    start_s = j.start_s()
    end_s = j.end_s()
    return [
        (
            f"RunTime={format_padded(j.elapsed_s())} "
            f"TimeLimit={format_limit(j.get('time_limit_s'), padded=True)} TimeMin=N/A"
        ),
        (
            f"SubmitTime={stamp(j.get('submit_s'), 'Unknown')} "
            f"EligibleTime={stamp(None if waiting_task else eligible, 'Unknown')}"
        ),
        f"AccrueTime={stamp(eligible, 'Unknown')}",
        f"StartTime={stamp(start_s, 'Unknown')} EndTime={stamp(end_s, 'Unknown')} Deadline=N/A",
        (
            "SuspendTime=None SecsPreSuspend=0 "
            f"LastSchedEval={stamp(j.now_s if j.pending else start_s, 'Unknown')} Scheduler=Main"
        ),
    ]


def _node_count(j: JobView) -> str:
    if j.pending and j.res.get("nodes_given") and j.res.get("max_nodes"):
        return f"{j.res.get('min_nodes', 1)}-{j.res['max_nodes']}"
    return str(j.get("num_nodes", 1))


def _memory(j: JobView) -> str:
    per_cpu = j.res.get("mem_per_cpu_mib")
    if per_cpu is not None:
        return f"MinMemoryCPU={mem_text(per_cpu)}"
    return f"MinMemoryNode={mem_text(j.res.get('mem_per_node_mib') or 0)}"


def _details(j: JobView) -> list[str]:
    """Nodes with their CPUs, memory and devices (``scontrol -d``)."""
    wanted = j.res.get("gres") or {}
    lines = []
    if wanted:
        lines.append("JOB_GRES=" + gres_text(wanted))
    for alloc in j.get("allocs") or []:
        counts = {"neuron": alloc.get("devices") or [], "neuroncore": alloc.get("cores") or []}
        held = ",".join(
            f"{name}(CNT:{len(ids)})" for name, ids in counts.items() if name in wanted and ids
        )
        cpus = _ranges(alloc.get("cpu_ids") or [])
        lines.append(
            f"  Nodes={alloc['node']} CPU_IDs={cpus} Mem={alloc.get('mem_mib', 0)} GRES={held}"
        )
    return lines


def _ranges(numbers: list[int]) -> str:
    from clusterctl.slurm.jobview import task_ranges

    return task_ranges(sorted(numbers))


def _resources(j: JobView, details: bool) -> list[str]:
    res = j.res
    per_task = max(1, res.get("cpus_per_task", 0))
    per_node = res.get("ntasks_per_node", 0)
    lines = [
        (
            f"NumNodes={_node_count(j)} NumCPUs={j.get('num_cpus', 1)} "
            f"NumTasks={j.get('num_tasks', 1)} CPUs/Task={per_task} ReqB:S:C:T=0:0:*:*"
        ),
        f"TRES={_null(j.tres())}",
        f"Socks/Node=* NtasksPerN:B:S:C={per_node}:0:*:* CoreSpec=*",
    ]
    if details:
        lines += _details(j)
    return [
        *lines,
        f"MinCPUsNode={j.min_cpus()} {_memory(j)} MinTmpDiskNode=0",
        f"Features={_null(res.get('constraint'))} DelayBoot=00:00:00",
        (
            f"OverSubscribe={'NO' if res.get('exclusive') else 'OK'} Contiguous=0 Licenses=(null) "
            "Network=(null)"
        ),
    ]


def _of_script(j: JobView, failure: dict[str, Any]) -> bool:
    """Whether the failure is the batch script's own end, which ExitCode tells already."""
    own = (failure.get("code", 0), failure.get("signal", 0))
    of_step = j.get("derived_code") or j.get("derived_signal") or failure["task"]
    ended = (j.get("code", 0), j.get("signal_code", 0))
    return bool(j.get("batch", True) and not of_step and own == ended)


def _why(j: JobView) -> str:
    """What is known of a bad end: the controller's sentence and the first rank that failed."""
    if j.base_state in ("PENDING", "RUNNING", "COMPLETED"):
        return ""
    parts = [j.get("detail")] if j.get("detail") else []
    failure = j.get("first_failure")
    if failure and not _of_script(j, failure):
        how = (
            f"signal {failure['signal']}"
            if failure.get("signal")
            else (f"exit code {failure.get('code', 0)}")
        )
        parts.append(f"first failure: task {failure['task']} on {failure['node']}: {how}")
    return "; ".join(parts)


def _files(j: JobView) -> list[str]:
    lines = [f"Command={_null(j.text('command'))}", f"WorkDir={j.text('work_dir')}"]
    if j.get("comment"):
        lines.append(f"Comment={j.text('comment')} ")
    if _why(j):
        lines.append(f"SystemComment={_why(j)}")
    if j.get("batch", True):
        lines += [f"StdErr={j.std_err()}", f"StdIn={j.std_in()}", f"StdOut={j.std_out()}"]
    lines.append("Power=")
    if j.res.get("gres"):
        lines.append(f"TresPerNode={j.gres()}")
    return lines


def job_block(j: JobView, *, details: bool, oneliner: bool) -> str:
    """``scontrol show job``: one record."""
    res = j.res
    lines = [
        _first_line(j),
        (
            f"UserId={j.get('user')}({j.get('uid', 0)}) "
            f"GroupId={j.get('group')}({j.get('gid', 0)}) MCS_label=N/A"
        ),
        (
            f"Priority={j.get('priority', 0)} Nice={j.get('nice', 0)} "
            f"Account={_null(j.get('account'))} QOS={j.get('qos', 'normal')}"
        ),
        f"JobState={j.state} Reason={j.reason()} Dependency={_null(j.get('dependency'))}",
        (
            f"Requeue={int(j.get('requeue', True))} Restarts={j.get('restarts', 0)} "
            f"BatchFlag={int(j.get('batch', True))} Reboot=0 "
            f"ExitCode={j.get('code', 0)}:{j.get('signal_code', 0)}"
        ),
    ]
    if details:
        lines.append(f"DerivedExitCode={j.get('derived_code', 0)}:{j.get('derived_signal', 0)}")
    lines += [
        *_times(j),
        (
            f"Partition={j.partition()} AllocNode:Sid={j.get('submit_host', '')}:"
            f"{j.get('alloc_sid', 0)}"
        ),
        f"ReqNodeList={_hosts(res.get('nodelist'))} ExcNodeList={_hosts(res.get('exclude'))}",
        f"NodeList={j.nodes()}",
    ]
    if j.batch_host(""):
        lines.append(f"BatchHost={j.batch_host()}")
    lines += [*_resources(j, details), *_files(j), ""]
    return block(lines, oneliner=oneliner) + ("\n" if oneliner else "\n\n")


def step_block(j: JobView, step: dict[str, Any], *, oneliner: bool) -> str:
    """``scontrol show step``: one record."""
    nodes = (step.get("layout") or {}).get("nodes") or []
    batch = step["step_id"] == "batch"
    tres = {"cpu": step.get("cpus", 1)}
    if step.get("mem_mib"):
        tres["mem"] = step["mem_mib"]
    tres["node"] = len(nodes)
    lines = [
        (
            f"StepId={j.shown_id()}.{step['step_id']} UserId={j.get('uid', 0)} "
            f"StartTime={stamp(step.get('start_s'), 'Unknown')} "
            f"TimeLimit={format_limit(step.get('time_limit_s'), padded=True)}"
        ),
        f"State={step.get('state', 'RUNNING')} Partition={j.partition()} NodeList={fold(nodes)}",
        (
            f"Nodes={len(nodes)} CPUs={0 if batch else step.get('cpus', 1)} "
            f"Tasks={step.get('ntasks', 1)} Name={step.get('name', '')} Network=(null)"
        ),
        f"TRES={'(null)' if batch else tres_text(tres)}",
        "ResvPorts=(null)",
        "CPUFreqReq=Default",
        "SrunHost:Pid=(null):0",
    ]
    return block(lines, oneliner=oneliner) + ("\n" if oneliner else "\n\n")


def node_block(node: dict[str, Any], *, oneliner: bool) -> str:
    """``scontrol show node``: one record."""
    cpus = node.get("cpus", 1)
    gres = gres_total(node)
    configured = {"cpu": cpus, "mem": node.get("mem_mib", 1024), "billing": cpus}
    configured |= {f"gres/{name}": n for name, n in gres.items()}
    used = {"cpu": node.get("alloc_cpus", 0), "mem": node.get("alloc_mem_mib", 0)}
    used |= {f"gres/{name}": n for name, n in gres_used(node).items()}
    system = node.get("os", "")
    lines = [
        f"NodeName={node['name']} Arch={node.get('arch', '')} CoresPerSocket=1 ",
        (
            f"CPUAlloc={node.get('alloc_cpus', 0)} CPUEfctv={cpus} CPUTot={cpus} "
            f"CPULoad={node.get('cpu_load', 0.0):.2f}"
        ),
        f"AvailableFeatures={features(node)}",
        f"ActiveFeatures={features(node)}",
        f"Gres={gres_text(gres)}",
        (
            f"NodeAddr={node.get('addr') or node['name']} NodeHostName={node['name']} "
            f"Version={node.get('version', '')}"
        ),
        f"OS={system}  ",
        (
            f"RealMemory={node.get('mem_mib', 1024)} AllocMem={node.get('alloc_mem_mib', 0)} "
            f"FreeMem={node.get('free_mem_mib', 0)} Sockets={cpus} Boards=1"
        ),
        (
            f"State={state_text(node)} ThreadsPerCore=1 TmpDisk=0 Weight={node.get('weight', 1)} "
            "Owner=N/A MCS_label=N/A"
        ),
        f"Partitions={','.join(node.get('partitions') or [])} ",
        (
            f"BootTime={stamp(node.get('boot_s'), 'None')} "
            f"SlurmdStartTime={stamp(node.get('agent_start_s'), 'None')}"
        ),
        f"LastBusyTime={stamp(node.get('last_busy_s'), 'None')}",
        f"CfgTRES={tres_text(configured)}",
        f"AllocTRES={tres_text({k: v for k, v in used.items() if v})}",
        "CapWatts=n/a",
        "CurrentWatts=0 AveWatts=0",
        "ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s",
    ]
    if node.get("reason"):
        from clusterctl.slurm.output import user_name

        who = user_name(node.get("reason_uid", 0))
        lines.append(f"Reason={node['reason']} [{who}@{stamp(node.get('reason_s'), 'Unknown')}]")
    return block(lines, oneliner=oneliner) + ("\n" if oneliner else "\n\n")


def state_text(node: dict[str, Any]) -> str:
    """``IDLE+DRAIN``, ``DOWN*``: the base state, ``*`` while it does not respond, the flags."""
    base, *flags = node.get("flags") or ["UNKNOWN"]
    star = "*" if "NOT_RESPONDING" in flags else ""
    return "+".join([base + star, *(flag for flag in flags if flag != "NOT_RESPONDING")])


def partition_block(
    partition: dict[str, Any], nodes: dict[str, dict[str, Any]], *, oneliner: bool
) -> str:
    """``scontrol show partition``: one record; ``nodes`` are all nodes by name."""
    names = partition.get("nodes") or []
    members = [nodes[n] for n in names if n in nodes]
    cpus = sum(n.get("cpus", 1) for n in members)
    tres = {
        "cpu": cpus,
        "mem": sum(n.get("mem_mib", 1024) for n in members),
        "node": len(members),
        "billing": cpus,
    }
    for node in members:
        for name, count in gres_total(node).items():
            tres[f"gres/{name}"] = tres.get(f"gres/{name}", 0) + count
    most = partition.get("max_nodes")
    default_s = partition.get("default_time_s")
    priority = partition.get("priority", 1)
    lines = [
        f"PartitionName={partition['name']}",
        "AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL",
        f"AllocNodes=ALL Default={'YES' if partition.get('default') else 'NO'} QoS=N/A",
        (
            f"DefaultTime={'NONE' if default_s is None else format_limit(default_s, padded=True)} "
            "DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO"
        ),
        (
            f"MaxNodes={'UNLIMITED' if most is None else most} "
            f"MaxTime={format_limit(partition.get('max_time_s'), padded=True)} MinNodes=0 LLN=NO "
            "MaxCPUsPerNode=UNLIMITED"
        ),
        f"Nodes={fold(names)}",
        (
            f"PriorityJobFactor={priority} PriorityTier={priority} RootOnly=NO ReqResv=NO "
            "OverSubscribe=NO"
        ),
        "OverTimeLimit=NONE PreemptMode=OFF",
        (
            f"State={partition.get('state', 'UP')} TotalCPUs={cpus} TotalNodes={len(members)} "
            "SelectTypeParameters=NONE"
        ),
        "JobDefaults=(null)",
        "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED",
        f"TRES={tres_text(tres)}",
    ]
    return block(lines, oneliner=oneliner) + ("\n" if oneliner else "\n\n")
