"""``python -m nodeagent --dir NODE_DIR``: the node daemon, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import secrets
import sys
import time

from nodeagent import cgroup, procs
from nodeagent.forkserver import load_config
from nodeagent.journal import write_atomic

log = logging.getLogger("nodeagent")


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created)),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def lock(node_dir: str) -> int:
    """Hold NODE_DIR/agent.lock and say in agent.pid who does (JSON: ``pid``, ``start`` in ticks).

    Raises ``BlockingIOError`` when another agent has it.
    """
    fd = os.open(os.path.join(node_dir, "agent.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    own = procs.stat(os.getpid())
    assert own is not None
    record = json.dumps({"pid": own.pid, "start": own.start}) + "\n"
    write_atomic(os.path.join(node_dir, "agent.pid"), record.encode(), durable=False)
    return fd


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop.  Exit codes: 0 stopped, 1 cannot run (said on stderr)."""
    parser = argparse.ArgumentParser(prog="nodeagent", description="The node daemon.")
    parser.add_argument("--dir", required=True, help="the node's directory (holds node.json)")
    node_dir = os.path.abspath(parser.parse_args(argv).dir)
    try:
        config = load_config(node_dir)
    except ValueError as error:
        print(f"nodeagent: error: {error}", file=sys.stderr)
        return 1
    try:
        held = lock(node_dir)
    except BlockingIOError:
        print(f"nodeagent: error: another agent runs in {node_dir}", file=sys.stderr)
        return 1
    handler = logging.FileHandler(os.path.join(node_dir, "agent.log"))
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    from nodeagent.service import Agent

    if cgroup.delegated(cgroup.own_cgroup()):
        log.info("memory limits: cgroup v2")
    else:
        log.info("memory limits: sampled (no cgroup v2 with the memory controller is delegated)")

    async def serve() -> None:
        await Agent(config, secrets.token_hex(8)).run()

    try:
        asyncio.run(serve())
    except Exception as error:
        log.exception("the agent cannot go on")
        print(f"nodeagent: error: {error}", file=sys.stderr)
        return 1
    finally:
        os.close(held)
    return 0


if __name__ == "__main__":
    sys.exit(main())
