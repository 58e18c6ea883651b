"""Fixtures of the matrix: one gateway in memory for all its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.matrix.ground import Ground
from tests.matrix.memory_gateway import MemoryGateway


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """The gateway with its callers."""
    with MemoryGateway(tmp_path_factory.mktemp("matrix")).running() as gateway:
        yield Ground(gateway)
