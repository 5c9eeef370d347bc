"""Host lists: ``n[001-003,007],m1`` <-> names, by Slurm's rules.

A name is a prefix and a number at its end (``a1b2c3`` is ``a1b2c`` and 3); the number's leading
zeros belong to the name.  Brackets may stand at several places, but nothing may follow the last
one.  Behaviour was compared with ``scontrol show hostnames|hostlist|hostlistsorted`` of Slurm
22.05.

Standard library only: the drop-in commands import this module.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

#: Most hosts in one ``A-B`` (as in Slurm) and in one list (so that a user cannot fill memory).
MAX_RANGE = 64 * 1024
MAX_HOSTS = 1 << 20

_DIGITS = "0123456789"
_SEPARATORS = ", \t\n"


class HostlistError(ValueError):
    """A text that is no host list.  ``detail`` says which part, "" when it is the whole."""

    def __init__(self, text: str, detail: str = "") -> None:
        super().__init__(f"Invalid hostlist: {text}")
        self.detail = detail


def _tokens(text: str) -> list[str]:
    """``text`` cut at commas and blanks outside brackets; empty parts vanish."""
    found = []
    start = 0
    depth = 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth = max(0, depth - 1)
        elif char in _SEPARATORS and depth == 0:
            if i > start:
                found.append(text[start:i])
            start = i + 1
    if len(text) > start:
        found.append(text[start:])
    return found


def _range(part: str, whole: str) -> list[str]:
    """The numbers of ``7`` or ``08-11`` with their zeros."""
    low, dash, high = part.partition("-")
    if not dash:
        high = low
    valid = all(t.isascii() and t.isdigit() and len(t) <= 18 for t in (low, high))
    if not valid or int(low) > int(high):
        raise HostlistError(whole, f"_parse_single_range: Invalid range: `{part}'")
    first, last = int(low), int(high)
    if last - first >= MAX_RANGE:
        raise HostlistError(whole, f"_parse_single_range: Too many hosts in range `{part}'")
    width = len(low)
    return [str(n).zfill(width) for n in range(first, last + 1)]


def _expand_token(token: str, whole: str) -> list[str]:
    names = [""]
    rest = token
    while True:
        prefix, bracket, after = rest.partition("[")
        if not bracket:
            if rest and rest != token:  # text after a bracket
                raise HostlistError(whole)
            return [name + rest for name in names]
        body, closed, rest = after.partition("]")
        if not closed:  # Slurm takes an unclosed bracket as a host of this odd name
            return [name + prefix + "]" for name in names]
        numbers = [n for part in body.split(",") for n in _range(part, whole)]
        if len(names) * len(numbers) > MAX_HOSTS:
            raise HostlistError(whole, f"more than {MAX_HOSTS} hosts")
        names = [name + prefix + number for name in names for number in numbers]


def expand(text: str) -> list[str]:
    """The names ``text`` stands for, in its order, duplicates kept.

    Raises ``HostlistError`` (a ``ValueError``) on bad ranges and on text after a bracket.
    """
    names: list[str] = []
    for token in _tokens(text):
        names += _expand_token(token, text)
        if len(names) > MAX_HOSTS:
            raise HostlistError(text, f"more than {MAX_HOSTS} hosts")
    return names


def _split(name: str) -> tuple[str, str]:
    """Prefix and number (as text, "" when there is none) of a name."""
    prefix = name.rstrip(_DIGITS)
    number = name[len(prefix) :]
    # No range is made of numbers longer than a machine word.
    return (prefix, number) if len(number) <= 18 else (name, "")


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key that orders ``r2n`` before ``r10n``."""
    key = []
    i = 0
    while i < len(text):
        j = i
        if text[i] in _DIGITS:
            while j < len(text) and text[j] in _DIGITS and j - i < 18:
                j += 1
            key.append((0, int(text[i:j]), text[i:j]))
        else:
            while j < len(text) and text[j] not in _DIGITS:
                j += 1
            key.append((1, 0, text[i:j]))
        i = j
    return key


class _Run:
    """Consecutive numbers that print with one width."""

    __slots__ = ("first", "last", "prefix", "width")

    def __init__(self, prefix: str, number: str) -> None:
        self.prefix = prefix
        self.first = self.last = number
        self.width = len(number)

    def take(self, prefix: str, number: str) -> bool:
        """Append ``number`` when it is the next one; False when it is not."""
        if prefix != self.prefix or not self.first or not number:
            return False
        if number != str(int(self.last) + 1).zfill(self.width):
            return False
        self.last = number
        return True

    def text(self) -> str:
        return self.first if self.first == self.last else f"{self.first}-{self.last}"


def fold_ordered(names: Iterable[str]) -> str:
    """``names`` as a host list; order and duplicates are kept (``scontrol show hostlist``)."""
    runs: list[_Run] = []
    for name in names:
        prefix, number = _split(name)
        if not (runs and runs[-1].take(prefix, number)):
            runs.append(_Run(prefix, number))
    parts = []
    i = 0
    while i < len(runs):
        j = i + 1
        if runs[i].first:
            while j < len(runs) and runs[j].prefix == runs[i].prefix and runs[j].first:
                j += 1
        prefix = runs[i].prefix
        if j - i == 1 and runs[i].first == runs[i].last:
            parts.append(prefix + runs[i].first)
        else:
            parts.append(f"{prefix}[{','.join(run.text() for run in runs[i:j])}]")
        i = j
    return ",".join(parts)


def _sorted(names: Iterable[str]) -> list[str]:
    """``names`` by prefix (naturally), padded width, number."""
    split = [_split(name) for name in names]
    padded: dict[str, set[int]] = {}
    for prefix, number in split:
        if len(number) > 1 and number[0] == "0":
            padded.setdefault(prefix, set()).add(len(number))
    natural = {p: _natural(p) for p, _ in split}

    def key(item: tuple[str, str]) -> tuple[list[tuple[int, int, str]], str, int, int, int]:
        prefix, number = item
        # 100 belongs to the numbers padded to three, or else to two digits
        width = max((w for w in padded.get(prefix, ()) if w <= len(number)), default=0)
        return natural[prefix], prefix, len(number) > 0, width, int(number or 0)

    return [prefix + number for prefix, number in sorted(split, key=key)]


def fold_sorted(names: Iterable[str]) -> str:
    """Like ``fold_ordered``, sorted, duplicates kept (``scontrol show hostlistsorted``)."""
    return fold_ordered(_sorted(names))


def fold(names: Iterable[str]) -> str:
    """The shortest host list of a set of names: sorted, each once."""
    return fold_ordered(_sorted(dict.fromkeys(names)))
