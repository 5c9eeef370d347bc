"""cgroup v2 on a made-up tree of files, and the real one where it may be written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nodeagent import cgroup


def make_tree(tmp: Path, controllers: str = "cpu memory", group: str = "/svc") -> tuple[str, Path]:
    """A /proc/self and the hierarchy it points to."""
    root = tmp / "fs"
    own = root / group.lstrip("/")
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text(controllers + "\n")
    (own / "cgroup.subtree_control").write_text("")
    (own / "cgroup.procs").write_text("")
    proc = tmp / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(f"4:memory:/old\n0::{group}\n")
    (proc / "mountinfo").write_text(f"30 24 0:26 / {root} rw,nosuid - cgroup2 cgroup2 rw\n")
    return str(proc), own


def test_own_cgroup_is_found_through_the_mount(tmp_path: Path) -> None:
    proc, own = make_tree(tmp_path)

    assert cgroup.own_cgroup(proc) == str(own)


def test_no_v2_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("4:memory:/old\n")
    (tmp_path / "mountinfo").write_text("")

    assert cgroup.own_cgroup(str(tmp_path)) is None
    assert cgroup.delegated(None) is None


def test_without_the_memory_controller_nothing_is_changed(tmp_path: Path) -> None:
    _, own = make_tree(tmp_path, controllers="cpu")

    assert cgroup.delegated(str(own)) is None
    assert not (own / "agent").exists()


def test_the_agent_moves_aside_and_turns_the_controller_on(tmp_path: Path) -> None:
    _, own = make_tree(tmp_path)
    (own / "agent").mkdir()
    (own / "agent" / "cgroup.procs").write_text("")

    assert cgroup.delegated(str(own)) == str(own)
    assert (own / "agent" / "cgroup.procs").read_text() == "0"
    assert (own / "cgroup.subtree_control").read_text() == "+memory"


def test_a_step_gets_its_limit_and_the_kernels_verdict_is_read(tmp_path: Path) -> None:
    proc, own = make_tree(tmp_path)
    (own / "cgroup.subtree_control").write_text("memory\n")
    step = own / "step_7.0.1"
    step.mkdir()
    for name in ("memory.max", "memory.oom.group", "memory.swap.max", "cgroup.kill"):
        (step / name).write_text("")
    (step / "memory.events").write_text("low 0\noom 1\noom_kill 0\n")

    group = cgroup.step_group("step_7.0.1", 100, proc)

    assert group is not None
    assert (step / "memory.max").read_text() == str(100 * 1024 * 1024)
    assert (step / "memory.oom.group").read_text() == "1"
    assert not group.oom_killed()
    (step / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    assert group.oom_killed()
    (step / "memory.peak").write_text(str(5 * 1024 * 1024))
    assert group.peak_mib() == 5
    group.kill()
    assert (step / "cgroup.kill").read_text() == "1"


def test_a_refused_limit_means_sampling(tmp_path: Path) -> None:
    proc, own = make_tree(tmp_path)
    (own / "cgroup.subtree_control").write_text("memory\n")

    assert cgroup.step_group("step_7.0.1", 100, proc) is None  # no memory.max in a plain folder
    assert not (own / "step_7.0.1").exists()


def test_everything_in_a_real_cgroup_is_killed(tmp_path: Path) -> None:
    own = cgroup.own_cgroup()
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no cgroup v2 that may be written here")
    group = cgroup.StepGroup.__new__(cgroup.StepGroup)
    group.path = os.path.join(own, f"clusterctl-test-{os.getpid()}")
    os.mkdir(group.path)
    try:
        if not os.path.exists(os.path.join(group.path, "cgroup.kill")):
            pytest.skip("a kernel before 5.14")
        enter = f"echo 0 > {group.procs}; setsid sleep 100 & exec sleep 100"
        child = subprocess.Popen(["sh", "-c", enter])
        while len(Path(group.procs).read_text().split()) < 2:
            assert child.poll() is None
        group.kill()
        assert child.wait(10) == -9
        while Path(group.procs).read_text():
            pass
    finally:
        group.remove()
    assert not os.path.exists(group.path)
