"""House rule: modules under 500 lines, functions under 70 (docstring and blank lines included)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("clusterctl", "scheduler", "nodeagent", "neuron_runtime", "jobs", "tests", "benchmarks")
MODULE_LINES = 500
FUNCTION_LINES = 70

MODULES = sorted(
    path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
)


def too_long(source: str) -> list[str]:
    """What in ``source`` breaks the rule."""
    lines = source.count("\n") + 1
    found = [f"module has {lines} lines"] if lines > MODULE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{node.name} (line {node.lineno}) has {length} lines")
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_size(module: Path) -> None:
    assert too_long((ROOT / module).read_text(encoding="utf-8")) == []


def test_the_rule_is_enforced() -> None:
    assert MODULES
    assert too_long("def f():\n" + "    x = 1\n" * 70) == ["f (line 1) has 71 lines"]
    assert too_long("x = 1\n" * 500) == ["module has 501 lines"]
