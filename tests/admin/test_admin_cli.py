"""The clusterctl command where no cluster runs: messages, exit codes, what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl import main as entry
from scheduler import config
from scheduler.provision import dropins
from tests.admin.run import clusterctl, environment, good
from tests.admin.sshd import ROOT


def test_status_without_a_cluster(home: Path) -> None:
    done = clusterctl(home, "status")
    assert done.returncode == 1
    assert done.stderr == (
        f"clusterctl: error: no cluster runs in {home} (start it with: clusterctl up)\n"
    )


def test_down_without_a_cluster_succeeds_and_makes_nothing(home: Path) -> None:
    assert good(home, "down") == f"nothing runs in {home}\n"
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("frobnicate",), 2, "No such command 'frobnicate'"),
        (("up", "--nodes", "x"), 2, "--nodes"),
        (("up", "--nodes", "0"), 2, "--nodes"),
        (("up", "--instance-type", "trn1.33xlarge"), 1, "did you mean 'trn1.32xlarge'?"),
        (("up", "--nodes", "3999", "--spares", "2"), 1, "a cluster has 1 to 4000 nodes"),
        (("up", "--config", "/no/such/file"), 1, "/no/such/file"),
        (("logs", "1"), 1, "no cluster runs in"),
        (("logs", "x"), 1, "invalid job id 'x'"),
        (("env", "--shell", "tcsh"), 1, "unknown shell 'tcsh'"),
        (("config", "check"), 1, "no such cluster file"),
        (("--host", "h"), 2, "usage: clusterctl --host"),
        (("--host", "h", "up"), 1, "up does not work with --host"),
        (("--host", "@h", "squeue"), 1, "'@h' is not [USER@]HOST[:PORT]"),
    ],
)
def test_mistakes(home: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = clusterctl(home, *arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stdout == ""


def test_help_names_the_commands(home: Path) -> None:
    text = good(home, "--help")
    for name in ("up", "down", "status", "logs", "env", "config", "sbatch"):
        assert name in text


def test_home_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments in (("up",), ("status",), ("env",)):
        done = clusterctl(tmp_path / "file", *arguments)
        assert done.returncode == 1
        assert str(tmp_path / "file") in done.stderr


def test_config_check_names_every_mistake(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('[nodes.a]\ninstance_typ = "x"\n[cluster]\nnam = "y"\n')
    done = clusterctl(home, "config", "check", str(file))
    assert done.returncode == 1
    assert f"{file}:2: unknown key 'instance_typ'" in done.stderr
    assert f"{file}:4: unknown key 'nam'" in done.stderr
    refused = clusterctl(home, "up", "--config", str(file))
    assert refused.returncode == 1
    assert not (home / "cluster.toml").exists()


def test_env_line_works_in_a_shell_and_names_with_blanks(tmp_path: Path) -> None:
    home = tmp_path / "my 'home'"
    line = good(home, "env")
    script = line + 'printf "%s\\n" "$CLUSTERCTL_HOME"; command -v squeue'
    done = subprocess.run(
        ["bash", "-c", script],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str(home), str(home / "bin/squeue")]
    assert good(home, "env", "--shell", "fish").startswith("set -gx PATH ")


def test_home_is_found_the_same_way_by_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for values in (
        {"CLUSTERCTL_HOME": "relative"},
        {"CLUSTERCTL_HOME": "~/x"},
        {"CLUSTERCTL_HOME": "", "XDG_STATE_HOME": "/s"},
        {"CLUSTERCTL_HOME": "", "XDG_STATE_HOME": ""},
    ):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        assert entry._home() == str(config.home_dir())


def test_verbs_of_both_ends_agree() -> None:
    assert frozenset(dropins.VERBS) == entry.VERBS


def test_admin_code_is_not_imported_on_the_way_to_a_slurm_command() -> None:
    code = (
        "import sys; import clusterctl.main as m; m._listens('/nowhere');"
        "print([n for n in ('typer', 'msgspec', 'asyncio', 'dataclasses') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("link", ["python", "with blank/python", "x" * 150 + "/python"])
def test_drop_in_runs_this_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    # A link into the environment works as its interpreter when pyvenv.cfg is beside it.
    python = tmp_path / link
    python.parent.mkdir(parents=True, exist_ok=True)
    python.symlink_to(sys.executable)
    marker = Path(sys.prefix) / "pyvenv.cfg"
    if marker.exists():
        (python.parent / "pyvenv.cfg").write_text(marker.read_text())
        (python.parent / "lib").symlink_to(Path(sys.prefix) / "lib")
    monkeypatch.setattr(sys, "executable", str(python))
    dropins.write(tmp_path / "bin", {"CLUSTERCTL_HOME": "/h 'q'"})
    done = subprocess.run(
        [tmp_path / "bin/squeue", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("slurm")


def test_drop_ins_are_left_alone_when_they_are_right(tmp_path: Path) -> None:
    dropins.write(tmp_path, {"CLUSTERCTL_HOME": "/h"})
    before = {p.name: p.stat().st_ino for p in tmp_path.iterdir()}
    assert set(before) == set(dropins.VERBS)
    (tmp_path / "sinfo").write_text("#!/bin/sh\n")
    dropins.write(tmp_path, {"CLUSTERCTL_HOME": "/h"})
    after = {p.name: p.stat().st_ino for p in tmp_path.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"sinfo"}
