"""A machine of its own for an agent: a network namespace that reaches one port, and no checkout.

The two ends of a virtual cable are in two new namespaces. The agent's has nothing else. In the hub's, a proxy
listens and passes connections on to the loopback of the tests, so no server of ours leaves loopback. This needs
root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from schemas.settings.settings import PROJECT_ROOT
from tests.programs import required_program
from tests.tcp_proxy import TcpProxy

# A network for measuring between machines (RFC 2544), which routers do not pass on.
HUB, AGENT, BITS = "198.18.0.1", "198.18.0.2", 30
LOOPBACK = "127.0.0.1"
COMMAND_S = 30
_NET = 0x40000000  # CLONE_NEWNET
_NAMES = "trunkline-test"
_RUN = Path("/run/netns")
# Hides each of the first arguments, up to `--`, below an empty folder of this process alone, and runs the rest.
_HIDDEN = 'while [ "$1" != -- ]; do mount -t tmpfs none "$1"; shift; done; shift; exec "$@"'


class Machine(Protocol):
    """Where an agent runs: how it reaches the server of the tests, and what its commands look like."""

    is_apart: bool
    url: str

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """The command that runs `command` on the machine."""


@dataclass(frozen=True)
class SameMachine:
    """The machine of the tests, for a user who may make no namespaces."""

    url: str
    is_apart: bool = False

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """The command itself."""
        return list(map(str, command))


@dataclass(frozen=True)
class MachineApart:
    """A machine that has the network namespace of the agent, and no checkout."""

    url: str
    namespace: str
    is_apart: bool = True

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """A command that runs `command` there. Its process becomes that of `command`."""
        program = ["ip", "netns", "exec", self.namespace]
        program += ["unshare", "--mount", "--propagation", "private", "sh", "-euc", _HIDDEN, "sh"]
        return [*program, *map(str, hidden_folders()), "--", *map(str, command)]


def hidden_folders() -> list[Path]:
    """The checkout and the folders of its virtual environment, wherever links lead."""
    found = {PROJECT_ROOT.resolve(), Path(sys.prefix).resolve()}
    return sorted(path for path in found if not any(other in path.parents for other in found))


@contextlib.contextmanager
def machine_apart(port: int) -> Iterator[Machine]:
    """Yield a machine that reaches the port of the loopback by its `url`, apart if this user may make one."""
    if not may_make_namespaces():
        yield SameMachine(f"http://{LOOPBACK}:{port}")
        return
    with (
        cabled_namespaces() as (hub, agent),
        contextlib.closing(TcpProxy(listener_in(hub, HUB), port)) as proxy,
    ):
        yield MachineApart(f"http://{HUB}:{proxy.port}", agent)


@contextlib.contextmanager
def cabled_namespaces() -> Iterator[tuple[str, str]]:
    """Yield the names of two new network namespaces, of the hub and of the agent, with a cable between them."""
    remove_left_ones()
    hub, agent = (f"{_NAMES}-{os.getpid()}-{part}" for part in ("hub", "agent"))
    try:
        _ip("netns", "add", hub)
        _ip("netns", "add", agent)
        _ip("link", "add", "cable", "netns", hub, "type", "veth", "peer", "name", "cable", "netns", agent)
        for namespace, address in ((hub, HUB), (agent, AGENT)):
            _ip("-n", namespace, "address", "add", f"{address}/{BITS}", "dev", "cable")
            _ip("-n", namespace, "link", "set", "cable", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
        yield hub, agent
    finally:
        for namespace in (hub, agent):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=COMMAND_S)


def may_make_namespaces() -> bool:
    """True if this process is root and the kernel lets it make network and mount namespaces."""
    if os.geteuid() != 0:
        return False
    required_program("iproute2", "ip")
    trial = [
        "unshare",
        "--net",
        "--mount",
        "--propagation",
        "private",
        "mount",
        "-t",
        "tmpfs",
        "none",
        str(_RUN.parent),
    ]
    return shutil.which("unshare") is not None and subprocess.run(trial, capture_output=True).returncode == 0


def remove_left_ones() -> None:
    """Remove the namespaces of test processes that were killed."""
    for file in _RUN.glob(f"{_NAMES}-*"):
        pid = file.name.removeprefix(f"{_NAMES}-").partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "delete", file.name], capture_output=True, timeout=COMMAND_S)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def unplug(namespace: str) -> None:
    """Take a namespace off its cable, so that its connections end without a word."""
    _ip("-n", namespace, "link", "set", "cable", "down")


def listener_in(namespace: str, address: str) -> socket.socket:
    """A listening socket in a network namespace."""
    return socket_in(namespace, lambda: socket.create_server((address, 0)))


def socket_in(namespace: str, create: Callable[[], socket.socket]) -> socket.socket:
    """A socket in a network namespace. It stays in the namespace in which it was made."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        # Only this thread changes its namespace, and it ends.
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with (_RUN / namespace).open("rb") as file:
                if libc.setns(file.fileno(), _NET):
                    raise OSError(ctypes.get_errno(), f"setns {namespace}")
            made.append(create())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
