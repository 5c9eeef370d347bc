"""The batch script: reading it, and its ``#SBATCH`` lines."""

from __future__ import annotations

import os

from clusterctl.slurm.errors import CommandError

#: Largest batch script, bytes (Slurm's default of max_script_size).
MAX_SCRIPT = 4 * 1024 * 1024

_EMPTY = "sbatch: error: Batch script is empty!"


def read_script(path: str | None) -> bytes:
    """The script from a file or, without a path, from standard input.

    Raises ``CommandError`` for what is no batch script, in Slurm's words.
    """
    body = _read_file(path) if path is not None else _read_stdin()
    check_script(body)
    return body


def _read_stdin() -> bytes:
    return _read_fd(0)


def _read_file(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise CommandError(f"sbatch: error: Unable to open file {path}") from None
    try:
        return _read_fd(fd)
    except IsADirectoryError:
        raise CommandError(_EMPTY) from None  # as Slurm says it
    finally:
        os.close(fd)


def _read_fd(fd: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        part = os.read(fd, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > MAX_SCRIPT:
            raise CommandError(
                "sbatch: error: Batch job submission failed: "
                f"Job script exceeds maximum size ({MAX_SCRIPT} bytes)"
            )


def check_script(body: bytes) -> None:
    """Raise ``CommandError`` unless ``body`` can be a batch script."""
    if not body:
        raise CommandError(_EMPTY)
    if not body.strip():
        raise CommandError("sbatch: error: Batch script contains only whitespace!")
    if not body.startswith(b"#!"):
        raise CommandError(
            "sbatch: error: This does not look like a batch script.  The first",
            "sbatch: error: line must start with #! followed by the path to an interpreter.",
            "sbatch: error: For instance: #!/bin/sh",
        )
    if b"\0" in body:
        raise CommandError(
            "sbatch: error: The Slurm controller does not allow scripts that",
            "sbatch: error: contain a NULL character '\\0'.",
        )
    if b"\r\n" in body:
        raise CommandError(
            "sbatch: error: Batch script contains DOS line breaks (\\r\\n)",
            "sbatch: error: instead of expected UNIX line breaks (\\n).",
        )


def split_words(line: str) -> list[str]:
    """Words of a directive: quotes removed, ``\\`` escapes, ``#`` at a word's start ends it."""
    found: list[str] = []
    word: list[str] | None = None
    quote = ""
    escaped = False
    for char in line:
        if escaped:
            word = [*(word or ()), char]
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word = [*(word or ()), char]
        elif char in "\"'":
            quote = char
            word = word or []
        elif char in " \t":
            if word is not None:
                found.append("".join(word))
            word = None
        elif char == "#" and word is None:
            return found
        else:
            word = [*(word or ()), char]
    if word is not None:
        found.append("".join(word))
    return found


def directives(body: bytes) -> list[list[str]]:
    """The words of each ``#SBATCH`` line before the script's first command.

    Raises ``CommandError`` for ``#SBATCH hetjob``.
    """
    found = []
    for raw in body.split(b"\n"):
        line = raw.decode("utf-8", "surrogateescape")
        if line.startswith("#SBATCH") and line[7:8] in ("", " ", "\t"):
            words = split_words(line[7:])
            if words[:1] in (["hetjob"], ["packjob"]):
                raise CommandError(
                    "sbatch: error: heterogeneous jobs (#SBATCH hetjob) are not supported by "
                    "clusterctl"
                )
            if words:
                found.append(words)
        elif line.strip(" \t") and not line.lstrip(" \t").startswith("#"):
            break
    return found
