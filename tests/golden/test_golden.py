"""Our commands against recorded output of a real Slurm.

``differences.toml`` lists the cases that differ and why.  A case that differs and is not listed
fails, and so does a listed case that does not differ (any more).
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
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
#: Groups that mostly wait run beside each other; the slow ones start first.
TOGETHER = (("sacct", "time_parsing"), ("srun", "salloc"), ("sbatch", "hostlist"))
ALONE = sorted(set(load()) - {name for names in TOGETHER for name in names})


def listed() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = tomllib.loads(DIFFERENCES.read_text())
    return found


def test_every_listed_difference_names_a_case_and_a_reason() -> None:
    cases = {record.name for group in load().values() for record in group if not record.withheld}
    for family, reasons in listed().items():
        for case, reason in reasons.items():
            assert f"{family}/{case}" in cases
            assert len(reason.split()) > 2, f"{family}/{case} needs a reason"


@pytest.mark.parametrize("names", [*TOGETHER, *[(n,) for n in ALONE]], ids="+".join)
def test_groups(names: tuple[str, ...]) -> None:
    with ThreadPoolExecutor(len(names)) as pool:
        wrong = [text for texts in pool.map(wrong_in, names) for text in texts]
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong)


def wrong_in(name: str) -> list[str]:
    """Replay a group on a cluster of its own; what is not as recorded or as listed."""
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
    return wrong
