"""Starts the tasks of a step: working directory, files, PMI sockets, one fork each.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from nodeagent.cgroup import step_group
from nodeagent.order import Order
from nodeagent.pmi import PmiServer, Rank, process_mapping
from nodeagent.stepfiles import CannotOpen, StepFiles, TaskFiles
from nodeagent.taskenv import common, of_task, take_limits
from nodeagent.tasks import TaskSpec, find_program, launch_errors, start
from scheduler.api.text import unpack

if TYPE_CHECKING:
    from nodeagent.stepd import Supervisor

Identity = tuple[int, int, list[int]]  # uid, gid, supplementary groups


class Wireup:
    """The PMI side of a step: the server, and what it means when a rank ends."""

    def __init__(self, supervisor: Supervisor) -> None:
        order = supervisor.order
        self._supervisor = supervisor
        self.barrier: tuple[int, dict[str, str]] | None = None  # without an answer yet
        name = f"kvs_{supervisor.config.cluster}_{order.job_id}_{order.step_id}_{order.attempt}"
        self.server = PmiServer(
            kvsname=name.replace(" ", "_"),
            size=sum(len(ranks) for ranks in order.node_tasks),
            mapping=process_mapping(order.nodes, order.node_tasks, order.node_hosts),
            one_node=len([ranks for ranks in order.node_tasks if ranks]) <= 1,
            exchange=self._exchange,
            on_abort=lambda rank, code: supervisor.rank_aborted(rank),
        )
        self._missing = False  # a rank ended without ever entering MPI

    @property
    def ever_used(self) -> bool:
        return self.server.ever_active

    def add(self, rank: int) -> socket.socket:
        """A rank's end of its new socket."""
        mine, theirs = socket.socketpair()
        connection = self.server.add(rank, mine)
        reader = self._reader(connection)
        self._supervisor.selector.register(mine, selectors.EVENT_READ, reader)
        return theirs

    def _reader(self, rank: Rank) -> Callable[[], None]:
        def read() -> None:
            self._read(rank)
            # The others can never get through their first barrier.
            if self._missing and self.ever_used and not self._supervisor.tasks.killed:
                self._supervisor.kill()

        return read

    def _read(self, rank: Rank) -> None:
        sock = rank.sock
        if sock is None:
            return
        descriptor = sock.fileno()
        self.server.readable(rank)
        if rank.sock is None:
            self._supervisor.forget_descriptor(descriptor)

    def _exchange(self, seq: int, puts: dict[str, str]) -> None:
        self.barrier = (seq, puts)
        self._supervisor.send_barrier()

    def barrier_out(self, seq: int, kvs: dict[str, str]) -> None:
        if self.barrier is not None and self.barrier[0] == seq:
            self.barrier = None
            self.server.barrier_out(seq, kvs)

    def abort_code(self, rank: int) -> int | None:
        """What the rank gave MPI_Abort, None when it did not call it."""
        connection = self.server.ranks.get(rank)
        return None if connection is None else connection.aborted

    def rank_ended(self, rank: int) -> bool:
        """Whether the rank ended where MPI cannot go on without it."""
        connection = self.server.ranks.get(rank)
        if connection is None:
            return False
        self._read(connection)  # its last words may say that it is done with MPI
        if connection.active:
            return True
        if not connection.was_active:
            self._missing = True
            return self.ever_used
        return False

    def close(self) -> None:
        for rank in self.server.ranks.values():
            if rank.sock is not None:
                self._supervisor.forget_descriptor(rank.sock.fileno())
        self.server.close()


def identity(order: Order) -> Identity | None:
    """Whom the tasks run as: None for the supervisor's own user.

    Raises ``PermissionError`` when the node cannot start tasks of that user.
    """
    own = os.geteuid()
    if order.uid == own:
        return None
    if own != 0:
        raise PermissionError(
            f"the node's agent runs as uid {own} and cannot start tasks of uid {order.uid}"
        )
    groups = os.getgrouplist(order.user, order.gid) if order.user else [order.gid]
    return order.uid, order.gid, groups


@contextlib.contextmanager
def acting_as(who: Identity | None) -> Iterator[None]:
    """Open files with the user's rights, not root's."""
    if who is None:
        yield
        return
    uid, gid, groups = who
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


def _enter(wanted: bytes) -> tuple[bytes, str]:
    """Change to the working directory; (where we are, error text)."""
    text = ""
    for folder in (wanted, b"/tmp", b"/"):
        try:
            os.chdir(folder)
        except OSError as error:
            text = text or os.strerror(error.errno or 0)
        except ValueError:
            text = text or "Invalid argument"
        else:
            return folder, text
    return b"/", text


def _umask(text: str) -> int:
    return int(text, 8) if text and set(text) <= set("01234567") and len(text) <= 5 else 0o022


def start_tasks(supervisor: Supervisor) -> None:
    """Start all tasks, or finish the step with the reason why none was started."""
    order = supervisor.order
    shared = common(order, supervisor.config)
    limits = take_limits(shared)
    os.umask(_umask(shared.get("SLURM_UMASK", "")))
    if order.batch:  # srun's tasks see it, a batch script does not
        shared.pop("SLURM_UMASK", None)
    try:
        wanted = unpack(order.work_dir) or b"/"
        who = identity(order)
        with acting_as(who):
            work_dir, trouble = _enter(wanted)
            files = StepFiles(order, supervisor.config.node, wanted)
            opened = [files.open(rank) for rank in order.tasks]
    except CannotOpen as error:
        supervisor.launch_failed(str(error), error.errno_text)
        return
    except OSError as error:
        name = error.filename
        what = f"cannot use {os.fsdecode(name)}" if isinstance(name, str | bytes) else str(error)
        supervisor.launch_failed(what, os.strerror(error.errno) if error.errno else "")
        return
    except ValueError as error:  # a NUL in a name, or text that was not packed
        supervisor.launch_failed(f"the launch is not understood: {error}", "Invalid argument")
        return
    supervisor.files = files
    supervisor.stdin.streams = files.stdin
    if trouble:
        for _ in range(2):  # once for the step and once for its task, as Slurm does
            files.say(
                f"couldn't chdir to `{os.fsdecode(wanted)}': {trouble}: "
                f"going to {os.fsdecode(work_dir)} instead"
            )
    if not order.batch and order.mpi == "pmi1":
        supervisor.wireup = Wireup(supervisor)
    errors, errors_in = os.pipe()
    os.set_blocking(errors, False)
    supervisor.launch_errors = lambda: launch_errors(errors)
    key = order.key
    if order.mem_mib > 0:
        name = f"step_{key.job_id}.{key.step_id}.{key.attempt}"
        supervisor.tasks.group = step_group(name, order.mem_mib)
    for local in range(len(order.tasks)):
        spec = _spec(supervisor, local, of_task(shared, order, local), work_dir, opened[local])
        spec.limits = limits
        if supervisor.tasks.group is not None:
            spec.group_procs = supervisor.tasks.group.procs
        spec.user = who
        _start(supervisor, spec, errors_in, opened[local].close_after)
    os.close(errors_in)
    supervisor.tasks_started()


def _spec(
    supervisor: Supervisor, local: int, env: dict[bytes, bytes], work_dir: bytes, files: TaskFiles
) -> TaskSpec:
    order = supervisor.order
    spec = TaskSpec(
        rank=order.tasks[local],
        path=b"",
        argv=[],
        env=env,
        files=files.files,
        terminal=files.terminal,
    )
    if order.batch:
        spec.path = os.fsencode(supervisor.journal.path(order.key, "slurm_script"))
        spec.argv = [spec.path, *map(unpack, order.script_args)]
    elif order.argv:
        spec.argv = [unpack(word) for word in order.argv]
        spec.path = find_program(spec.argv[0], env.get(b"PATH"), work_dir)
    return spec


def _start(supervisor: Supervisor, spec: TaskSpec, errors: int, close_after: list[int]) -> None:
    theirs = None
    if supervisor.wireup is not None:
        theirs = supervisor.wireup.add(spec.rank)
        spec.keep = [theirs.fileno()]
        spec.env[b"PMI_FD"] = b"%d" % theirs.fileno()
        spec.env[b"PMI_RANK"] = b"%d" % spec.rank
        spec.env[b"PMI_SIZE"] = b"%d" % supervisor.wireup.server.size
    try:
        supervisor.tasks.add(spec.rank, start(spec, errors, supervisor.config.node))
    except OSError as error:  # no more processes: the task ends at once, the others are told
        text = os.strerror(error.errno or 0)
        if supervisor.files is not None:
            supervisor.files.say(f"fork(): {text}")
        status = (error.errno or 1) << 8
        supervisor.tasks.ended(spec.rank, status, in_mpi=False, launch_error=text)
    finally:
        if theirs is not None:
            theirs.close()
        for fd in close_after:
            os.close(fd)
