"""scontrol: records as Slurm prints them, and what is asked of the controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.api import wire
from tests.cli import views
from tests.cli.conftest import Runner
from tests.cli.fake_controller import FakeController

RUNNING = f"""\
JobId=700001 JobName=run1
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=10140 Nice=0 Account=root QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:01:40 TimeLimit=00:10:00 TimeMin=N/A
   SubmitTime={views.STAMP} EligibleTime={views.STAMP}
   AccrueTime={views.STAMP}
   StartTime={views.STAMP} EndTime=2027-01-15T08:10:00 Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval={views.STAMP} Scheduler=Main
   Partition=main AllocNode:Sid=vm:77
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n001
   BatchHost=n001
   NumNodes=1 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=2,node=1,billing=2,gres/neuron=4
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)
   Command=/w/job.sh
   WorkDir=/w
   Comment=hello\x20
   StdErr=/dev/null
   StdIn=/dev/null
   StdOut=/dev/null
   Power=
   TresPerNode=gres:neuron:4
   \n
"""

NODE = """\
NodeName=n001 Arch=x86_64 CoresPerSocket=1\x20
   CPUAlloc=4 CPUEfctv=16 CPUTot=16 CPULoad=0.50
   AvailableFeatures=(null)
   ActiveFeatures=(null)
   Gres=neuron:16
   NodeAddr=127.0.0.1 NodeHostName=n001 Version=1
   OS=Linux\x20\x20
   RealMemory=65536 AllocMem=0 FreeMem=7 Sockets=16 Boards=1
   State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=main,debug\x20
   BootTime=None SlurmdStartTime=None
   LastBusyTime=None
   CfgTRES=cpu=16,mem=64G,billing=16,gres/neuron=16
   AllocTRES=cpu=4,gres/neuron=4
   CapWatts=n/a
   CurrentWatts=0 AveWatts=0
   ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s

"""

PARTITION = """\
PartitionName=main
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=n[001-004]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=OFF
   State=UP TotalCPUs=64 TotalNodes=4 SelectTypeParameters=NONE
   JobDefaults=(null)
   DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
   TRES=cpu=64,mem=256G,node=4,billing=64,gres/neuron=64

"""


@pytest.fixture
def fake(controller: FakeController) -> FakeController:
    def jobs(request: wire.GetJobs) -> wire.Jobs:
        running = views.queue()[0] | {
            "eligible_s": views.START_S,
            "submit_host": "vm",
            "alloc_sid": 77,
        }
        found = [running] if request.ids in ([], ["700001"]) else []
        return wire.Jobs(jobs=found, now_s=views.NOW_S, missing=[] if found else request.ids)

    nodes = views.nodes()
    nodes[0] |= {"arch": "x86_64", "os": "Linux", "version": "1", "cpu_load": 0.5}
    nodes[0] |= {"free_mem_mib": 7}
    controller.answers |= {
        wire.GetJobs: jobs,
        wire.GetNodes: wire.Nodes(nodes=nodes, partitions=views.partitions(), now_s=views.NOW_S),
        wire.GetConfig: wire.Config(values={"ClusterName": "peer"}, now_s=views.NOW_S),
        wire.Control: lambda r: wire.Results(results=[wire.Result(id=i) for i in r.ids]),
        wire.UpdateJob: lambda r: wire.Results(results=[wire.Result(id=r.id)]),
        wire.UpdateNode: wire.Ok(),
        wire.UpdatePartition: wire.Ok(),
    }
    return controller


def test_records(run: Runner, fake: FakeController) -> None:
    assert run("scontrol", "show", "job", "700001") == (0, RUNNING, "")
    assert run("scontrol", "show", "node", "n001") == (0, NODE, "")
    assert run("scontrol", "show", "partition", "main") == (0, PARTITION, "")


@pytest.mark.parametrize(
    "argv",
    [["show", "job=700001"], ["show", "jobid", "700001"], ["sho", "job", "700001"]],
)
def test_other_spellings(run: Runner, fake: FakeController, argv: list[str]) -> None:
    assert run("scontrol", *argv).out == RUNNING


def test_one_line(run: Runner, fake: FakeController) -> None:
    one = run("scontrol", "-o", "show", "job", "700001").out
    assert one.count("\n") == 1
    assert one.startswith("JobId=700001 JobName=run1 UserId=root(0) ")
    assert one.endswith(" Power= TresPerNode=gres:neuron:4 \n")


def test_why_a_job_failed(run: Runner, fake: FakeController) -> None:
    job = views.job(
        5,
        "bad",
        "FAILED",
        reason="JobLaunchFailure",
        signal_code=53,
        detail="cannot open /x/out: No such file or directory",
        first_failure={"task": 3, "node": "n002", "code": 1},
    )
    fake.answers[wire.GetJobs] = wire.Jobs(jobs=[job], now_s=views.NOW_S)
    text = run("scontrol", "show", "job", "5").out
    assert "JobState=FAILED Reason=JobLaunchFailure" in text
    assert "ExitCode=0:53" in text
    assert (
        "SystemComment=cannot open /x/out: No such file or directory; "
        "first failure: task 3 on n002: exit code 1" in text
    )


def test_drained_node_says_why(run: Runner, fake: FakeController) -> None:
    text = run("scontrol", "show", "node", "n004").out
    assert "State=IDLE+DRAIN " in text
    assert f"\n   Reason=bad fan [root@{views.STAMP}]\n" in text


@pytest.mark.parametrize(
    ("argv", "status", "out", "err"),
    [
        (["show", "job", "1"], 1, "", "slurm_load_jobs error: Invalid job id specified\n"),
        (["show", "job", "abc"], 1, "", "scontrol_print_job error: Invalid job id specified\n"),
        (["show", "node", "nosuch"], 1, "Node nosuch not found\n", ""),
        (["show", "partition", "x"], 1, "Partition x not found\n", ""),
        (["show"], 1, "", "too few arguments for keyword:show\n"),
        (["show", "bogus"], 1, "", "invalid entity:bogus for keyword:show \n"),
        (["frobnicate"], 1, "", "invalid keyword: frobnicate\n"),
        (["show", "reservation"], 0, "No reservations in the system\n", ""),
        (["show", "topology"], 0, "", "scontrol: error: No topology information available\n"),
        (["ping"], 0, "Slurmctld(primary) at vm is UP\n", ""),
        (["version"], 0, "slurm-wlm 22.05.8\n", ""),
        (["update"], 1, "", "too few arguments for update keyword\n"),
        (
            ["update", "jobid=3", "bogus=1"],
            1,
            "",
            "Update of this parameter is not supported: bogus=1\nRequest aborted\n",
        ),
        (
            ["update", "nodename=n003", "state=drain"],
            1,
            "",
            "You must specify a reason when DOWNING or DRAINING a node. Request denied\n",
        ),
        (
            ["show", "config"],
            0,
            f"Configuration data as of 2027-01-15T08:01:40\nClusterName{' ' * 13}= peer\n",
            "",
        ),
        (
            ["reconfigure"],
            1,
            "",
            (
                "scontrol: error: reconfigure is not supported by clusterctl: "
                "`clusterctl down` and `clusterctl up` read the cluster file again\n"
            ),
        ),
    ],
)
def test_answers(
    run: Runner, fake: FakeController, argv: list[str], status: int, out: str, err: str
) -> None:
    assert run("scontrol", *argv) == (status, out, err)


@pytest.mark.parametrize(
    ("argv", "status", "out", "err"),
    [
        (["hostnames", "n[1-3]"], 0, "n1\nn2\nn3\n", ""),
        (["hostname", "n[1-2]"], 0, "n1\nn2\n", ""),
        (["hostnames"], 0, "", "scontrol: error: host list is empty\n"),
        (["hostnames", "n[1-3]x"], 0, "", "Invalid hostlist: n[1-3]x\n"),
        (["hostlist", "n3,n1,n2"], 0, "n[3,1-2]\n", ""),
        (["hostlist", ""], 0, "\n", ""),
        (["hostlistsorted", "n3,n1,n2"], 0, "n[1-3]\n", ""),
        (
            ["hostlist", "n[5-3]"],
            1,
            "",
            (
                "scontrol: error: _parse_single_range: Invalid range: `5-3'\n"
                "Invalid hostlist: n[5-3]\n"
            ),
        ),
    ],
)
def test_host_lists_need_no_controller(
    run: Runner, argv: list[str], status: int, out: str, err: str
) -> None:
    assert run("scontrol", "show", *argv) == (status, out, err)


def test_host_names_of_the_job(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert run("scontrol", "show", "hostnames").out == ""
    monkeypatch.setenv("SLURM_NODELIST", "n[1-2]")
    assert run("scontrol", "show", "hostnames").out == "n1\nn2\n"


def test_hold_and_the_like(run: Runner, fake: FakeController) -> None:
    assert run("scontrol", "hold", "3,4", "5") == (0, "", "")
    request = fake.of(wire.Control)[-1]
    assert (request.op, request.ids) == ("hold", ["3", "4", "5"])
    fake.answers[wire.Control] = wire.Results(
        results=[wire.Result(id="1", code="not_found", message="Invalid job id specified")]
    )
    assert run("scontrol", "release", "1") == (
        1,
        "",
        "Invalid job id specified for job 1\nslurm_suspend error: Invalid job id specified\n",
    )
    fake.answers[wire.Control] = wire.Results(
        results=[wire.Result(id="1", code="rejected", message="Job is pending execution")]
    )
    assert run("scontrol", "requeue", "1") == (1, "", "Job is pending execution for job 1\n")
    fake.answers[wire.Control] = wire.Results(
        results=[wire.Result(id="1", code="denied", message="Access/permission denied")]
    )
    assert run("scontrol", "hold", "1").err == (
        "Invalid user id for job 1\nslurm_suspend error: Invalid user id\n"
    )


def test_update_of_a_job(run: Runner, fake: FakeController) -> None:
    run(
        "scontrol",
        "update",
        "jobid=700001",
        "name=x",
        "timelimit=+10",
        "numnodes=2-3",
        "partition=a,b",
        "dependency=",
        "priority=5",
        "arraytaskthrottle=3",
    )
    request = fake.of(wire.UpdateJob)[-1]
    assert (request.id, request.name, request.time_limit_s) == ("700001", "x", 1200)
    assert (request.min_nodes, request.max_nodes) == (2, 3)
    assert (request.partitions, request.dependency) == (["a", "b"], "")
    assert (request.priority, request.array_throttle) == (5, 3)
    run("scontrol", "update", "jobid=700001", "timelimit=-1")
    assert fake.of(wire.UpdateJob)[-1].time_limit_s == -1


def test_update_of_a_node(run: Runner, fake: FakeController) -> None:
    assert run("scontrol", "update", "NodeName=n[1-2]", "State=drain", "Reason=a b").status == 0
    request = fake.of(wire.UpdateNode)[-1]
    assert (request.names, request.state, request.reason) == (["n1", "n2"], "DRAIN", "a b")
    fake.answers[wire.UpdateNode] = wire.Error(
        code="not_found", message="Invalid node name specified"
    )
    assert run("scontrol", "update", "nodename=x", "state=resume") == (
        1,
        "",
        "slurm_update error: Invalid node name specified\n",
    )


def test_update_of_a_partition(run: Runner, fake: FakeController) -> None:
    assert run("scontrol", "update", "PartitionName=main", "State=down").status == 0
    request = fake.of(wire.UpdatePartition)[-1]
    assert (request.name, request.state) == ("main", "DOWN")
    wrong = run("scontrol", "update", "partitionname=main", "state=sideways")
    assert (wrong.status, wrong.err.splitlines()[0]) == (1, "Invalid input: state=sideways")
    fake.answers[wire.UpdatePartition] = wire.Error(
        code="not_found", message="Invalid partition name specified"
    )
    assert run("scontrol", "update", "partitionname=x", "state=up").err == (
        "slurm_update error: Invalid partition name specified\n"
    )


def test_script_of_a_job(run: Runner, fake: FakeController) -> None:
    fake.answers[wire.GetScript] = wire.Script(script="#!/bin/sh\n")
    assert run("scontrol", "write", "batch_script", "3", "-").out == "#!/bin/sh\n"
    run("scontrol", "write", "batch_script", "3", "copy.sh")
    assert Path("copy.sh").read_text() == "#!/bin/sh\n"


def test_nobody_answers(run: Runner) -> None:
    ran = run("scontrol", "ping")
    assert ran.status == 1
    assert ran.out.endswith(" is DOWN\n")
    assert "clusterctl up" in ran.err
