"""The cluster file that ``clusterctl up`` writes where there is none."""

from __future__ import annotations

import difflib

from neuron_runtime.device import INSTANCE_TYPES
from scheduler.config import MAX_NODES, ConfigError

#: What ``clusterctl up`` makes when nothing is said.
DEFAULT_TYPE = "trn1.32xlarge"
DEFAULT_NODES = 4
DEFAULT_SPARES = 1


def default_text(
    name: str = "local",
    instance_type: str = DEFAULT_TYPE,
    nodes: int = DEFAULT_NODES,
    spares: int = DEFAULT_SPARES,
) -> str:
    """The text of a cluster file of local nodes, as ``clusterctl up`` writes it.

    Raises ``ConfigError`` for an unknown instance type or impossible counts.
    """
    if instance_type not in INSTANCE_TYPES:
        close = difflib.get_close_matches(instance_type, INSTANCE_TYPES, 1, 0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        known = ", ".join(INSTANCE_TYPES)
        raise ConfigError([f"unknown instance type {instance_type!r}; {hint}known: {known}"])
    if nodes < 1 or spares < 0 or nodes + spares > MAX_NODES:
        raise ConfigError([f"a cluster has 1 to {MAX_NODES} nodes, not {nodes} + {spares} spares"])
    prefix = instance_type.split(".", 1)[0]
    width = max(3, len(str(nodes + spares)))

    def table(first: int, last: int) -> str:
        span = f"[{first:0{width}}-{last:0{width}}]" if last > first else f"{first:0{width}}"
        return f'[nodes."{prefix}-{span}"]\ninstance_type = "{instance_type}"\n'

    text = "# Written by clusterctl up. Every key: docs/cluster-file.md\n"
    text += f'[cluster]\nname = "{name}"\n\n' + table(1, nodes)
    if spares:
        text += "\n" + table(nodes + 1, nodes + spares) + "spare = true\n"
    return text + '\n[partitions.main]\nnodes = "ALL"\ndefault = true\n'
