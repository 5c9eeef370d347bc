"""How tasks are spread over nodes."""

from __future__ import annotations

from scheduler.api.records import TaskLayout


def block_counts(ntasks: int, capacity: list[int]) -> list[int] | None:
    """Tasks per node, filled in order with at least one on each; None when they do not fit.

    ``capacity[i]`` is the most that node i can take.  Slurm's default: 4 tasks on 2 nodes that
    take many are 3,1 - and 8 on 3 nodes are 6,1,1.
    """
    if ntasks < len(capacity) or sum(capacity) < ntasks or any(c < 1 for c in capacity):
        return None
    counts = [1] * len(capacity)
    left = ntasks - len(capacity)
    for i, room in enumerate(capacity):
        more = min(left, room - 1)
        counts[i] += more
        left -= more
    return counts


def even_counts(ntasks: int, capacity: list[int]) -> list[int] | None:
    """One task at a time over the nodes in turn (used by steps with -N and -n)."""
    if sum(capacity) < ntasks:
        return None
    counts = [0] * len(capacity)
    left = ntasks
    while left:
        for i, room in enumerate(capacity):
            if left and counts[i] < room:
                counts[i] += 1
                left -= 1
    return counts


def place_tasks(nodes: list[str], counts: list[int], distribution: str) -> TaskLayout:
    """Global ranks on each node: ``block`` fills node by node, ``cyclic`` deals them out."""
    tasks: list[list[int]] = [[] for _ in nodes]
    if distribution == "cyclic":
        rank = 0
        left = list(counts)
        while any(left):
            for i in range(len(nodes)):
                if left[i]:
                    tasks[i].append(rank)
                    rank += 1
                    left[i] -= 1
    else:
        rank = 0
        for i, count in enumerate(counts):
            tasks[i] = list(range(rank, rank + count))
            rank += count
    return TaskLayout(nodes=list(nodes), tasks=tasks)
