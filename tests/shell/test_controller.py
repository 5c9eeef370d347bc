"""The loop end to end: socket, core, store and made-up agents in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scheduler.api import wire
from scheduler.api.records import Resources
from tests.shell.rig import Rig, submission

pytestmark = pytest.mark.asyncio


async def test_a_job_runs_and_its_row_says_so(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        job_id = await rig.submit(name="hello")
        view = await rig.ended(job_id)
        assert (view["state"], view["node_list"], view["num_nodes"]) == ("COMPLETED", "n001", 1)
        reply = await rig.ask(wire.GetAccounting(ids=[str(job_id)]))
        assert [j["state"] for j in reply.jobs] == ["COMPLETED"]
        assert [s["step_id"] for s in reply.jobs[0]["steps"]] == ["batch"]
        launch = next(m for m in rig.agents["n001"].received if type(m).__name__ == "Launch")
        assert launch.payload.script == "#!/bin/sh\ntrue\n"


async def test_a_restart_keeps_ids_and_running_jobs(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        running = await rig.submit()
        agent = rig.agents["n001"]
        await agent.until(lambda: len(agent.starts) == 1)
        waiting = await rig.submit(hold=True)
        epoch = rig.controller.epoch
        await rig.stop()
        await rig.start()
        assert rig.controller.epoch == epoch + 1
        reply = await rig.ask(wire.GetJobs())
        states = {j["id"]: j.get("state", "PENDING") for j in reply.jobs}
        assert states == {running: "RUNNING", waiting: "PENDING"}
        agent.end((running, "batch", 1), code=3)
        view = await rig.ended(running)
        assert (view["state"], view["code"]) == ("FAILED", 3)
        assert agent.starts == [(running, "batch", 1)]
        assert await rig.submit(hold=True) == waiting + 1


async def test_what_ended_while_the_controller_was_away_is_learnt(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        job_id = await rig.submit()
        agent = rig.agents["n001"]
        await agent.until(lambda: len(agent.starts) == 1)
        await rig.stop()
        agent.end((job_id, "batch", 1))
        await rig.start()
        assert (await rig.ended(job_id))["state"] == "COMPLETED"


async def test_a_repeated_submission_gets_the_same_id(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        first = await rig.ask(submission(key="k1", hold=True))
        again = await rig.ask(submission(key="k1", hold=True))
        assert first.job_id == again.job_id
        await rig.stop()
        await rig.start()
        assert (await rig.ask(submission(key="k1", hold=True))).job_id == first.job_id


async def test_one_connection_many_requests_in_order(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        client = await rig.client()
        for _ in range(20):
            client.send(submission(hold=True))
            client.send(wire.Ping())
        replies = [await client.receive() for _ in range(40)]
        ids = [r.job_id for r in replies[::2]]
        assert ids == list(range(ids[0], ids[0] + 20))
        assert all(isinstance(r, wire.Pong) for r in replies[1::2])


async def test_waiting_for_an_array_waits_for_all_tasks(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        job_id = await rig.submit(array="0-2")
        agent = rig.agents["n001"]
        waiter = asyncio.create_task(rig.ask(wire.WaitJob(job_id=job_id)))
        await agent.until(lambda: len(agent.starts) == 3)
        for number, key in enumerate(list(agent.starts)):
            assert not waiter.done()
            agent.end(key, code=number)
        reply = await waiter
        assert sorted(j.get("code", 0) for j in reply.jobs) == [0, 1, 2]


async def test_the_payload_of_an_array_is_kept_once_and_dropped_at_last(tmp_path: Path) -> None:
    async with Rig(tmp_path, min_job_age_s=0.05) as rig:
        job_id = await rig.submit(array="0-4")
        await rig.ended(job_id)
        conn = rig.controller.store._conn
        async with asyncio.timeout(10):
            while conn.execute("SELECT count(*) FROM payloads").fetchone()[0]:
                await asyncio.sleep(0.01)
        assert rig.controller.state.jobs == {}
        reply = await rig.ask(wire.GetAccounting(ids=[str(job_id)]))
        assert [j["array_task_id"] for j in sorted(reply.jobs, key=lambda j: j["array_task_id"])]
        assert len(reply.jobs) == 5
        gone = await rig.ask(wire.WaitJob(job_id=job_id))
        assert len(gone.jobs) == 5


async def test_impossible_requests_are_refused_with_the_reason(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        reply = await rig.ask(submission(resources=Resources(min_nodes=9, nodes_given=True)))
        assert (reply.code, "9" in reply.warning) == ("infeasible", True)
        reply = await rig.ask(wire.WaitJob(job_id=999))
        assert (reply.code, reply.message) == ("not_found", "Invalid job id specified")
        reply = await rig.ask(wire.Submit(spec=submission().spec, payload=submission("").payload))
        assert reply.message == "Batch script is empty!"


async def test_dependency_on_a_job_that_left_memory(tmp_path: Path) -> None:
    async with Rig(tmp_path, min_job_age_s=0.05) as rig:
        good = await rig.submit()
        async with asyncio.timeout(10):
            while good not in rig.controller.state.jobs or rig.controller.state.jobs:
                await asyncio.sleep(0.01)
                if good not in rig.controller.state.jobs:
                    break
        after = await rig.submit(dependency=f"afterok:{good}")
        assert (await rig.ended(after))["state"] == "COMPLETED"
        never = await rig.submit(dependency=f"afternotok:{good}")
        reply = await rig.ask(wire.GetJobs(ids=[str(never)], states=["all"]))
        assert reply.jobs[0]["reason"] == "DependencyNeverSatisfied"


async def test_timers_fire(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False, kill_wait_s=0.05) as rig:
        job_id = await rig.submit(time_limit_s=0)
        view = await rig.ended(job_id)
        assert view["state"] == "TIMEOUT"


async def test_status_config_nodes(tmp_path: Path) -> None:
    async with Rig(tmp_path, nodes=2, auto=False) as rig:
        await rig.submit(resources=Resources(ntasks=3, gres={"neuron": 4}))
        agent = rig.agents["n001"]
        await agent.until(lambda: len(agent.starts) == 1)
        nodes = (await rig.ask(wire.GetNodes())).nodes
        first = nodes[0]
        assert (first["alloc_cpus"], first["alloc_devices"]) == (3, [0, 1, 2, 3])
        assert first["alloc_cores"] == list(range(8))
        assert (first["flags"], first["partitions"]) == (["MIXED"], ["main", "debug"])
        assert nodes[1]["flags"] == ["IDLE"]
        values = (await rig.ask(wire.GetConfig())).values
        assert values["ClusterName"] == "peer"
        assert values["MinJobAge"] == "300 sec"
        status = (await rig.ask(wire.GetStatus())).values
        assert status["jobs"] == {"RUNNING": 1}
        assert [n["agent_pid"] for n in status["nodes"]] == [4242, 4242]
        assert status["controller"]["rss_mib"] > 1
