"""Makes a local node look like a host: own host name, own /etc/hosts.

The fork server enters a new UTS and mount namespace before its first fork, so everything it
starts is in there.  As root directly; as an ordinary user through a user namespace that maps
this user to itself (the uid stays; set-uid programs do not work inside).  Where the kernel
does not allow it, the node goes on without.  Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import socket

from nodeagent.taskenv import NodeConfig

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

HOSTS_FILE = "hosts"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: bytes | None, target: bytes, flags: int) -> None:
    _check(_libc.mount(source, target, None, ctypes.c_ulong(flags), None), "mount")


def hosts_text(hosts: dict[str, str], machine: str) -> str:
    """/etc/hosts for a node: localhost, the machine's own lines, every node's address."""
    lines = [
        "127.0.0.1\tlocalhost",
        "::1\tlocalhost ip6-localhost ip6-loopback",
    ]
    for line in machine.splitlines():
        words = line.split("#")[0].split()
        if len(words) > 1 and not set(words[1:]) <= {"localhost", "ip6-localhost", "ip6-loopback"}:
            kept = [word for word in words[1:] if word not in hosts and word != "localhost"]
            if kept:
                lines.append(f"{words[0]}\t{' '.join(kept)}")
    lines += [f"{address}\t{name}" for name, address in hosts.items()]
    return "\n".join(lines) + "\n"


def write_hosts(node_dir: str, hosts: dict[str, str]) -> None:
    """Write NODE_DIR/hosts in place: the namespaces have this very file (inode) mounted."""
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            machine = file.read()
    except OSError:
        machine = ""
    text = hosts_text(hosts, machine).encode()
    path = os.path.join(node_dir, HOSTS_FILE)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
    finally:
        os.close(fd)


def _write(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _enter(config: NodeConfig) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "unshare")
    else:
        _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWUTS), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount(b"none", b"/", MS_REC | MS_PRIVATE)
    socket.sethostname(config.node)
    own = os.path.join(config.dir, HOSTS_FILE)
    if not os.path.exists(own):
        write_hosts(config.dir, config.hosts)
    _mount(os.fsencode(own), b"/etc/hosts", MS_BIND)


def enter(config: NodeConfig) -> str:
    """Enter the namespaces.  Returns "" or why the node does not look like a host.

    A child tries first: a process that got only half of the way could not go on as it was.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            _enter(config)
        except OSError as error:
            text = error.strerror or str(error)
        except Exception as error:
            text = repr(error)
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        reason = file.read().decode()
    os.waitpid(pid, 0)
    if not reason:
        _enter(config)
    return reason
