"""Checkpoints: whole or not at all, whatever happens to the writer or the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs import checkpoint
from jobs.checkpoint import Checkpoint, CheckpointError, load, newest, save


def example(step: int, fingerprint: str = "f") -> Checkpoint:
    arrays = {
        "parameters/a": np.arange(6, dtype=np.float32).reshape(2, 3) + step,
        "moment1/b": np.full((), step, np.float32),
        "counts": np.arange(3, dtype=np.int64),
    }
    return Checkpoint(step, fingerprint, arrays)


def assert_same(found: Checkpoint, wanted: Checkpoint) -> None:
    assert (found.step, found.fingerprint) == (wanted.step, wanted.fingerprint)
    assert list(found.arrays) == list(wanted.arrays)
    for name, array in wanted.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_round_trip_and_newest(tmp_path: Path) -> None:
    for step in (1, 2, 12):
        save(tmp_path, example(step), keep=3)
    found, skipped = newest(tmp_path, "f")
    assert found is not None
    assert_same(found, example(12))
    assert skipped == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, example(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_nothing_there(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing", "f") == (None, [])
    assert newest(tmp_path, "f") == (None, [])


def _truncate(path: Path) -> None:
    os.truncate(path / "state.bin", (path / "state.bin").stat().st_size - 1)


def _flip(path: Path) -> None:
    data = bytearray((path / "state.bin").read_bytes())
    data[5] ^= 1
    (path / "state.bin").write_bytes(data)


def _edit_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 9'))


def _hostile_manifest(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["arrays"][0]["shape"] = [2**40, 2**40]
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    import hashlib

    (path / "COMPLETE").write_text(hashlib.sha256(text).hexdigest())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "COMPLETE").unlink(), "incomplete"),
        (lambda path: (path / "COMPLETE").write_bytes(b"\xff"), "codec|COMPLETE"),
        (lambda path: (path / "state.bin").unlink(), "incomplete"),
        (_truncate, "truncated"),
        (_flip, "corrupt"),
        (_edit_manifest, "does not match the COMPLETE mark"),
        (lambda path: (path / "manifest.json").write_bytes(b""), "COMPLETE mark"),
        (_hostile_manifest, "truncated"),
    ],
)
def test_damaged_newest_is_named_and_skipped(tmp_path: Path, damage: object, words: str) -> None:
    save(tmp_path, example(1), keep=3)
    path = save(tmp_path, example(2), keep=3)
    assert callable(damage)
    damage(path)
    with pytest.raises(CheckpointError, match=words):
        load(path)
    found, skipped = newest(tmp_path, "f")
    assert found is not None
    assert_same(found, example(1))
    assert len(skipped) == 1
    assert str(path) in skipped[0]
    # The step is done again and saved over the damaged one.
    save(tmp_path, example(2), keep=3)
    assert_same(load(path), example(2))


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, example(1, "mine"), keep=3)
    with pytest.raises(CheckpointError, match="another model, text, seed"):
        newest(tmp_path, "theirs")


WRITER = """
import sys, itertools
from pathlib import Path
import numpy as np
from jobs.checkpoint import Checkpoint, save
for step in itertools.count(1):
    arrays = {"a": np.full(20000, step, np.float32), "b": np.full(7, step, np.float32)}
    save(Path(sys.argv[1]), Checkpoint(step, "f", arrays), 2)
    print(step, flush=True)
"""


@pytest.mark.parametrize("turn", range(4))
def test_writer_killed_at_any_instant(tmp_path: Path, turn: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        done = 0
        for line in process.stdout:
            done = int(line)
            if done == 3 + turn:
                break
        # Let it get some way into the next one: the moment differs with every turn.
        while turn % 2 and not any(p.name.startswith(".writing") for p in tmp_path.iterdir()):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait(timeout=20)
    finally:
        process.kill()
        process.wait(timeout=20)
    announced = int(rest[-1]) if rest else done
    found, _ = newest(tmp_path, "f")
    assert found is not None
    assert found.step in (announced, announced + 1)
    assert (found.arrays["a"] == found.step).all()
    assert (found.arrays["b"] == found.step).all()
    checkpoint.remove_leftovers(tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("step-")]


def test_one_writer_a_folder(tmp_path: Path) -> None:
    checkpoint.claim(tmp_path)
    program = "import sys; from pathlib import Path; from jobs.checkpoint import claim;"
    other = subprocess.run(
        [sys.executable, "-c", program + "claim(Path(sys.argv[1]))", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert other.returncode == 1
    assert "another run is writing" in other.stderr


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    checkpoint.write_json_atomic(file, {"a": 1})
    checkpoint.write_json_atomic(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
