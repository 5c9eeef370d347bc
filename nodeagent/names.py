"""File name patterns of ``--output``, ``--error`` and ``--input`` (sbatch(1), srun(1)).

``%%`` percent, ``%j`` job, ``%J`` job.step, ``%A`` ``%a`` array job and task, ``%s`` step,
``%N`` node, ``%n`` node's index, ``%t`` rank, ``%u`` user, ``%x`` job name; a width between
percent and letter pads numbers with zeros.  Unknown letters stay as they are; a
backslash anywhere turns patterns off.
"""

from __future__ import annotations

import re

from nodeagent.order import Order

_PATTERN = re.compile(rb"%(\d*)([A-Za-z%])")
_NO_ARRAY_TASK = "4294967294"  # what Slurm prints for %a outside arrays
_PER_NODE = frozenset(b"tnN")


def expand(pattern: bytes, order: Order, node: str, rank: int) -> bytes:
    """The file name (not yet joined with the working directory) for one task."""
    if b"\\" in pattern:
        return pattern.replace(b"\\", b"")
    texts = {
        "j": str(order.job_id),
        "J": str(order.job_id) if order.batch else order.step_name,
        "A": str(order.job_id),
        "a": _NO_ARRAY_TASK,
        "s": order.step_id,
        "N": node,
        "n": str(order.node_index),
        "u": order.user or str(order.uid),
        "x": "",
        **order.names,
        "t": str(rank - order.tasks[0] if order.batch else rank),
        "%": "%",
    }

    def one(match: re.Match[bytes]) -> bytes:
        width, letter = match.groups()
        text = texts.get(letter.decode())
        if text is None:
            return match.group(0)
        if width and text.isdigit():
            text = text.zfill(min(int(width), 64))
        return text.encode("utf-8", "surrogateescape")

    return _PATTERN.sub(one, pattern)


def differs_by_node(pattern: bytes) -> bool:
    """Whether tasks on different nodes get different files."""
    if b"\\" in pattern:
        return False
    return any(match.group(2)[0] in _PER_NODE for match in _PATTERN.finditer(pattern))
