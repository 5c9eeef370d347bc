"""Checkpoints that survive being killed at any instant.

``<folder>/step-00000100/`` holds ``state.bin`` (the arrays' raw bytes, little endian, one after the
other), ``manifest.json`` (step, fingerprint of the run, name, type, shape and SHA-256 of each
array) and ``COMPLETE`` (SHA-256 of the manifest), written last. Everything is written under a
temporary name, flushed to the disk and renamed; only a checkpoint whose COMPLETE mark and checksums
agree is ever resumed from. JSON and raw numbers only: loading a checkpoint cannot run code.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{8})", re.ASCII)
_TYPES = ("float32", "float64", "int32", "int64", "uint8")


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: arrays by name, and the number of steps done."""

    step: int
    fingerprint: str
    arrays: dict[str, NDArray[Any]]


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as JSON: the old text or the new, never half of one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _write_synced(scratch, (json.dumps(value, indent=1) + "\n").encode())
    scratch.replace(path)
    _sync_folder(path.parent)


def claim(folder: Path) -> None:
    """Let no other living process write into ``folder`` until this one ends.

    Raises:
        CheckpointError: another run is using it.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # A record lock: gone with the process however it ends, not passed on to its children.
        # The descriptor stays open on purpose; closing it would drop the lock.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise CheckpointError(
            f"another run is writing into {folder}; choose another --out"
        ) from None


def remove_all(folder: Path) -> None:
    """Delete every checkpoint."""
    for path in _newest_first(folder):
        (path / "COMPLETE").unlink(missing_ok=True)
        shutil.rmtree(path)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed run left half written. Call while no other run uses the folder."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(".writing-"):
                shutil.rmtree(path, ignore_errors=True)


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint and then drop all but the newest ``keep`` complete ones.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{checkpoint.step:08d}"
    target, scratch = folder / name, folder / f".writing-{name}.{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        entries = []
        with (scratch / "state.bin").open("wb") as stream:
            for array_name, array in checkpoint.arrays.items():
                little = array.astype(array.dtype.newbyteorder("<"), copy=False)
                raw = np.ascontiguousarray(little).reshape(-1).view(np.uint8).data
                stream.write(raw)
                entries.append(
                    {
                        "name": array_name,
                        "dtype": array.dtype.name,
                        "shape": list(array.shape),
                        "sha256": hashlib.sha256(raw).hexdigest(),
                    }
                )
            stream.flush()
            os.fsync(stream.fileno())
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": checkpoint.step,
            "fingerprint": checkpoint.fingerprint,
            "arrays": entries,
        }
        text = (json.dumps(manifest, indent=1) + "\n").encode()
        _write_synced(scratch / "manifest.json", text)
        _sync_folder(scratch)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    _sync_folder(folder)
    mark = target / ".COMPLETE.tmp"
    _write_synced(mark, hashlib.sha256(text).hexdigest().encode() + b"\n")
    mark.rename(target / "COMPLETE")
    _sync_folder(target)
    _prune(folder, keep)
    return target


def _prune(folder: Path, keep: int) -> None:
    found = _newest_first(folder)
    complete = [path for path in found if (path / "COMPLETE").exists()]
    if len(complete) < keep:
        return
    oldest_kept = complete[keep - 1].name
    for path in found:
        if path.name < oldest_kept:
            # The mark goes first: a half deleted checkpoint must not look complete.
            (path / "COMPLETE").unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _entry(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str]:
    name, kind, shape, sha256 = (value[key] for key in ("name", "dtype", "shape", "sha256"))
    if not isinstance(name, str) or kind not in _TYPES or not isinstance(shape, list):
        raise ValueError(f"array entry {name!r} is malformed")
    if not all(isinstance(length, int) and length >= 0 for length in shape):
        raise ValueError(f"array {name!r} has an impossible shape {shape}")
    return name, np.dtype(kind), tuple(shape), str(sha256)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint and verify every checksum.

    Raises:
        CheckpointError: incomplete, truncated or corrupt.
    """
    try:
        mark = (path / "COMPLETE").read_text().strip()
        text = (path / "manifest.json").read_bytes()
        if hashlib.sha256(text).hexdigest() != mark:
            raise CheckpointError(f"{path}: manifest.json does not match the COMPLETE mark")
        manifest = json.loads(text)
        if manifest["format_version"] != FORMAT_VERSION:
            raise CheckpointError(f"{path}: format version {manifest['format_version']}")
        entries = [_entry(value) for value in manifest["arrays"]]
        data = np.fromfile(path / "state.bin", dtype=np.uint8)
        arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, kind, shape, sha256 in entries:
            nbytes = kind.itemsize * int(np.prod(shape, dtype=object))
            raw = data[offset : offset + nbytes]
            if raw.nbytes != nbytes:
                raise CheckpointError(f"{path}: state.bin is truncated ({data.nbytes} bytes)")
            if hashlib.sha256(raw.data).hexdigest() != sha256:
                raise CheckpointError(f"{path}: array {name!r} is corrupt (checksum)")
            arrays[name] = raw.view(kind.newbyteorder("<")).astype(kind).reshape(shape)
            offset += nbytes
        return Checkpoint(int(manifest["step"]), str(manifest["fingerprint"]), arrays)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: incomplete, {error.filename} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def newest(folder: Path, fingerprint: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest usable checkpoint, and one line for each newer one that was skipped.

    Raises:
        CheckpointError: the newest intact checkpoint belongs to another run (other model, text,
            seed or number of steps): resuming from it would be wrong, ignoring it would surprise.
    """
    skipped = []
    for path in _newest_first(folder):
        try:
            found = load(path)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        if found.fingerprint != fingerprint:
            raise CheckpointError(
                f"{path} was written by a run with another model, text, seed or number of steps; "
                f"choose another --out or remove it"
            )
        return found, skipped
    return None, skipped
