"""From an imported module to a NEFF: passes, verification, memory plan, costs, manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from neuron_runtime.backends.numpy_kernels import supported
from neuron_runtime.compiler.cost import collectives, flops_and_bytes
from neuron_runtime.compiler.importers.stablehlo import Imported
from neuron_runtime.compiler.ir import Program, program_to_json
from neuron_runtime.compiler.opset import COLLECTIVES
from neuron_runtime.compiler.passes.schedule import schedule
from neuron_runtime.compiler.passes.simplify import simplify
from neuron_runtime.compiler.plan import hbm_need
from neuron_runtime.compiler.verify import VerifyError, verify_program
from neuron_runtime.compiler.version import COMPILER_VERSION
from neuron_runtime.errors import CompileError
from neuron_runtime.manifest import TARGETS, Manifest, TensorInfo
from neuron_runtime.neff import Neff

# Device memory of one physical core (GiB per chip / cores per chip); LNC 2 joins two cores.
_HBM_PER_CORE = {"trn1": 16 << 30, "inf2": 16 << 30, "trn2": 12 << 30}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chooses. ``lnc``: physical cores to a logical one; None: default."""

    target: str = "trn1"
    lnc: int | None = None

    @property
    def lnc_size(self) -> int:
        """Logical NeuronCore size: trn2's default is 2, the others have only 1."""
        if self.lnc is not None:
            return self.lnc
        return 2 if self.target == "trn2" else 1

    def check(self) -> None:
        """Raise CompileError EARG for impossible combinations."""
        if self.target not in TARGETS:
            raise CompileError(
                "EARG002", f"unknown target {self.target!r}; known: {', '.join(TARGETS)}"
            )
        if self.lnc not in (None, 1, 2):
            raise CompileError("EARG003", f"logical NeuronCore size {self.lnc} is not 1 or 2")
        if self.lnc == 2 and self.target != "trn2":
            raise CompileError("EARG003", f"{self.target} has no logical NeuronCores of size 2")

    def flags(self) -> str:
        """Canonical text for the cache key."""
        return f"--target={self.target} --lnc={self.lnc_size}"


def graph_hash(imported: Imported) -> str:
    """Hash of the program before the passes, with its interface: 16 hex digits."""
    interface = [
        [dataclasses.asdict(t) for t in imported.inputs],
        [dataclasses.asdict(t) for t in imported.outputs],
        imported.aliases,
        imported.world_size,
        imported.mesh,
    ]
    digest = hashlib.sha256()
    body = program_to_json(imported.program)
    digest.update(json.dumps([interface, _without_lines(body)]).encode())
    for name, array in imported.program.constants.items():
        digest.update(name.encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _without_lines(body: object) -> object:
    if isinstance(body, dict) and "ops" in body:
        ops = [[*op[:4], [_without_lines(r) for r in op[4]]] for op in body["ops"]]
        return {**body, "ops": ops}
    if isinstance(body, dict):
        return {key: _without_lines(value) for key, value in body.items()}
    return body


def compile_imported(imported: Imported, options: Options, hash_: str | None = None) -> Neff:
    """Run the passes and build the NEFF. Raises CompileError. Consumes ``imported.program``."""
    options.check()
    hash_ = hash_ or graph_hash(imported)
    program = imported.program
    run_passes(program)
    need = dataclasses.replace(hbm_need(program), program=len(json.dumps(program_to_json(program))))
    limit = _HBM_PER_CORE[options.target] * options.lnc_size
    if need.total > limit:
        parts = ", ".join(f"{k} {v >> 20} MiB" for k, v in dataclasses.asdict(need).items())
        raise CompileError(
            "EOOM001",
            f"the program needs {need.total >> 20} MiB of device memory on a core, "
            f"{options.target} has {limit >> 20} MiB ({parts}); use more ranks or a smaller batch",
        )
    flops, moved = flops_and_bytes(program)
    manifest = Manifest(
        name=imported.name,
        graph_hash=hash_,
        compiler_version=COMPILER_VERSION,
        target=options.target,
        lnc_size=options.lnc_size,
        requested_cores=1,
        world_size=imported.world_size,
        mesh=tuple(imported.mesh),
        inputs=_unique("input", imported.inputs),
        outputs=_unique("output", imported.outputs),
        aliases=tuple(imported.aliases or _match_donated(imported)),
        hbm=need,
        flops=flops,
        bytes_accessed=moved,
        collectives=collectives(program),
    )
    return Neff(manifest, program, imported.text, build_version=COMPILER_VERSION)


def run_passes(program: Program) -> None:
    """All passes, and the verifier after them."""
    for op in program.body.walk():
        if not supported(op.name, [program.types[v] for v in op.operands]):
            raise CompileError("EUOC002", f"{op.where()} of bool is not supported")
    simplify(program)
    schedule(program)
    try:
        verify_program(program)
    except VerifyError as error:
        raise CompileError("EINT001", f"internal: after the passes: {error}") from None


def _unique(kind: str, tensors: list[TensorInfo]) -> tuple[TensorInfo, ...]:
    names = [t.name for t in tensors]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise CompileError("EVRF003", f"{kind} name {twice!r} is used twice")
    return tuple(tensors)


def _match_donated(imported: Imported) -> list[tuple[int, int]]:
    """Pair each donated input with the first free output of its type, in order (as XLA does)."""
    free = list(range(len(imported.outputs)))
    pairs = []
    for place in imported.donated:
        inp = imported.inputs[place]
        for out in free:
            candidate = imported.outputs[out]
            if (candidate.dtype, candidate.shape) == (inp.dtype, inp.shape):
                pairs.append((out, place))
                free.remove(out)
                break
    return pairs


def needs_collectives(program: Program) -> bool:
    """Whether an execution communicates."""
    return any(op.name in COLLECTIVES for op in program.body.walk())
