"""Ports that are handed out, and not yet listened at."""

from __future__ import annotations

import subprocess
import sys

import pytest

from connectors.local_stack import ports
from schemas.errors import TrunklineError
from schemas.settings import PROJECT_ROOT

_OTHER = """
import sys
from connectors.local_stack import ports
ports._FIRST, ports._LAST = int(sys.argv[1]), int(sys.argv[2])
print(ports.free_port(), flush=True)
sys.stdin.read()
"""


def two_free() -> int:
    """The first of two free ports in a row."""
    return next(p for p in range(20_000, 32_000, 2) if ports.port_is_free(p) and ports.port_is_free(p + 1))


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
