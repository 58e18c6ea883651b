"""Ports that are handed out, and not yet listened at."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.programs.local_stack import ports
from connectors.programs.local_stack.ports import LOOPBACK
from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.errors import TrunklineError

_OTHER = """
import sys
from connectors.programs.local_stack import ports
from connectors.programs.local_stack.ports import LOOPBACK
ports._FIRST, ports._LAST = int(sys.argv[1]), int(sys.argv[2])
print(ports.free_port(), flush=True)
sys.stdin.read()
"""


def two_free() -> int:
    """The first of two free ports in a row, above the range from which other tests take theirs: those hold
    their ports by name before anything listens there, which `port_is_free` cannot see.
    """
    above = range(ports._LAST, 32_768, 2)  # and below the kernel's range for outgoing connections
    return next(p for p in above if ports.port_is_free(p) and ports.port_is_free(p + 1))


@pytest.mark.long
def test_a_port_that_a_living_process_got_is_given_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first = two_free()
    command = [sys.executable, "-c", _OTHER, str(first), str(first + 2)]
    with subprocess.Popen(
        command, cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        monkeypatch.setattr(ports, "_FIRST", first)
        monkeypatch.setattr(ports, "_LAST", first + 2)
        ours = ports.free_port()
        assert {ours, theirs} == {first, first + 1}
        with pytest.raises(TrunklineError, match="no free port"):
            ports.free_port()
        other.communicate(timeout=20)
    assert ports.free_port() == theirs, "its owner is gone"


def test_a_port_that_an_outgoing_connection_has_is_explained_by_the_kernels_range() -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        port = client.getsockname()[1]
        with pytest.raises(TrunklineError) as raised:
            ports.require_free(port, "mqtt.port")
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    said = str(raised.value)
    assert f"port {port} (setting mqtt.port) is taken by another program, or by an outgoing connection" in said
    assert f"from {first} to {last}" in said and "ip_local_port_range" in said
    assert "outgoing" not in ports.port_owner(ports.free_port())
