"""Full disks, I/O errors, bugs in the core: nothing wrong leaves, nothing accepted is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler.api import wire
from scheduler.api.records import Job, Resources, Step
from scheduler.core import effects as fx
from scheduler.core import events, machine
from scheduler.core.state import State
from scheduler.parts import Pass
from scheduler.store import FILE_NAME
from tests.shell.faulty import FaultyConnection
from tests.shell.rig import Rig, make_nodes, submission

pytestmark = pytest.mark.asyncio


def rows_of(rig: Rig) -> dict[int, bytes]:
    conn = rig.controller.store._conn
    return dict(conn.execute("SELECT id, data FROM jobs WHERE active = 1"))


def memory_of(rig: Rig) -> dict[int, bytes]:
    return {i: msgspec.json.encode(j) for i, j in rig.controller.state.jobs.items()}


async def test_a_commit_that_fails_at_any_statement(tmp_path: Path) -> None:
    faults: list[FaultyConnection] = []

    def wrap(conn: Any) -> FaultyConnection:
        faults.append(FaultyConnection(conn))
        return faults[-1]

    async with Rig(tmp_path, wrap=wrap) as rig:
        accepted = []
        for k in range(1, 9):
            faults[-1].arm(k)
            reply = await rig.ask(submission(key=f"a{k}"))
            if isinstance(reply, wire.Submitted):
                # The turn was over before the k-th statement: one of the job's later turns fails.
                accepted.append(reply.job_id)
            else:
                assert reply.code == "unavailable"
                assert "disk I/O error" in reply.message
            reply = await rig.ask(submission(key=f"a{k}"))
            while isinstance(reply, wire.Error):
                assert reply.code == "unavailable"
                reply = await rig.ask(submission(key=f"a{k}"))
            if reply.job_id not in accepted:
                accepted.append(reply.job_id)
            extra = 0
            while faults[-1].failed < k:  # few statements so far: more turns bring more
                extra += 1
                reply = await rig.ask(submission(key=f"a{k}-{extra}"))
                if isinstance(reply, wire.Submitted):
                    accepted.append(reply.job_id)
        await rig.nodes_up()
        for job_id in accepted:
            assert (await rig.ended(job_id))["state"] == "COMPLETED"
        assert faults[-1].failed == 8
        starts = rig.agents["n001"].starts
        assert sorted(set(starts)) == sorted(starts) == [(i, "batch", 1) for i in accepted]
        assert rows_of(rig) == memory_of(rig)


async def test_a_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        running = await rig.submit()
        agent = rig.agents["n001"]
        await agent.until(lambda: len(agent.starts) == 1)
        conn = rig.controller.store._conn
        pages = conn.execute("PRAGMA page_count").fetchone()[0]
        conn.execute(f"PRAGMA max_page_count = {pages}")
        big = "#!/bin/sh\n" + "#" * 200_000
        reply = await rig.ask(submission(big))
        assert reply.code == "unavailable"
        assert "No space left on device" in reply.message
        assert [j["id"] for j in (await rig.ask(wire.GetJobs())).jobs] == [running]
        assert rows_of(rig) == memory_of(rig)
        conn.execute("PRAGMA max_page_count = 100000")
        await rig.nodes_up()
        agent.end((running, "batch", 1))
        assert (await rig.ended(running))["state"] == "COMPLETED"
        assert isinstance(await rig.ask(submission(big)), wire.Submitted)
        assert len(agent.starts) <= 2


async def test_while_the_disk_is_full_reads_are_answered_and_writes_refused(
    tmp_path: Path,
) -> None:
    async with Rig(tmp_path) as rig:
        conn = rig.controller.store._conn
        conn.execute("PRAGMA query_only = ON")
        for _ in range(3):
            reply = await rig.ask(submission())
            assert reply.code == "unavailable"
            assert isinstance(await rig.ask(wire.GetNodes()), wire.Nodes)
        status = await rig.ask(wire.GetStatus())
        assert status.values["controller"]["trouble"]
        conn.execute("PRAGMA query_only = OFF")
        await rig.nodes_up()
        job_id = await rig.submit()
        assert (await rig.ended(job_id))["state"] == "COMPLETED"


class BuggyCore:
    """The real core, but some requests make it raise."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def handle(self, state: State, event: events.AnyEvent) -> list[fx.AnyEffect]:
        if isinstance(event, events.JobSubmitted) and event.spec.name == "bug":
            state.new_job_id()
            raise self.error("a bug")
        return machine.handle(state, event)

    def schedule(self, state: State, now_s: float, budget: int) -> Iterator[fx.AnyEffect]:
        return machine.schedule(state, now_s, budget)

    def wake(self, state: State) -> list[fx.AnyEffect]:
        return machine.wake(state)


async def test_a_request_the_core_cannot_take_is_refused_and_undone(tmp_path: Path) -> None:
    async with Rig(tmp_path, core=BuggyCore(KeyError)) as rig:
        client = await rig.client()
        other = await rig.client()
        client.send(submission(name="bug"))
        other.send(submission(name="good"))
        refused = await client.receive()
        assert (refused.code, "Internal error" in refused.message) == ("error", True)
        assert (await other.receive()).job_id == 1
        await rig.nodes_up()
        assert (await rig.ended(1))["state"] == "COMPLETED"


async def test_a_broken_invariant_stops_the_controller(tmp_path: Path) -> None:
    async with Rig(tmp_path, core=BuggyCore(AssertionError)) as rig:
        kept = await rig.submit(hold=True)
        client = await rig.client()
        client.send(submission(name="bug"))
        async with asyncio.timeout(10):
            why = await asyncio.shield(rig.controller.stopped)
        assert "AssertionError: a bug" in why
        await rig.stop()
        rig.core = machine
        await rig.start()
        assert list(rig.controller.state.jobs) == [kept]
        assert await rig.submit(hold=True) == kept + 1


async def test_the_journal_replays_to_the_tables(tmp_path: Path) -> None:
    async with Rig(tmp_path, nodes=2, auto=False) as rig:
        ids = [await rig.submit(resources=Resources(ntasks=n + 1)) for n in range(6)]
        array = await rig.submit(array="0-3%2")
        held = await rig.submit(hold=True)
        agents = list(rig.agents.values())
        await agents[0].until(lambda: len(agents[0].starts) >= 3)
        await rig.ask(wire.Control(op="release", ids=[str(held)]))
        await rig.ask(wire.Cancel(ids=[str(ids[1])]))
        async with asyncio.timeout(20):
            while any(
                j.state in ("PENDING", "RUNNING") for j in rig.controller.state.jobs.values()
            ):
                for agent in agents:
                    for key in list(agent.running):
                        agent.end(key, code=key[0] % 3)
                await asyncio.sleep(0.005)
        await rig.ended(array)
        store = rig.controller.store
        decoder = msgspec.json.Decoder(events.AnyEvent | Pass)
        journal = [decoder.decode(line) for line in store.journal()]
        settings, partitions = rig.setup.settings(), rig.setup.partitions()
        state = State(settings, make_nodes(2), partitions)
        jobs: dict[int, Job] = {}
        steps: dict[tuple[int, str, int], Step] = {}
        for event in journal:
            if isinstance(event, Pass):
                list(machine.schedule(state, event.now_s, event.budget))
            else:
                machine.handle(state, event)
            dirty = state.take_dirty()
            jobs |= {j.id: j for j in dirty.jobs}
            steps |= {(s.job_id, s.step_id, s.attempt): s for s in dirty.steps}
        conn = store._conn
        assert len(jobs) == 11
        assert {i: msgspec.json.encode(j) for i, j in jobs.items()} == dict(
            conn.execute("SELECT id, data FROM jobs")
        )
        assert {k: msgspec.json.encode(s) for k, s in steps.items()} == {
            (a, b, c): data
            for a, b, c, data in conn.execute("SELECT job_id, step_id, attempt, data FROM steps")
        }
        assert (tmp_path / FILE_NAME).exists()
