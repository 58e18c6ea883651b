"""Listeners of `bench pump`: each answers what it is asked, and does nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.doors.xml_pump.handlers import ListenerMessage, handles
from connectors.plumbing.xml_payloads.payload_types import payload, to_xml

NAMESPACE = "urn:trunkline:bench:1"
MOST = 20


@payload("echoed", namespace=NAMESPACE)
@dataclass(frozen=True)
class Echoed:
    """The text of the echo's message."""

    said: str


def _echo(number: int) -> object:
    @payload(f"echo{number}", namespace=NAMESPACE)
    @dataclass(frozen=True)
    class Echo:
        """Say this."""

        said: str

    @handles(Echo)
    async def echo(message: ListenerMessage) -> bytes:
        """The same words."""
        return to_xml(Echoed(message.payload.said))

    return echo


for _number in range(MOST):
    globals()[f"echo{_number}"] = _echo(_number)


def organism(listeners: int, concurrency: int) -> str:
    """An organism file with so many of them."""
    rows = "".join(
        f"  - name: echo{n}\n    root_tag: echo{n}\n    namespace: {NAMESPACE}\n"
        f"    handler: {__name__}:echo{n}\n    concurrency: {concurrency}\n    capability: says it again\n"
        for n in range(listeners)
    )
    return f"listeners:\n{rows}"
