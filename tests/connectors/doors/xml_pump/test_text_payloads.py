"""Texts of other doors: which of them are payloads of their listener, whatever the kind of the message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from connectors.doors.xml_pump import payload, to_xml
from connectors.doors.xml_pump.dispatcher import Dispatcher
from connectors.doors.xml_pump.handlers import ConversationMessage, ListenerMessage, handles
from connectors.doors.xml_pump.listener_table import TableMaker
from connectors.plumbing.xml_payloads.deliveries import Done, leased_from, listener_from
from connectors.plumbing.xml_wire.documents import XmlLimits

SPACE = "urn:example:texts:1"


@payload("step", namespace=SPACE)
@dataclass
class Step:
    """Something to do."""

    number: int


@handles(Step)
async def step(message: ListenerMessage) -> bytes:
    """Answer with what came."""
    return to_xml(message.payload)


class NoHistory:
    """A conversation in which nothing was said."""

    async def history(self, listener: str, thread: str, limit: int) -> Sequence[ConversationMessage]:
        """Return nothing."""
        return ()


STEP = f'<step xmlns="{SPACE}"><number>7</number></step>'


@pytest.mark.requirement("XB-01")
@pytest.mark.parametrize("kind", ["message", "ask", "step"])
@pytest.mark.parametrize(
    "body",
    [
        STEP,
        json.dumps(STEP),
        json.dumps({"text": STEP}),
        f"<?xml version='1.0'?><!-- <note> --> {STEP}",
        STEP.replace("xmlns=", "xmlns:s=")
        .replace("<number>7</number>", "<s:number>7</s:number>")
        .replace("step", "s:step"),
    ],
    ids=["text", "JSON string", "JSON text", "prolog", "prefix"],
)
def test_a_text_that_is_an_element_of_the_root_tag_is_the_payload_whatever_its_kind(
    tmp_path: Path, kind: str, body: str
) -> None:
    done = delivered(tmp_path, kind=kind, body=body, content_type="text/plain")
    assert done.outcome == "handled", done
    assert "<number>7</number>" in done.answers[0].body


@pytest.mark.requirement("XB-01")
@pytest.mark.parametrize(
    ("body", "about", "why"),
    [
        (f'<step xmlns="{SPACE}"><number>many</number></step>', "step", "number"),
        ('<step xmlns="urn:example:other"/>', "step", "other}step"),
        (f'<stride xmlns="{SPACE}"/>', "message", "text"),
        ("<step by step>", "message", "text"),
        (f"do {STEP}", "message", "text"),
    ],
)
def test_a_text_that_is_no_payload_of_the_listener_is_answered_with_what_would_be_right(
    tmp_path: Path, body: str, about: str, why: str
) -> None:
    done = delivered(tmp_path, kind="message", body=body, content_type="text/plain")
    assert done.outcome == "huh"
    told = done.answers[0].body
    assert f"<about>{about}</about>" in told and why in told and "&lt;step xmlns=" in told, told


def delivered(folder: Path, **fields: str) -> Done:
    """Return what comes of a message to this file's listener."""
    maker, limits = TableMaker(folder, XmlLimits()), XmlLimits()
    row = {"listener": "stepper", "root_tag": "step", "namespace": SPACE, "handler": f"{__name__}:step"}
    dispatcher = Dispatcher(NoHistory(), maker.system_pipeline, limits, 100_000)
    ids = {"listener": "stepper", "message_id": "m7", "request_id": "r", "sender": "ann", "thread": "t"}
    table = maker.make(1, [listener_from(row)])
    return asyncio.run(dispatcher.deliver(leased_from({**ids, **fields}), table)).done
