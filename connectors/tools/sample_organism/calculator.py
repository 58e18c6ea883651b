"""The calculator: `<calculate>` in, `<result>` out."""

from __future__ import annotations

from decimal import Context, Decimal

from connectors.doors.xml_pump.handlers import ListenerMessage, handles
from connectors.plumbing.xml_payloads.payload_types import to_xml
from connectors.tools.sample_organism.payloads import Calculate, Result

_NUMBERS = Context(prec=28)


@handles(Calculate)
async def calculate(message: ListenerMessage) -> bytes:
    """Calculate with the two numbers of a `<calculate>`, and return the `<result>` as XML.

    The payload's operation is add, subtract, multiply or divide. A division by zero raises a decimal exception.
    The pump then answers the sender with a `<huh>`.
    """
    asked: Calculate = message.payload
    first, second = asked.first, asked.second
    value: Decimal = getattr(_NUMBERS, asked.operation)(first, second)
    return to_xml(Result(value))
