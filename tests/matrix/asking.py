"""Requests by both ways: the engine serves them as they are, and the careful path with a header more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from connectors.hub.engine.operation import Operation
from tests.matrix.ground import Caller, Ground, Request
from tests.matrix.memory_gateway import Answer
from tests.matrix.samples import SAMPLES
from trunkline_agent.wire.verdicts import ACCEPTED

WAYS = (False, True)
CHANGES = [name for name, sample in SAMPLES.items() if sample.body is not None or name in ("delete_task",)]
KEYED = [name for name in CHANGES if name not in ("report_mqtt_load", "test_webhook")] + ["drain_messages"]
# They change nothing in the log, so they need no Kafka.
UNLOGGED = ("report_mqtt_load", "test_webhook")
PATH_WORDS = {
    "job_id": "ffffffff",
    "name": "no-such-thing",
    "task_id": "no-such-task",
    "token_id": "f" * 12,
    "key_id": "f" * 16,
    "realm": "default",
    "scope": "name",
    "topic": "no-such-topic",
    "message_id": "no-such-message",
}
each_operation = pytest.mark.parametrize("name", SAMPLES)
each_change = pytest.mark.parametrize("name", CHANGES)


def operation(ground: Ground, name: str) -> Operation:
    """Return the declared operation of a sample."""
    return ground.gateway.operations[name]


def address(ground: Ground, name: str, /, **words: str) -> Request:
    """Return a request without a body about things that need not exist."""
    return Request({one: {**PATH_WORDS, **words}[one] for one in operation(ground, name).parameters})


def both(ground: Ground, caller: Caller, name: str, request: Request, **headers: Any) -> Answer:
    """Return the answer to a request for which both ways have the same bytes."""
    direct, careful = (ground.ask(caller, name, request, careful=way, **headers) for way in WAYS)
    for one in (direct, careful):
        one.headers.pop("date")
    assert direct == careful, request
    return careful


class Watched:
    """The records and refusals since it was made."""

    def __init__(self, ground: Ground) -> None:
        self._gateway = ground.gateway
        self._logged, self._refused = len(ground.gateway.log.records), len(ground.gateway.refused)

    @property
    def records(self) -> list[Any]:
        """The accepted records."""
        found = self._gateway.log.records[self._logged :]
        return [record for record, settled in found if settled.verdict == ACCEPTED]

    @property
    def refused(self) -> list[tuple[Any, ...]]:
        """The recorded refusals: reason, principal, route."""
        return [(one[0], *one[2:]) for one in self._gateway.refused[self._refused :]]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return the texts and numbers of a document with the fields that they are in."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, name)
    elif name not in ("broker", "lease", "lease_id", "message_ids"):
        yield name, value
