"""Our commands against recorded output of a real Slurm.

``differences.toml`` lists the cases that differ and why.  A case that differs and is not listed
fails, and so does a listed case that does not differ (any more).
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from pathlib import Path

import pytest

from tests.golden.compare import difference
from tests.golden.records import load
from tests.golden.replay import Replay, cluster_like_recorded

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="recorded as root, whom names and rights show"),
]

DIFFERENCES = Path(__file__).parent / "differences.toml"
#: The slow ones first, so that two workers are busy to the end.
ORDER = ("sacct", "sbatch", "scontrol-1", "srun", "time_parsing", "squeue_formats", "squeue")


def listed() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = tomllib.loads(DIFFERENCES.read_text())
    return found


def test_every_listed_difference_names_a_case_and_a_reason() -> None:
    cases = {record.name for group in load().values() for record in group if not record.withheld}
    for family, reasons in listed().items():
        for case, reason in reasons.items():
            assert f"{family}/{case}" in cases
            assert len(reason.split()) > 2, f"{family}/{case} needs a reason"


@pytest.mark.parametrize("name", [*ORDER, *sorted(set(load()) - set(ORDER))])
def test_group(name: str) -> None:
    group = load()[name]
    known = listed().get(group[0].family, {})
    wrong = []
    # Not below pytest's folder: a second user must be able to reach the working folder.
    with tempfile.TemporaryDirectory(prefix="golden-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        with cluster_like_recorded(Path(folder) / "c") as cluster:
            replay = Replay(cluster)
            replay.set_up(group[0].setup)
            for record in group:
                answer = replay.run(record)
                if record.withheld:
                    continue
                found = difference(record, answer, replay.place)
                if found and record.case not in known:
                    wrong.append(f"=== {record.name}: {' '.join(record.argv)}\n{found}")
                if not found and record.case in known:
                    wrong.append(f"=== {record.name}: listed as a difference, but it is none\n")
    assert not wrong, f"{len(wrong)} of {len(group)}\n" + "\n".join(wrong)
