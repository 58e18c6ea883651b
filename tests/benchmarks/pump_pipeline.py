"""How fast the pipeline steps of the XML pump are as a library, next to those of the package `xml-pipeline`.

The same message in each one's own envelope: a sender, an addressee, a thread, a payload of three typed fields.
The peer is called by the step functions that its package names (`repair_step`, `c14n_step`,
`envelope_validation_step`, `payload_extraction_step`, `xsd_validation_step`, `deserialization_step`), found by
`dir()` and their docstrings, with a payload class made by its own `xmlify`. It has all steps that ours has, so
the same work is compared: well-formed bytes in, a checked instance out. The differences: the peer's steps are
coroutines, awaited one after the other in one task; its C14N is of the whole document, ours of the payload,
which is what is kept; ours looks for DOCTYPEs, limits and claimed senders, which its steps do not promise.
In turns, so that a busy moment hits both; medians.
"""

# No `from __future__ import annotations` here: the peer's xmlify reads annotations as types.
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from lxml import etree  # type: ignore[import-untyped]
from third_party.xmlable import xmlify
from xml_pipeline.message_bus.message_state import MessageState
from xml_pipeline.message_bus.steps.c14n import c14n_step
from xml_pipeline.message_bus.steps.deserialization import deserialization_step
from xml_pipeline.message_bus.steps.envelope_validation import envelope_validation_step
from xml_pipeline.message_bus.steps.payload_extraction import payload_extraction_step
from xml_pipeline.message_bus.steps.repair import repair_step
from xml_pipeline.message_bus.steps.xsd_validation import xsd_validation_step

from connectors.doors.xml_pump import Pipeline, payload, payload_type_of
from connectors.plumbing.xml_wire.envelope import wrapped

THREAD = "0b5e7c1e-2f7b-4f0e-9f1c-1234567890ab"
ROUND_S = 0.2
PEER_STEPS = {
    "repair": repair_step,
    "canonicalization": c14n_step,
    "envelope": envelope_validation_step,
    "extraction": payload_extraction_step,
    "payload": xsd_validation_step,
    "value": deserialization_step,
}


@payload("calculate", namespace="urn:example:calculator:1")
@dataclass
class Calculate:
    """The payload, as ours."""

    expression: str
    digits: int
    rounded: bool


@xmlify
@dataclass
class PeerCalculate:
    """The payload, as the peer's."""

    expression: str
    digits: int
    rounded: bool


CONTENT = "<{0}>(12 + 30) * 7 &lt; 300</{0}><{1}>4</{1}><{2}>true</{2}>"
OURS = wrapped(
    (
        '<calculate xmlns="urn:example:calculator:1">'
        + CONTENT.format("expression", "digits", "rounded")
        + "</calculate>"
    ).encode(),
    sender="ann",
    to="calculator",
    thread=THREAD,
)
PEERS = (
    '<message xmlns="https://xml-pipeline.org/ns/envelope/v1"><meta><from>ann</from><to>calculator</to>'
    f'<thread>{THREAD}</thread></meta><PeerCalculate xmlns="">'
    + CONTENT.format("Expression", "Digits", "Rounded")
    + "</PeerCalculate></message>"
).encode()


def ours_per_s(pipeline: Pipeline) -> Callable[[float], float]:
    """Documents a second of ours, for so many seconds."""

    def run(seconds: float) -> float:
        count, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            for _ in range(100):
                pipeline.run(OURS)
            count += 100
        return count / took

    return run


async def peer_taken(schema: Any) -> Any:
    """One document through the peer's steps."""
    state = MessageState(raw_bytes=PEERS, metadata={"schema": schema, "payload_class": PeerCalculate})
    for step in PEER_STEPS.values():
        state = await step(state)
    return state


def peer_per_s(schema: Any) -> Callable[[float], float]:
    """The same of the peer."""

    async def run(seconds: float) -> float:
        count, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            for _ in range(100):
                await peer_taken(schema)
            count += 100
        return count / took

    return lambda seconds: asyncio.run(run(seconds))


def step_us(pipeline: Pipeline, runs: int = 2000) -> dict[str, float]:
    """Median microseconds of each of our steps."""
    taken = [pipeline.run(OURS, timed=True).step_ns for _ in range(runs)]
    return {step: round(statistics.median(t[step] for t in taken) / 1000, 2) for step in taken[0]}


def check(pipeline: Pipeline, schema: Any) -> None:
    """Both understand the document, all of it. Raises RuntimeError."""
    ours, peers = pipeline.run(OURS).value, asyncio.run(peer_taken(schema))
    values = [(v.expression, v.digits, v.rounded) for v in (ours, peers.payload)]
    if values[0] != values[1] or peers.error or (peers.to_id, peers.thread_id) != ("calculator", THREAD):
        raise RuntimeError(f"not the same: {values}, {peers.error}")


def measure_pipeline(seconds: float) -> dict[str, Any]:
    """Rates of both in turns, for about so many seconds in all, and what our steps take."""
    pipeline, schema = Pipeline(payload_type_of(Calculate)), etree.XMLSchema(PeerCalculate.xsd())  # type: ignore[attr-defined]  # of @xmlify
    check(pipeline, schema)
    runs = {"ours": ours_per_s(pipeline), "peer": peer_per_s(schema)}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(3, round(seconds / ROUND_S / 2))):
        for name, run in runs.items():
            rates[name].append(run(ROUND_S))
    return {
        "pipeline_per_s": round(statistics.median(rates["ours"])),
        "peer": f"xml-pipeline {version('xml-pipeline')}",
        "peer_per_s": round(statistics.median(rates["peer"])),
        "peer_steps": list(PEER_STEPS),
        "step_us": step_us(pipeline),
        "document_bytes": {"ours": len(OURS), "peer": len(PEERS)},
    }
