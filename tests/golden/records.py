"""What a real Slurm 22.05.8 answered: the recordings in ``data/``, one file a command family.

A record is one command run after its group's ``setup``.  The recordings were made for this
project on four nodes n001-n004 (16 CPUs, 65536 MiB, neuron:16) with the partitions main and
debug, as root.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Record:
    """One recorded command; ``rc`` is None where it was still running when given up."""

    family: str
    case: str
    setup: str
    argv: tuple[str, ...]
    stdin: str
    env: tuple[tuple[str, str], ...]
    note: str
    withheld: bool  # run in place, its output is not known
    rc: int | None
    out: str
    err: str

    @property
    def name(self) -> str:
        return f"{self.family}/{self.case}"


@cache
def load() -> dict[str, list[Record]]:
    """All groups, by name: the family, with a number where a family has several."""
    groups: dict[str, list[Record]] = {}
    for file in sorted(DATA.glob("*.json")):
        records = [_record(file.stem, item) for item in json.loads(file.read_text())]
        runs = [list(group) for _, group in groupby(records, key=lambda r: r.setup)]
        for number, run in enumerate(runs, 1):
            groups[file.stem + (f"-{number}" if len(runs) > 1 else "")] = run
    return groups


def _record(family: str, item: dict[str, object]) -> Record:
    code = item.get("exit code")
    argv, env = item["argv"], item.get("env") or {}
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    return Record(
        family=family,
        case=str(item["case"]),
        setup=str(item["setup"]),
        argv=tuple(argv),
        stdin=str(item["stdin"]),
        env=tuple(env.items()),
        note=str(item.get("note", "")),
        withheld=bool(item.get("withheld")),
        rc=code if isinstance(code, int) else None,
        out=str(item.get("stdout", "")),
        err=str(item.get("stderr", "")),
    )
