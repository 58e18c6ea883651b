"""Handlers of the tests: what an organism file and commands name."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.doors.xml_pump.handlers import handles
from connectors.plumbing.xml_payloads.payload_types import payload, to_xml

MODULE = "tests.connectors.doors.out_of_band.sample_handlers"
NAMESPACE = "urn:example:sums:1"


@payload("sum", namespace=NAMESPACE)
@dataclass
class Sum:
    """Adds numbers."""

    first: int
    second: int


@payload("total", namespace=NAMESPACE)
@dataclass
class Total:
    """The sum of both numbers."""

    value: int


@handles(Sum)
async def add(message):
    """Answers with the total."""
    return to_xml(Total(message.payload.first + message.payload.second))


@handles(Total)
async def note(message):
    """Takes a total, and says nothing."""


not_a_handler = 1
