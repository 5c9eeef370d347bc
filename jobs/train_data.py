"""Training text as bytes: loading, the split, and which windows make up which step.

The order of the data derives from the seed and the step number alone, so a run that resumes at step
N sees exactly what an undisturbed run would have seen, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: The text is cut into blocks; every tenth is held out for validation.
BLOCK_BYTES = 65536
HOLD_OUT_EVERY = 10
#: Folders whose contents are no ordinary source.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}


class DataError(ValueError):
    """The text cannot be used; the message says why and what would do."""


def _walk(folder: Path) -> Iterator[Path]:
    """Regular files below ``folder`` in name order; hidden ones and linked folders are left out."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _LEFT_OUT:
                yield from _walk(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def _library_files() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return (path for path in _walk(root) if path.suffix == ".py")


def load_text(path: Path | None, max_bytes: int) -> NDArray[np.uint8]:
    """The first ``max_bytes`` of the text, files joined in the order of their names.

    Args:
        path: a file or a folder; None takes the source of Python's standard library.

    Raises:
        DataError: nothing there, or too little to train on.
    """
    if path is not None and not (path.is_dir() or path.is_file()):
        raise DataError(f"--data {path}: no such file or directory")
    pieces: list[bytes] = []
    room = max_bytes
    files = _library_files() if path is None else _walk(path) if path.is_dir() else iter([path])
    for file in files:
        if room <= 0:
            break
        try:
            with file.open("rb") as stream:
                piece = stream.read(room)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error
        pieces.append(piece)
        room -= len(piece)
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def digest(text: NDArray[np.uint8]) -> str:
    """SHA-256 of the text, in hex: all ranks must have read the same."""
    return hashlib.sha256(text.tobytes()).hexdigest()


def split(text: NDArray[np.uint8], seq_len: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Training and validation text: every tenth block is held out.

    Raises:
        DataError: either part would not hold a single sequence.
    """
    block = min(BLOCK_BYTES, max(text.size // (2 * HOLD_OUT_EVERY), 1))
    blocks = [text[start : start + block] for start in range(0, text.size, block)]
    last = HOLD_OUT_EVERY - 1
    validation = np.concatenate([text[:0], *blocks[last::HOLD_OUT_EVERY]])
    del blocks[last::HOLD_OUT_EVERY]
    train = np.concatenate([text[:0], *blocks])
    if min(train.size, validation.size) < seq_len + 2:
        raise DataError(
            f"{text.size} bytes of text are too few to train on sequences of {seq_len}; "
            f"give at least {(seq_len + 2) * 2 * HOLD_OUT_EVERY}"
        )
    return train, validation


def _windows(text: NDArray[np.uint8], starts: NDArray[np.int64], seq_len: int) -> NDArray[np.int32]:
    windows: NDArray[np.int32] = text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
    return windows


def train_batch(
    text: NDArray[np.uint8],
    seed: int,
    step: int,
    global_batch: int,
    seq_len: int,
    rank: int,
    ranks: int,
) -> NDArray[np.int32]:
    """This rank's share of step ``step``: [global_batch / ranks, seq_len + 1] byte values."""
    random = np.random.Generator(np.random.Philox(key=seed, counter=step))
    starts = random.integers(0, text.size - seq_len - 1, size=global_batch)
    share = global_batch // ranks
    return _windows(text, starts[rank * share : (rank + 1) * share], seq_len)


def validation_starts(text: NDArray[np.uint8], windows: int, seq_len: int) -> NDArray[np.int64]:
    """Where the ``windows`` validation sequences begin, evenly spread over the held-out text."""
    return np.linspace(0, text.size - seq_len - 1, windows).astype(np.int64)


def validation_batch(
    text: NDArray[np.uint8], starts: NDArray[np.int64], seq_len: int
) -> NDArray[np.int32]:
    """Validation sequences beginning at ``starts``: [len(starts), seq_len + 1] byte values."""
    return _windows(text, starts, seq_len)


def unigram_entropy(text: NDArray[np.uint8]) -> float:
    """Entropy of the bytes' own distribution in bits a byte.

    No model that ignores context can do better on this text.
    """
    counts = np.bincount(text, minlength=256)
    shares = counts[counts > 0] / text.size
    return float(-(shares * np.log2(shares)).sum())
