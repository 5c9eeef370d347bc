"""The small parts of the core: arrays, layouts, the pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.api.errors import Rejected
from scheduler.api.records import Device, Node, NodeAlloc
from scheduler.core.arrays import parse
from scheduler.core.deps import parse as parse_deps
from scheduler.core.layout import block_counts, place_tasks
from scheduler.core.pool import NodeFree, Pool, bits, mask_of


@pytest.mark.parametrize(
    ("text", "ids", "throttle"),
    [
        ("0-3", [0, 1, 2, 3], 0),
        ("1-7:3%2", [1, 4, 7], 2),
        ("5,1,5,0-1", [0, 1, 5], 0),
        ("3%0", [3], 0),
        ("[0-1]", [0, 1], 0),
    ],
)
def test_array_text(text: str, ids: list[int], throttle: int) -> None:
    assert parse(text, 1001) == (ids, throttle)


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "1-", "-1", "1-5:0", "0-1001", "1,,2", "1%x", "1:2", "9" * 30]
)
def test_bad_array_text(text: str) -> None:
    with pytest.raises(Rejected, match="Invalid job array specification"):
        parse(text, 1001)


@pytest.mark.parametrize(
    ("text", "deps", "any_of"),
    [
        (
            "afterok:1:2,afterany:3_4",
            [("afterok", "1"), ("afterok", "2"), ("afterany", "3_4")],
            False,
        ),
        ("7", [("afterany", "7")], False),
        ("afterok:1?afternotok:2", [("afterok", "1"), ("afternotok", "2")], True),
        ("singleton", [("singleton", "")], False),
    ],
)
def test_dependency_text(text: str, deps: list[tuple[str, str]], any_of: bool) -> None:
    assert parse_deps(text) == (deps, any_of)


@pytest.mark.parametrize(
    "text", ["afterok", "afterok:x", "foo:1", "afterok:1,b?3", ":", "aftercorr:1"]
)
def test_bad_dependency_text(text: str) -> None:
    with pytest.raises(Rejected, match="Job dependency problem"):
        parse_deps(text)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 100))
def test_block_counts_use_all_tasks_within_capacity(capacity: list[int], ntasks: int) -> None:
    counts = block_counts(ntasks, capacity)
    if counts is None:
        assert ntasks < len(capacity) or sum(capacity) < ntasks
        return
    assert sum(counts) == ntasks
    assert all(1 <= c <= room for c, room in zip(counts, capacity, strict=True))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["block", "cyclic"]))
def test_every_rank_is_placed_once(counts: list[int], distribution: str) -> None:
    layout = place_tasks([f"n{i}" for i in range(len(counts))], counts, distribution)

    assert [len(t) for t in layout.tasks] == counts
    assert sorted(r for t in layout.tasks for r in t) == list(range(sum(counts)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=30))
def test_cores_are_given_to_one_holder_at_a_time(wishes: list[tuple[int, int, bool]]) -> None:
    node = Node(name="n", cpus=64, devices=[Device(index=i, cores=2) for i in range(6)])
    pool = Pool({"n": NodeFree(node)})
    held: list[NodeAlloc] = []
    for devices, cores, release in wishes:
        if release and held:
            pool.give(held.pop(0), False)
            continue
        picked = pool.nodes["n"].pick_cores(devices, cores)
        if picked is None:
            free = pool.nodes["n"].cores.bit_count()
            assert devices * 2 + cores > free or devices > len(pool.nodes["n"].free_devices())
            continue
        assert len(picked[1]) == 2 * devices + cores
        alloc = NodeAlloc(node="n", cpus=0, devices=picked[0], cores=picked[1])
        pool.take(alloc, False)
        held.append(alloc)
    used = [c for a in held for c in a.cores]
    assert len(used) == len(set(used))
    assert pool.nodes["n"].cores.bit_count() == 12 - len(used)


@given(st.sets(st.integers(0, 200)))
def test_bits_and_mask_are_inverse(ids: set[int]) -> None:
    assert bits(mask_of(sorted(ids))) == sorted(ids)
