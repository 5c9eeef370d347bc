"""Offsets in one area for blocks that come and go: best fit, neighbours joined when freed."""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGN = 64


class Allocator:
    """Hands out offsets. ``high`` is the size of the area that all blocks so far have needed."""

    def __init__(self) -> None:
        self.high = 0
        self._holes: list[tuple[int, int]] = []  # (offset, size), sorted, never adjacent

    def allocate(self, nbytes: int, align: int = ALIGN) -> int:
        """Offset of a block, a multiple of ``align`` (itself a multiple of 64)."""
        size = _rounded(nbytes)
        best: tuple[int, int] | None = None
        for hole, length in self._holes:
            waste = -hole % align
            if length >= size + waste and (best is None or length < best[1]):
                best = (hole, length)
        if best is not None:
            self._holes.remove(best)
            start = best[0] + -best[0] % align
            self._give(best[0], start - best[0])
            self._give(start + size, best[0] + best[1] - start - size)
            return start
        begin = self.high
        if self._holes and sum(self._holes[-1]) == self.high:  # grow the hole at the end
            begin = self._holes.pop()[0]
        start = begin + -begin % align
        self._give(begin, start - begin)
        self.high = start + size
        return start

    def free(self, offset: int, nbytes: int) -> None:
        """Take a block back."""
        self._give(offset, _rounded(nbytes))

    def _give(self, offset: int, size: int) -> None:
        if size <= 0:
            return
        at = bisect_left(self._holes, (offset, 0))
        if at < len(self._holes) and self._holes[at][0] == offset + size:
            size += self._holes.pop(at)[1]
        if at > 0 and sum(self._holes[at - 1]) == offset:
            offset, length = self._holes.pop(at - 1)
            size += length
        insort(self._holes, (offset, size))


def _rounded(nbytes: int) -> int:
    return max((nbytes + ALIGN - 1) // ALIGN * ALIGN, ALIGN)
