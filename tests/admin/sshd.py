"""A real OpenSSH server for tests: own configuration, keys, port and log; loopback only."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import scheduler

ROOT = Path(scheduler.__file__).resolve().parents[1]


def find_sshd() -> str | None:
    """The server's absolute path (it must be started by it)."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def free_port(address: str) -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def make_key(path: Path) -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


def make_python(path: Path) -> Path:
    """An interpreter for the far side that finds these packages, installed or not."""
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


@dataclass
class Sshd:
    """One server process in the folder ``folder``."""

    folder: Path
    address: str
    port: int
    client_key: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def host_key(self) -> Path:
        return self.folder / "host_key"

    def known_hosts_line(self) -> str:
        kind, key, *_ = self.host_key.with_suffix(".pub").read_text().split()
        return f"[{self.address}]:{self.port} {kind} {key}\n"

    def start(self, *extra: str) -> None:
        """Start and wait until it accepts connections."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        binary = find_sshd()
        assert binary is not None
        config = self.folder / "sshd_config"
        config.write_text(
            "\n".join(
                (
                    *extra,  # the first value of a keyword counts
                    f"ListenAddress {self.address}:{self.port}",
                    f"HostKey {self.host_key}",
                    f"AuthorizedKeysFile {self.client_key}.pub",
                    f"PidFile {self.folder}/sshd.pid",
                    "StrictModes no",
                    "UsePAM no",
                    "PasswordAuthentication no",
                    "KbdInteractiveAuthentication no",
                    "PermitRootLogin prohibit-password",
                    "MaxStartups 100",
                    "LogLevel VERBOSE",
                )
            )
            + "\n"
        )
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [binary, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 10
        while True:
            if self.process.poll() is not None:
                raise RuntimeError((self.folder / "sshd.log").read_text())
            with socket.socket() as sock:
                if sock.connect_ex((self.address, self.port)) == 0:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError("sshd does not listen")
            time.sleep(0.02)

    def sessions(self) -> list[int]:
        """Pids of the processes that serve the connections."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def cut(self) -> None:
        """End every connection, the server stays."""
        for pid in self.sessions():
            os.kill(pid, 9)

    def stop(self) -> None:
        """End the server and its connections."""
        if self.process is None:
            return
        if self.process.poll() is None:
            sessions = self.sessions()
            self.process.terminate()
            self.process.wait(10)
            for pid in sessions:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
        self.process = None


def make_sshd(folder: Path, address: str, client_key: Path) -> Sshd:
    """A server that is not started yet."""
    folder.mkdir()
    make_key(folder / "host_key")
    return Sshd(folder, address, free_port(address), client_key)
