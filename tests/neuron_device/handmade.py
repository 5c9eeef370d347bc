"""A small NEFF made by hand, without the compiler's front end.

``new_total = total + all_reduce(x)`` (may take ``total``'s memory) and ``y = log(x)``.
"""

from __future__ import annotations

from dataclasses import replace

from neuron_runtime.compiler.ir import Op, Program, Region, TensorType
from neuron_runtime.compiler.plan import hbm_need
from neuron_runtime.manifest import CollectiveInfo, Manifest, TensorInfo
from neuron_runtime.neff import Neff

LENGTH = 4


def _tensor(name: str) -> TensorInfo:
    return TensorInfo(name, "float32", (LENGTH,), (LENGTH,), ((),))


def accumulate(ranks: int, target: str = "trn1", lnc: int = 1, scratch: int | None = None) -> Neff:
    """The NEFF for ``ranks`` ranks; ``scratch`` overstates its device memory."""
    program = Program([TensorType("float32", (LENGTH,))] * 5, Region([], [], []))
    total, x, summed, new_total, y = range(5)
    groups = [list(range(ranks))]
    ops = [
        Op("all_reduce", [x], [summed], {"op": "add", "groups": groups}),
        Op("add", [total, summed], [new_total]),
        Op("log", [x], [y]),
    ]
    program.body = Region([total, x], ops, [new_total, y])
    need = hbm_need(program)
    if scratch is not None:
        need = replace(need, scratch=scratch)
    group = (tuple(range(ranks)),)
    manifest = Manifest(
        name="accumulate",
        graph_hash="0123456789abcdef",
        compiler_version="handmade",
        target=target,
        lnc_size=lnc,
        requested_cores=1,
        world_size=ranks,
        mesh=(("data", ranks),),
        inputs=(_tensor("total"), _tensor("x")),
        outputs=(_tensor("new_total"), _tensor("y")),
        aliases=((0, 0),),
        hbm=need,
        flops=2 * LENGTH,
        bytes_accessed=5 * 4 * LENGTH,
        collectives=(CollectiveInfo("all_reduce", "add", "float32", 16, 1, group, 0, False),),
    )
    return Neff(manifest, program)
