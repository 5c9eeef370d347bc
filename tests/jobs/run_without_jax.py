"""Run ``jobs.train`` in a process in which the compiler's framework cannot be imported."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

FORBIDDEN = ("jax", "jaxlib", "scipy", "torch")


class Refuse(MetaPathFinder):
    """Import of a forbidden package is an error, wherever it comes from."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Raise for a forbidden name, else leave it to the other finders."""
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError(f"a rank must run without {name}")


if __name__ == "__main__":
    sys.meta_path.insert(0, Refuse())
    from jobs.train import main

    sys.exit(main(sys.argv[1:]))
