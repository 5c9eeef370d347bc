"""Options: abbreviations, bundles, values, and the errors' words."""

from __future__ import annotations

import pytest

from clusterctl.slurm.errors import CommandError
from clusterctl.slurm.getopt import Parser
from clusterctl.slurm.options_job import SALLOC, SBATCH, SRUN
from clusterctl.slurm.options_query import SACCT, SCANCEL, SCONTROL, SINFO, SQUEUE

ADVICE = 'Try "sbatch --help" for more information'
PARSER = Parser("sbatch", SBATCH, usage_exit=255)


def _parse(*argv: str) -> list[tuple[str, str | None]]:
    return [(opt.long, value) for opt, value in PARSER.parse(argv, permute=False)[0]]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--time=5"], [("time", "5")]),
        (["--time", "5"], [("time", "5")]),
        (["-t5"], [("time", "5")]),
        (["-t", "5"], [("time", "5")]),
        (["-QH"], [("quiet", None), ("hold", None)]),
        (["-HN2"], [("hold", None), ("nodes", "2")]),
        (["--parsab"], [("parsable", None)]),
        (["--exclusive"], [("exclusive", None)]),
        (["--exclusive=user"], [("exclusive", "user")]),
        (["--nodes=2", "--", "--time"], [("nodes", "2")]),
        (["job.sh", "--time=5"], []),
    ],
)
def test_forms(argv: list[str], expected: list[tuple[str, str | None]]) -> None:
    assert _parse(*argv) == expected


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--frobnicate"], "sbatch: unrecognized option '--frobnicate'"),
        (["--frobnicate=1"], "sbatch: unrecognized option '--frobnicate=1'"),
        (["-Y"], "sbatch: invalid option -- 'Y'"),
        (["-N"], "sbatch: option requires an argument -- 'N'"),
        (["--time"], "sbatch: option '--time' requires an argument"),
        (["--hold=1"], "sbatch: option '--hold' doesn't allow an argument"),
        (
            ["--nod=1"],
            (
                "sbatch: option '--nod=1' is ambiguous; possibilities: '--nodefile' '--nodelist' "
                "'--nodes'"
            ),
        ),
        (
            ["--no=1"],
            (
                "sbatch: option '--no=1' is ambiguous; possibilities: '--no-kill' '--no-requeue' "
                "'--nodefile' '--nodelist' '--nodes'"
            ),
        ),
    ],
)
def test_errors(argv: list[str], line: str) -> None:
    with pytest.raises(CommandError) as info:
        _parse(*argv)
    assert info.value.lines == (line, ADVICE)
    assert info.value.exit_code == 255


@pytest.mark.parametrize("table", [SALLOC, SBATCH, SRUN, SACCT, SCANCEL, SCONTROL, SINFO, SQUEUE])
def test_tables_name_each_option_once(table: tuple[object, ...]) -> None:
    longs = [opt.long for opt in table if opt.long]  # type: ignore[attr-defined]
    shorts = [opt.short for opt in table if opt.short]  # type: ignore[attr-defined]
    assert len(longs) == len(set(longs))
    assert len(shorts) == len(set(shorts))


def test_help_shows_what_is_built_only() -> None:
    text = PARSER.help_text("sbatch [OPTIONS]")
    assert "--time=time" in text
    assert "--gpus" not in text
