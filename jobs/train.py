"""Train a byte-level transformer, data parallel, on Neuron cores; a template for a job of your own.

    python -m jobs.train compile --ranks 4      # once, on one node; the only step that needs JAX
    srun python -m jobs.train run               # in a job (see train.sh)
    mpiexec -n 4 python -m jobs.train run       # or without a cluster

The global batch is fixed and shared by the ranks, and the data of a step follows from the seed and
the step number, so 1, 2 and 4 ranks give the same loss curve. A checkpoint is written every
--checkpoint-every steps; a run that finds one in its folder continues there, and ends where an
undisturbed run would have ended.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

# One thread of linear algebra a rank, unless the job says otherwise: ranks, not threads, use the
# processors. Must be set before NumPy is imported.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

from jobs import checkpoint, train_data  # noqa: E402
from jobs.train_spec import TrainSpec, initial_parameters  # noqa: E402
from neuron_runtime import nrt  # noqa: E402
from neuron_runtime.env import parse_core_list  # noqa: E402
from neuron_runtime.errors import CompileError, NrtError  # noqa: E402

KEPT_CHECKPOINTS = 3
RESULT_NAME = "result.json"
_USER_ERRORS = (ValueError, OSError, NrtError, CompileError, checkpoint.CheckpointError)


def default_out() -> Path:
    """``train-out/<job id>`` under the submit directory: a requeued job finds its checkpoints."""
    base = os.environ.get("SLURM_SUBMIT_DIR") or os.getcwd()
    return Path(base) / "train-out" / os.environ.get("SLURM_JOB_ID", "local")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line; every number of TrainSpec has an option of its name."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("compile", "run"))
    parser.add_argument("--out", type=Path, default=None, help="folder of this run's files")
    parser.add_argument("--ranks", type=int, default=None, help="compile: ranks that will run it")
    parser.add_argument("--data", type=Path, default=None, help="file or folder to train on")
    parser.add_argument("--max-bytes", type=int, default=4 << 20, help="use this much of the text")
    parser.add_argument("--log-every", type=int, default=10, help="steps between lines")
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps; 0: never")
    parser.add_argument("--validation-windows", type=int, default=64, help="sequences validated")
    parser.add_argument("--fresh", action="store_true", help="forget the folder's checkpoints")
    for field in fields(TrainSpec):
        kind = float if isinstance(field.default, float) else int
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=kind, default=field.default)
    args = parser.parse_args(arguments)
    if args.out is None:
        args.out = default_out()
    for name in ("max_bytes", "log_every", "validation_windows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.checkpoint_every < 0:
        parser.error("--checkpoint-every must be at least 0")
    if args.action == "compile" and args.ranks is None:
        parser.error("compile needs --ranks")
    return args


def spec_of(args: argparse.Namespace) -> TrainSpec:
    """The training run the options describe."""
    return TrainSpec(**{field.name: getattr(args, field.name) for field in fields(TrainSpec)})


def say(text: str) -> None:
    """One line, at once: a job's output is read while it runs."""
    print(text, flush=True)


# -- ranks ---------------------------------------------------------------------------------------


def choose_core(local_rank: int) -> None:
    """Let this process use one core: its task's own, or the local_rank-th of the job's on the node.

    Raises:
        NrtError: NEURON_RT_VISIBLE_CORES is malformed.
        ValueError: the job has no cores here, or fewer than tasks.
    """
    text = os.environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    cores = parse_core_list(text) if text else None
    if cores is None:
        if os.environ.get("SLURM_JOB_ID"):
            raise ValueError("this job has no Neuron devices here; ask for them: --gres=neuron:N")
        os.environ["NEURON_RT_VISIBLE_CORES"] = str(local_rank)
    elif len(cores) > 1:
        if local_rank >= len(cores):
            raise ValueError(
                f"task {local_rank} of this node has no core: the job has {len(cores)} here "
                f"({text}); ask for more devices (--gres=neuron:N) or fewer tasks a node"
            )
        os.environ["NEURON_RT_VISIBLE_CORES"] = str(cores[local_rank])


def local_rank_of(comm: Any) -> int:
    """This rank's number on its node."""
    for name in ("SLURM_LOCALID", "MPI_LOCALRANKID"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    from mpi4py import MPI

    return int(comm.Split_type(MPI.COMM_TYPE_SHARED).Get_rank())


def from_rank_0(comm: Any, path: Path) -> bytes:
    """Content of a file that only rank 0 needs to see: the program is compiled once and shipped.

    Raises:
        ValueError: rank 0 finds no such file.
    """
    size = np.array(-1, np.int64)
    content = np.empty(0, np.uint8)
    if comm.Get_rank() == 0 and path.exists():
        content = np.fromfile(path, np.uint8)
        size[...] = content.size
    comm.Bcast(size, 0)
    if size < 0:
        raise ValueError(
            f"{path} does not exist; first run: python -m jobs.train compile "
            f"--ranks {comm.Get_size()} --out {path.parent}"
        )
    if comm.Get_rank() != 0:
        content = np.empty(int(size), np.uint8)
    comm.Bcast(content, 0)
    return content.tobytes()


def check_same_text(comm: Any, digest: str) -> None:
    """Every rank must have read the same text.

    Raises:
        ValueError: naming the rank that differs.
    """
    mine = np.frombuffer(bytes.fromhex(digest), np.uint8)
    every = np.empty((comm.Get_size(), mine.size), np.uint8)
    comm.Allgather(mine, every)
    for rank, theirs in enumerate(every):
        if not np.array_equal(theirs, every[0]):
            raise ValueError(
                f"rank {rank} read another text than rank 0 (other files or another Python on its "
                "node); give --data on a file system all nodes share"
            )


# -- state -----------------------------------------------------------------------------------------


def initial_state(spec: TrainSpec) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Parameters from the seed, moments zero."""
    parameters = initial_parameters(spec)
    state = {}
    for group in ("moment1", "moment2"):
        state.update({f"{group}/{name}": np.zeros_like(v) for name, v in parameters.items()})
    state.update({f"parameters/{name}": value for name, value in parameters.items()})
    return state


def restore(comm: Any, folder: Path, spec: TrainSpec, fingerprint: str) -> tuple[int, Any]:
    """Steps done and state: from the newest usable checkpoint, else fresh; equal on every rank.

    Only rank 0 reads files (here and in from_rank_0): the nodes need no common disk.
    """
    state, step = initial_state(spec), 0
    if comm.Get_rank() == 0:
        found, skipped = checkpoint.newest(folder, fingerprint)
        for line in skipped:
            say(f"skipping checkpoint {line}")
        if found is not None:
            step = found.step
            for name, value in state.items():
                value[...] = found.arrays[name]
            say(f"resuming from step {step} of {spec.steps} ({folder})")
    number = np.array(step, np.int64)
    comm.Bcast(number, 0)
    if number > 0:
        for value in state.values():
            comm.Bcast(value, 0)
    return int(number), state


# -- the two actions -------------------------------------------------------------------------------


def compile_programs(args: argparse.Namespace) -> None:
    """Compile (or take from the cache) both programs into the run's folder."""
    from jobs.train_compile import compile_into

    spec = spec_of(args)
    spec.check(args.ranks)
    args.out.mkdir(parents=True, exist_ok=True)
    compile_into(spec, args.ranks, args.out, say)


def run(args: argparse.Namespace, comm: Any) -> int:
    """Train and validate on this rank; the exit code."""
    from jobs.train_programs import EVAL_NEFF, TRAIN_NEFF, Programs

    rank, ranks = comm.Get_rank(), comm.Get_size()
    spec = spec_of(args)
    spec.check(ranks)
    folder = args.out / "checkpoints"
    neffs = {name: from_rank_0(comm, args.out / name) for name in (TRAIN_NEFF, EVAL_NEFF)}
    choose_core(local_rank_of(comm))
    text = train_data.load_text(args.data, args.max_bytes)
    digest = train_data.digest(text)
    check_same_text(comm, digest)
    training, validation = train_data.split(text, spec.seq_len)
    fingerprint = spec.fingerprint(digest)
    if rank == 0:
        checkpoint.claim(args.out)
        checkpoint.remove_leftovers(folder)
        if args.fresh:
            checkpoint.remove_all(folder)
    step, state = restore(comm, folder, spec, fingerprint)
    nrt.nrt_init()
    programs = Programs(neffs, rank, ranks, state)
    del state, neffs
    if rank == 0:
        size = sum(value.size for name, value in programs.state().items() if "parameters" in name)
        say(f"{ranks} ranks, {size} parameters, {training.size} bytes of text")
    began, since = time.monotonic(), step
    while step < spec.steps:
        batch = train_data.train_batch(
            training, spec.seed, step, spec.global_batch, spec.seq_len, rank, ranks
        )
        step += 1
        loss = programs.train(step, batch)
        if not math.isfinite(loss):
            raise ValueError(f"loss is {loss} at step {step}; lower --learning-rate")
        if rank == 0 and (step % args.log_every == 0 or step == 1):
            now = time.monotonic()
            speed = (step - since) * spec.global_batch * spec.seq_len / (now - began)
            say(f"step {step} loss {loss:.6f} tokens/s {speed:.0f}")
            began, since = now, step
        due = args.checkpoint_every and step % args.checkpoint_every == 0
        if rank == 0 and (due or (step == spec.steps and args.checkpoint_every)):
            saved = checkpoint.Checkpoint(step, fingerprint, programs.state())
            checkpoint.save(folder, saved, KEPT_CHECKPOINTS)
    return finish(args, spec, programs, validation, rank, ranks)


def finish(
    args: argparse.Namespace, spec: TrainSpec, programs: Any, validation: Any, rank: int, ranks: int
) -> int:
    """Validate, print the summary, write result.json; 1 if the unigram entropy is not beaten."""
    windows = -(-args.validation_windows // spec.global_batch) * spec.global_batch
    starts = train_data.validation_starts(validation, windows, spec.seq_len)
    share = spec.global_batch // ranks
    nats = 0.0
    for first in range(0, windows, spec.global_batch):
        mine = starts[first + rank * share : first + (rank + 1) * share]
        nats += programs.evaluate(train_data.validation_batch(validation, mine, spec.seq_len))
    nrt.nrt_close()
    loss = nats / (windows * spec.seq_len) / math.log(2)
    entropy = train_data.unigram_entropy(validation)
    if rank != 0:
        return 0 if loss < entropy else 1
    result = {
        "validation_bits_per_byte": loss,
        "unigram_bits_per_byte": entropy,
        "steps": spec.steps,
        "ranks": ranks,
        "validation_bytes": windows * spec.seq_len,
        "spec": spec.as_config(),
    }
    checkpoint.write_json_atomic(args.out / RESULT_NAME, result)
    say(f"validation loss {loss:.4f} bits/byte, unigram entropy {entropy:.4f} bits/byte")
    if loss < entropy:
        return 0
    print("the model does not beat the unigram entropy: it learned nothing", file=sys.stderr)
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Command line entry. A rank that fails ends all ranks: nobody waits for it for ever."""
    args = parse_arguments(arguments)
    if args.action == "compile":
        try:
            compile_programs(args)
        except _USER_ERRORS as error:
            print(f"jobs.train: {error}", file=sys.stderr)
            return 1
        return 0
    # An interrupt ends the rank at once, like SIGTERM: checkpoints are whole at any instant.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    try:
        return run(args, comm)
    except _USER_ERRORS as error:
        print(f"jobs.train: rank {comm.Get_rank()}: {error}", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    if comm.Get_size() > 1:
        comm.Abort(1)
    return 1


if __name__ == "__main__":
    sys.exit(main())
