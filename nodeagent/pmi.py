"""PMI-1 server for the ranks of one step on one node.

The protocol is lines of ``cmd=NAME key=value ...`` over a socket the rank inherits (PMI_FD).
Puts stay local until all ranks of the node are in a barrier; then they go up once and come
back with those of the other nodes.  Verbs as MPICH uses them.  Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence

KEY_MAX = 64
VALUE_MAX = 1024
NAME_MAX = 256
_PAIRS_MAX = 1 << 16  # pairs a step may put between two barriers
_LINE_MAX = 1 << 16


def process_mapping(
    nodes: Sequence[str], tasks: Sequence[Sequence[int]], hosts: dict[str, str]
) -> str:
    """PMI_process_mapping for the layout: ``(vector,(first host, hosts, ranks each),...)``.

    Nodes on the same real host (``hosts``: node -> host) count as one, so their ranks talk
    through shared memory.  Format: MPICH's PMI_process_mapping, blocks in order of rank.
    """
    number: dict[str, int] = {}
    host_of_rank: dict[int, int] = {}
    for node, ranks in zip(nodes, tasks, strict=True):
        index = number.setdefault(hosts.get(node, node), len(number))
        for rank in ranks:
            host_of_rank[rank] = index
    runs: list[tuple[int, int]] = []  # (host, ranks in a row)
    for rank in sorted(host_of_rank):
        host = host_of_rank[rank]
        if runs and runs[-1][0] == host:
            runs[-1] = (host, runs[-1][1] + 1)
        else:
            runs.append((host, 1))
    blocks: list[list[int]] = []
    for host, count in runs:
        if blocks and blocks[-1][2] == count and host == blocks[-1][0] + blocks[-1][1]:
            blocks[-1][1] += 1
        else:
            blocks.append([host, 1, count])
    # Readers go round the blocks until every rank has a host: one period is enough.
    for period in range(1, len(blocks)):
        if len(blocks) % period == 0 and blocks == blocks[:period] * (len(blocks) // period):
            blocks = blocks[:period]
            break
    return "(vector," + ",".join(f"({a},{b},{c})" for a, b, c in blocks) + ")"


class Rank:
    """One rank's connection."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock: socket.socket | None = sock
        self.pending = b""
        self.active = False  # between init and finalize
        self.was_active = False
        self.waiting = False  # in the barrier
        self.aborted: int | None = None
        self.spawning = False  # within a multi-line spawn request

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class PmiServer:
    """State of the step's wire-up here.

    ``exchange(seq, puts)`` is called when all local ranks are in barrier ``seq`` (from 0) of a
    step with several nodes; ``barrier_out`` answers it.  ``on_abort(rank, code)`` is called once
    a rank asks for the end of the step.
    """

    def __init__(
        self,
        *,
        kvsname: str,
        size: int,
        mapping: str,
        one_node: bool,
        exchange: Callable[[int, dict[str, str]], None],
        on_abort: Callable[[int, int], None],
    ) -> None:
        self.kvsname = kvsname
        self.size = size
        self.one_node = one_node
        self.exchange = exchange
        self.on_abort = on_abort
        self.kvs: dict[str, str] = {"PMI_process_mapping": mapping}
        self.puts: dict[str, str] = {}
        self.seq = 0
        self.ranks: dict[int, Rank] = {}
        self.services: dict[str, str] = {}
        self.ever_active = False

    def add(self, rank: int, sock: socket.socket) -> Rank:
        sock.setblocking(False)
        connection = Rank(rank, sock)
        self.ranks[rank] = connection
        return connection

    def readable(self, rank: Rank) -> None:
        """Take and answer what the rank wrote; closes the connection at its end."""
        if rank.sock is None:
            return
        try:
            data = rank.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            rank.close()
            return
        rank.pending += data
        *lines, rank.pending = rank.pending.split(b"\n")
        for line in lines:
            self._line(rank, line.decode("utf-8", "replace"))
        if len(rank.pending) > _LINE_MAX:
            rank.close()

    def _say(self, rank: Rank, text: str) -> None:
        if rank.sock is None:
            return
        # A rank waits for each answer, so its socket has room; one that does not read is lost.
        with contextlib.suppress(OSError):
            rank.sock.send(text.encode() + b"\n")

    def _line(self, rank: Rank, line: str) -> None:
        if rank.spawning:
            if line.strip() == "endcmd":
                rank.spawning = False
                self._say(rank, "cmd=spawn_result rc=-1 msg=spawn_not_supported")
            return
        if line.startswith("mcmd=spawn"):
            rank.spawning = True
            return
        # Values hold no blanks except that of "put", which comes last.
        fields: dict[str, str] = {}
        head, mark, value = line.partition(" value=")
        for word in head.split():
            name, _, text = word.partition("=")
            fields[name] = text
        if mark:
            fields["value"] = value
        command = fields.get("cmd", "")
        handler = getattr(self, f"_on_{command}", None) if command.isidentifier() else None
        if handler is None:
            self._say(rank, f"cmd={command or 'error'}_result rc=-1 msg=unknown_command")
        else:
            handler(rank, fields)

    def _on_initack(self, rank: Rank, fields: dict[str, str]) -> None:
        self._say(rank, "cmd=initack rc=0")
        self._say(rank, f"cmd=set size={self.size}")
        self._say(rank, f"cmd=set rank={rank.rank}")
        self._say(rank, "cmd=set debug=0")

    def _on_init(self, rank: Rank, fields: dict[str, str]) -> None:
        if fields.get("pmi_version") != "1":
            self._say(rank, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=-1")
            return
        rank.active = rank.was_active = True
        self.ever_active = True
        self._say(rank, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0")

    def _on_get_maxes(self, rank: Rank, fields: dict[str, str]) -> None:
        self._say(
            rank,
            f"cmd=maxes rc=0 kvsname_max={NAME_MAX} keylen_max={KEY_MAX} vallen_max={VALUE_MAX}",
        )

    def _on_get_appnum(self, rank: Rank, fields: dict[str, str]) -> None:
        self._say(rank, "cmd=appnum rc=0 appnum=0")

    def _on_get_universe_size(self, rank: Rank, fields: dict[str, str]) -> None:
        self._say(rank, f"cmd=universe_size rc=0 size={self.size}")

    def _on_get_my_kvsname(self, rank: Rank, fields: dict[str, str]) -> None:
        self._say(rank, f"cmd=my_kvsname rc=0 kvsname={self.kvsname}")

    def _on_put(self, rank: Rank, fields: dict[str, str]) -> None:
        key, value = fields.get("key", ""), fields.get("value", "")
        if fields.get("kvsname") != self.kvsname:
            self._say(rank, "cmd=put_result rc=-1 msg=unknown_kvsname")
        elif not key or len(key) > KEY_MAX or len(value) > VALUE_MAX or len(self.puts) > _PAIRS_MAX:
            self._say(rank, "cmd=put_result rc=-1 msg=too_large")
        else:
            self.puts[key] = value
            self.kvs[key] = value
            self._say(rank, "cmd=put_result rc=0 msg=success")

    def _on_get(self, rank: Rank, fields: dict[str, str]) -> None:
        value = self.kvs.get(fields.get("key", ""))
        if fields.get("kvsname") != self.kvsname:
            self._say(rank, "cmd=get_result rc=-1 msg=unknown_kvsname")
        elif value is None:
            self._say(rank, "cmd=get_result rc=-1 msg=key_not_found")
        else:
            self._say(rank, f"cmd=get_result rc=0 msg=success value={value}")

    def _on_barrier_in(self, rank: Rank, fields: dict[str, str]) -> None:
        rank.waiting = True
        if not all(one.waiting for one in self.ranks.values()):
            return
        if self.one_node:
            self.barrier_out(self.seq, {})
        else:
            self.exchange(self.seq, dict(self.puts))

    def barrier_out(self, seq: int, kvs: dict[str, str]) -> None:
        """All nodes are in barrier ``seq``; a repeated or older answer is dropped."""
        if seq != self.seq or not all(one.waiting for one in self.ranks.values()):
            return
        self.kvs.update(kvs)
        self.puts.clear()
        self.seq += 1
        for one in self.ranks.values():
            one.waiting = False
        for one in self.ranks.values():
            self._say(one, "cmd=barrier_out rc=0")

    def _on_finalize(self, rank: Rank, fields: dict[str, str]) -> None:
        rank.active = False
        self._say(rank, "cmd=finalize_ack rc=0")

    def _on_abort(self, rank: Rank, fields: dict[str, str]) -> None:
        text = fields.get("exitcode", "1")
        rank.aborted = int(text) if text.lstrip("-").isdigit() else 1
        self.on_abort(rank.rank, rank.aborted)

    # The name service is of this node alone, so steps over several nodes are told that there
    # is none rather than finding a name on one node and not on the next.

    def _on_publish_name(self, rank: Rank, fields: dict[str, str]) -> None:
        if not self.one_node:
            self._say(rank, "cmd=publish_result rc=-1 msg=no_name_service_across_nodes")
            return
        self.services[fields.get("service", "")] = fields.get("port", "")
        self._say(rank, "cmd=publish_result rc=0 msg=success info=ok")

    def _on_unpublish_name(self, rank: Rank, fields: dict[str, str]) -> None:
        known = self.services.pop(fields.get("service", ""), None)
        answer = "rc=-1 msg=not_published" if known is None else "rc=0 msg=success info=ok"
        self._say(rank, f"cmd=unpublish_result {answer}")

    def _on_lookup_name(self, rank: Rank, fields: dict[str, str]) -> None:
        port = self.services.get(fields.get("service", ""))
        if port is None:
            self._say(rank, "cmd=lookup_result rc=-1 msg=not_published")
        else:
            self._say(rank, f"cmd=lookup_result rc=0 msg=success info=ok port={port}")

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()
