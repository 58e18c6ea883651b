"""The pipeline has an outcome for any input (XP-02, XP-03), and takes again what it has taken."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.doors.xml_pump import Pipeline, payload_type_of
from connectors.plumbing.xml_payloads.huh import huh
from connectors.plumbing.xml_wire.documents import Faulty, XmlRefused
from connectors.plumbing.xml_wire.envelope import open_answer, text_payload, wrapped
from connectors.plumbing.xml_wire.safe_xml import canonical_bytes, repair
from tests.connectors.doors.xml_pump.hostile_documents import DOCUMENTS
from tests.connectors.doors.xml_pump.pump_payloads import Calculate, calculate, enveloped

LISTENER = Pipeline(payload_type_of(Calculate))
SYSTEM = Pipeline(None)
FUZZ_S = 300
# Of the processor's time, so that a busy machine is no fault: the documents are small.
ANSWER_S = 2.0
SEEN: Counter[str] = Counter()


def answered(document: bytes) -> None:
    """Show a document to all ways in. Nothing but the two faults may come, and what is taken stays as it is."""
    began = time.thread_time()
    for pipeline in (LISTENER, SYSTEM):
        try:
            message = pipeline.run(document).message
        except XmlRefused as refused:
            SEEN[refused.reason] += 1
            assert len(str(refused)) < 250
        except Faulty as fault:
            SEEN[fault.step] += 1
            assert len(fault.why) < 1000
            assert huh(fault, about_tag=None)
        else:
            SEEN["noted" if message.notes else "accepted"] += 1
            seen = wrapped(message.payload, sender="ann", to=message.to, thread=message.thread)
            again = pipeline.run(seen).message
            assert (again.payload, again.to, again.thread) == (message.payload, message.to, message.thread)
            assert again.claimed_sender == "ann"
            pipeline.run_payload(message.payload)
            assert open_answer(message.payload)[0].payload == message.payload
    for taken in (LISTENER.run_payload, open_answer):
        try:
            found = taken(document)
        except (XmlRefused, Faulty):
            continue
        for message in found if isinstance(found, list) else []:
            assert canonical_bytes(repair(message.payload, root_tag=message.root_tag).root) == message.payload
    assert time.thread_time() - began < ANSWER_S


@pytest.mark.requirement("XP-02")
@pytest.mark.requirement("XP-03")
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_no_document_raises_anything_else_and_what_is_taken_is_taken_again(document: bytes) -> None:
    answered(document)


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from("ab1;=\"'>&]é“ \n"), max_size=30),
    st.lists(st.sampled_from(["< ", "<1", "<=", "&"])),
)
def test_a_text_that_was_not_escaped_arrives_as_it_was_written(text: str, stray: list[str]) -> None:
    text = "x".join([text, *stray, text])
    # An entity of HTML and a reference mean something else than they say.
    if "&" in text and ";" in text:
        text = text.replace(";", ",")
    taken = LISTENER.run(enveloped(calculate(f"<expression>{text}</expression>")).encode())
    assert taken.value.expression == text
    assert bool(taken.notes) == ("<" in text or "&" in text or "]]>" in text)


@settings(max_examples=100, deadline=None)
@given(st.text(), st.text())
def test_a_message_of_another_door_is_canonical_xml_whatever_it_holds(kind: str, body: str) -> None:
    payload = text_payload(kind, body)
    element = SYSTEM.run_payload(payload)
    assert canonical_bytes(element) == payload
    if body.isprintable() and kind.isprintable():
        assert (element.text or "", element.get("kind")) == (body, kind)


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 120)
def test_five_minutes_of_fuzzing_find_no_crash() -> None:
    examples = settings(
        max_examples=3000, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    fuzz = examples(given(DOCUMENTS)(answered))
    began, before = time.monotonic(), SEEN.copy()
    while time.monotonic() - began < FUZZ_S:
        fuzz()
    seen = SEEN - before
    # All kinds of answers were seen, so it was not only rubbish that was refused.
    assert set(seen) == {"accepted", "noted", "envelope", "payload", "value", "malformed", "too_large"}
