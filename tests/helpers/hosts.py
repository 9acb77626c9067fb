"""Hosts with addresses of their own on this machine: network namespaces on a bridge (Linux, root, iproute2)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path


class NotPermitted(Exception):
    """There can be no network namespaces here; the text says why."""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass
class Host:
    """A network namespace with one interface."""

    name: str
    address: str
    cable: str
    """The other end of its interface, at the bridge."""
    logs: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program on this host; its output goes to a file."""
        log = (self.logs / f"{self.name}-{len(self.processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | environment,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.logs.glob(f"{self.name}-*.log")))

    def cut_off(self) -> None:
        """Take the cable out."""
        ip("link", "set", self.cable, "down")

    def reconnect(self) -> None:
        ip("link", "set", self.cable, "up")


@contextmanager
def hosts(number: int, logs: Path) -> Iterator[list[Host]]:
    """Yield hosts that reach each other; raise NotPermitted where that cannot be."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        raise NotPermitted("iproute2 is not installed")
    mark = f"sv{os.getpid()}"
    net = f"10.77.{os.getpid() % 250}"
    found = [Host(f"{mark}n{k}", f"{net}.{k + 1}", f"{mark}c{k}", logs) for k in range(number)]
    bridge = f"{mark}b"
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for host in found:
            ip("netns", "add", host.name)
            ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("link", "set", host.cable, "master", bridge, "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield found
    finally:
        for host in found:
            for process in host.processes:
                _end(process)
            for arguments in (["netns", "del", host.name], ["link", "del", host.cable]):
                subprocess.run(["ip", *arguments], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
