"""Getting an allocation for srun or salloc: submit, wait, say so."""

from __future__ import annotations

import os
import select

from clusterctl.slurm import client, jsonlite, values
from clusterctl.slurm.errors import CommandError, ControllerError, NoController
from clusterctl.slurm.output import say, warn_reply
from clusterctl.slurm.sbatch import check_cluster, refused
from clusterctl.slurm.signals import Signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from clusterctl.slurm.jobspec import Options

#: Seconds after which an allocation that is not there yet is called queued.
QUEUED_AFTER_S = 0.5

_ENDED = "Job/step already completing or completed"
#: Signals that end the wait for an allocation.
_ABORTING = (1, 2, 3, 15)


def submit(command: str, options: Options, env: dict[str, str]) -> int:
    """Ask for the allocation; its job id.  Raises ``CommandError`` when it is refused."""
    client.ensure_cluster(command)
    if "clusters" in options.extra:
        check_cluster(command, options.extra["clusters"])
    options.spec["batch"] = False
    if "immediate" in options.extra:
        options.spec["immediate"] = True
    request = {
        "type": "Submit",
        "spec": options.finish(),
        "payload": {"env": env},
        "key": os.urandom(12).hex(),
    }
    options.warnings()
    try:
        reply = client.call_again(request)
    except ControllerError as error:
        lead = "Unable to allocate resources"
        if command == "salloc" and error.message == "Invalid partition name specified":
            lead = "Job submit/allocate failed"
        raise refused(command, lead, error, options.spec) from None
    warn_reply(command, reply)
    job_id: int = reply["job_id"]
    return job_id


def release(job_id: int, code: int = 0, signal: int = 0) -> None:
    """Give the allocation back; silent when it is gone already."""
    message = {"type": "EndAllocation", "job_id": job_id, "code": code, "signal": signal}
    try:
        client.call_again(message)
    except ControllerError:
        return


class _Wait:
    """A wait for a job that outlives restarts of the controller and listens to signals."""

    def __init__(self, job_id: int, until: str, signals: Signals) -> None:
        self.message = {"type": "WaitJob", "job_id": job_id, "until": until}
        self.signals = signals
        self.give_up_s: float | None = None
        self.gave_up = False

    def run(self, on_tick: Callable[[], None], first_s: float) -> dict[str, Any] | None:
        """The reply, or None when a signal or ``give_up_s`` ended the wait.

        ``on_tick`` is called once when ``first_s`` have passed, unless there is a ``give_up_s``.
        """
        timeout_ms: float | None = (self.give_up_s or first_s) * 1000
        while True:
            try:
                with client.reconnect(client.FOREVER_S) as link:
                    link.send(self.message)
                    poll = select.poll()
                    poll.register(link.fileno(), select.POLLIN)
                    poll.register(self.signals.fd, select.POLLIN)
                    while True:
                        ready = poll.poll(timeout_ms)
                        if not ready and self.give_up_s is not None:
                            self.gave_up = True
                            return None
                        if not ready:
                            on_tick()
                            timeout_ms = None
                        if any(fd == self.signals.fd for fd, _ in ready) and any(
                            s in _ABORTING for s in self.signals.taken()
                        ):
                            return None
                        if any(fd == link.fileno() for fd, _ in ready):
                            return _reply(link)
            except (OSError, EOFError):
                continue  # the controller restarts: ask the new one


def _reply(link: client.Connection) -> dict[str, Any]:
    reply = link.receive()
    if reply.get("type") == "Error":
        raise ControllerError(reply.get("code", "error"), reply.get("message", ""))
    return reply


def wait_allocated(command: str, job_id: int, options: Options, signals: Signals) -> dict[str, Any]:
    """The job's view once it has its nodes.

    Raises ``CommandError`` when it ended before, or a signal ended the wait.
    """
    quiet = "quiet" in options.extra
    queued = False

    def tell_queued() -> None:
        nonlocal queued
        queued = True
        if quiet:
            return
        reason = _reason(job_id)
        if reason.startswith("Partition"):
            say(command, "Requested partition configuration not available now")
        if command == "salloc":
            say(command, f"Pending job allocation {job_id}")
        say(command, f"job {job_id} queued and waiting for resources")

    wait = _Wait(job_id, "allocated", signals)
    if "immediate" in options.extra:
        wait.give_up_s = immediate_s(command, options)
    reply = wait.run(tell_queued, QUEUED_AFTER_S)
    if reply is None and wait.gave_up:
        release(job_id, 1)
        lines = _not_allocated(command, {}, options)
        if command == "salloc":
            lines.append(f"salloc: Job allocation {job_id} has been revoked.")
        raise CommandError(*lines)
    if reply is None:
        client.call_again({"type": "Cancel", "ids": [str(job_id)]})
        raise CommandError(f"{command}: Job allocation {job_id} has been revoked.")
    job: dict[str, Any] = reply["jobs"][0] if reply["jobs"] else {}
    if job.get("state") != "RUNNING":
        raise CommandError(*_not_allocated(command, job, options))
    if queued and not quiet:
        say(command, f"job {job_id} has been allocated resources")
    return job


def immediate_s(command: str, options: Options) -> float:
    """Seconds that ``--immediate`` allows; one when none are given."""
    text = options.extra.get("immediate") or "1"
    return float(values.count(command, "immediate", text))


def _reason(job_id: int) -> str:
    try:
        jobs = client.call({"type": "GetJobs", "ids": [str(job_id)]})["jobs"]
    except (ControllerError, NoController):
        return ""
    return str(jobs[0].get("reason", "")) if jobs else ""


def _not_allocated(command: str, job: dict[str, Any], options: Options) -> list[str]:
    if "immediate" in options.extra:
        return [f"{command}: error: Unable to allocate resources: Requested nodes are busy"]
    return [
        f"{command}: Job has been cancelled",
        f"{command}: error: Unable to allocate resources: {_ENDED}",
    ]


class EndWatch:
    """Tells when a job ends while something else goes on (``fd`` becomes readable)."""

    def __init__(self, job_id: int) -> None:
        self.message = {"type": "WaitJob", "job_id": job_id, "until": "ended"}
        self.link: client.Connection | None = None
        self._connect()

    def _connect(self) -> None:
        try:
            self.link = client.Connection()
            self.link.send(self.message)
        except (NoController, OSError):
            self.link = None

    @property
    def fd(self) -> int:
        """-1 while there is no connection."""
        return self.link.fileno() if self.link is not None else -1

    def ended(self) -> bool:
        """Call when ``fd`` is readable, or from time to time while it is -1."""
        if self.link is None:
            self._connect()
            return False
        try:
            self.link.receive()
        except (OSError, EOFError):
            self.close()
            return False
        return True

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None


def frame_of(buffer: bytearray) -> dict[str, Any] | None:
    """Take one whole frame off the front of ``buffer``; None when there is none yet."""
    if len(buffer) < 4:
        return None
    size = int.from_bytes(buffer[:4], "big")
    if len(buffer) < 4 + size:
        return None
    message: dict[str, Any] = jsonlite.loads(bytes(buffer[4 : 4 + size]))
    del buffer[: 4 + size]
    return message
