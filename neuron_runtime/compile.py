"""``python -m neuron_runtime.compile``: the compiler's command line."""

from __future__ import annotations

import sys

from neuron_runtime.compiler.cli import main

if __name__ == "__main__":
    sys.exit(main())
