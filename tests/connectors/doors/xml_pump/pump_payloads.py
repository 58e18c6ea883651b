"""Payload classes and documents that the tests of the pump's pipeline share."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Literal

from connectors.doors.xml_pump import payload

THREAD = "0b5e7c1e-2f7b-4f0e-9f1c-1234567890ab"
HEAD = '<message xmlns="urn:trunkline:envelope:1">'
SPACE = "urn:example:calculator:1"


@payload("calculate", namespace=SPACE)
@dataclass
class Calculate:
    """Work out an expression."""

    expression: str = field(metadata={"description": "for example 1 + 2"})
    digits: int = 2
    tag: list[str] = field(default_factory=list)


class Colour(Enum):
    """The colour of a thing."""

    RED = "red"
    DEEP_BLUE = "deep blue <&>"
    SEVEN = 7


@dataclass(frozen=True)
class Part:
    """A piece of a thing."""

    name: str
    weight: float | None = None


@payload()
@dataclass(slots=True)
class EveryKind:
    """A payload with a field of each type."""

    text: str
    whole: int
    number: float
    yes: bool
    exact: Decimal
    moment: datetime
    day: date
    colour: Colour
    mode: Literal["fast", "slow", 1]
    part: Part
    maybe: str | None = None
    maybe_part: Part | None = None
    numbers: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    tries: int = 3


def calculate(inner: str = "<expression>1 + 2</expression>") -> str:
    """A payload of the listener."""
    return f'<calculate xmlns="{SPACE}">{inner}</calculate>'


def enveloped(payload_text: str, heads: str = "<to>calculator</to>") -> str:
    """A document."""
    return f"{HEAD}{heads}{payload_text}</message>"


GOOD = enveloped(calculate())
