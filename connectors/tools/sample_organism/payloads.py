"""The payloads of the sample's listeners: one namespace, and one class for each root tag."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from connectors.plumbing.xml_payloads.payload_types import payload

NAMESPACE = "urn:trunkline:sample:1"


@payload("calculate", namespace=NAMESPACE)
@dataclass(frozen=True)
class Calculate:
    """Two numbers and an operation."""

    operation: Literal["add", "subtract", "multiply", "divide"]
    first: Decimal
    second: Decimal


@payload("result", namespace=NAMESPACE)
@dataclass(frozen=True)
class Result:
    """The result of a calculation."""

    value: Decimal


@payload("search", namespace=NAMESPACE)
@dataclass(frozen=True)
class Search:
    """Words to look for."""

    query: str = field(metadata={"description": "the words, separated by spaces"})


@payload("found", namespace=NAMESPACE)
@dataclass(frozen=True)
class Found:
    """The titles that one source has found."""

    source: str
    titles: list[str] = field(default_factory=list)


@payload("boot", namespace=NAMESPACE)
@dataclass(frozen=True)
class Boot:
    """The pump has started."""
