"""``python -m scheduler --home HOME``: the controller of one cluster, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler import home as homedir
from scheduler.api import wire
from scheduler.api.errors import ClusterError
from scheduler.parts import Setup
from scheduler.server import Server
from scheduler.service import Controller
from scheduler.store import FILE_NAME, Reader, Store, prepare

if TYPE_CHECKING:
    from scheduler.config import ClusterConfig
    from scheduler.transport.base import Transport

log = logging.getLogger("scheduler")


def version() -> str:
    """Version of the installed package; of a source tree that is not installed, "source"."""
    try:
        return importlib.metadata.version("clusterctl")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def transports(config: ClusterConfig) -> dict[str, Transport]:
    """The transport of every node; one object a kind.  asyncssh is loaded only when needed."""
    made: dict[str, Transport] = {}
    for name in config.specs:
        kind = config.transport_for(name)
        if kind not in made:
            if kind == "ssh":
                from scheduler.transport.ssh import SshTransport

                made[kind] = SshTransport(config)
            else:
                from scheduler.transport.local import LocalTransport

                made[kind] = LocalTransport(config)
    return {name: made[config.transport_for(name)] for name in config.specs}


def setup_of(config: ClusterConfig) -> Setup:
    """What the controller needs of a cluster file."""
    host = socket.gethostname().partition(".")[0]
    return Setup(
        home=config.home,
        config_path=config.path,
        settings=config.settings,
        nodes=config.nodes,
        partitions=config.partitions,
        transports=transports(config),
        hosts=config.hosts(),
        real_hosts={
            name: spec.address if spec.transport == "ssh" else host
            for name, spec in config.specs.items()
        },
        heartbeat_s=config.heartbeat_s,
        host=host,
        version=version(),
    )


async def serve(setup: Setup) -> str:
    """Run the controller until it is told to stop; "" or why it had to.

    Raises ``Unavailable`` when the state or the socket cannot be used.
    """
    path = setup.home / FILE_NAME
    prepare(path)
    controller = Controller(setup, Store.open(path), Reader(path))
    server = Server(setup.home / homedir.SOCKET_NAME, controller.dispatch)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, controller.finish)
    try:
        controller.start()
        await server.start()
        homedir.write_info(
            setup.home,
            {
                "pid": os.getpid(),
                "started_s": controller.started_s,
                "version": setup.version,
                "protocol": wire.PROTOCOL,
            },
        )
        log.info("controller serves", extra={"pid": os.getpid(), "epoch": controller.epoch})
        return await controller.stopped
    finally:
        await server.stop()
        await controller.stop()
        for transport in {id(t): t for t in setup.transports.values()}.values():
            await transport.close()
        homedir.remove_info(setup.home)


def _run(home: Path) -> int:
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = homedir.Lock(home)
    homedir.open_log(home)
    warning = homedir.volatile_warning(home)
    if warning:
        log.warning(warning)
        print(f"scheduler: warning: {warning}", file=sys.stderr)
    from scheduler import config

    why = asyncio.run(serve(setup_of(config.load(home))))
    log.info("controller ends", extra={"why": why or "told to"})
    lock.release()
    if why:
        print(f"scheduler: error: {why}; the state on disk is safe", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the controller; the exit status."""
    parser = argparse.ArgumentParser(prog="scheduler", description="clusterctl's controller")
    parser.add_argument("--home", required=True, type=Path, help="the cluster's state directory")
    args = parser.parse_args(argv)
    home = Path(os.path.abspath(args.home))
    try:
        return _run(home)
    except ClusterError as error:
        log.error("controller cannot start: %s", error.message)
        print(f"scheduler: error: {error.message}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"scheduler: error: {home}: {error.strerror or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
