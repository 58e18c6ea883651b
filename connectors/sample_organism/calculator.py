"""The calculator: `<calculate>` in, `<result>` out."""

from __future__ import annotations

from decimal import Context, Decimal

from connectors.sample_organism.payloads import Calculate, Result
from connectors.xml_payloads.payload_types import to_xml
from connectors.xml_pump.handlers import ListenerMessage, handles

_NUMBERS = Context(prec=28)


@handles(Calculate)
async def calculate(message: ListenerMessage) -> bytes:
    """The result; a division by zero raises, and who asked gets a <huh>."""
    asked: Calculate = message.payload
    first, second = asked.first, asked.second
    value: Decimal
    if asked.operation == "add":
        value = _NUMBERS.add(first, second)
    elif asked.operation == "subtract":
        value = _NUMBERS.subtract(first, second)
    elif asked.operation == "multiply":
        value = _NUMBERS.multiply(first, second)
    else:
        value = _NUMBERS.divide(first, second)
    return to_xml(Result(value))
