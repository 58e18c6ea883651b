"""Fixtures of the agent's side: a key in a file, and a server that knows it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from connectors.programs.local_stack import free_port
from tests.connectors.agent_sdk.signed_mcp.signed_door import SignedDoor
from trunkline_agent.mcp.signing import new_key_pair


@cache
def key_pair(number: int = 0) -> tuple[bytes, str]:
    """A key pair of the tests: making one takes a while."""
    return new_key_pair()


def write_key(path: Path, private_pem: bytes) -> Path:
    """A key file as an agent gets it, put in the place of the one that is there."""
    fresh = path.with_suffix(".new")
    fresh.touch(0o600)
    fresh.write_bytes(private_pem)
    return fresh.replace(path)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """The key of `ann`."""
    return write_key(tmp_path / "ann.pem", key_pair()[0])


@pytest.fixture
def door() -> Iterator[SignedDoor]:
    """A door that is running and knows the key of `ann`."""
    with SignedDoor(free_port(), {"ann": key_pair()[1]}).running() as running:
        yield running
