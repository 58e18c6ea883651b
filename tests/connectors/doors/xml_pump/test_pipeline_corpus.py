"""The corpus of documents (XP-02, XP-03): what must come of each, and that no file is read for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from connectors.doors.xml_pump import Pipeline, payload_type_of, to_xml
from connectors.plumbing.xml_payloads.huh import Huh, huh
from connectors.plumbing.xml_wire.documents import Faulty, XmlRefused
from connectors.plumbing.xml_wire.envelope import open_document, wrapped
from tests.connectors.doors.xml_pump.document_corpus import CANARY, CORPUS, Case, Outcome
from tests.connectors.doors.xml_pump.pump_payloads import Calculate

SECRET = "the canary is dead"
PIPELINE = Pipeline(payload_type_of(Calculate))


def document_of(case: Case, folder: Path) -> bytes:
    """Its bytes, with the address of a file that nobody may read."""
    canary = folder / "canary.txt"
    canary.write_text(SECRET)
    return case.document.replace(CANARY.encode(), canary.as_uri().encode())


def test_the_corpus_is_large_and_names_each_document_once() -> None:
    assert len(CORPUS) >= 60
    assert len({case.name for case in CORPUS}) == len(CORPUS)
    assert {case.outcome for case in CORPUS} == set(Outcome)


@pytest.mark.requirement("XP-02")
@pytest.mark.requirement("XP-03")
@pytest.mark.parametrize("case", CORPUS, ids=[case.name for case in CORPUS])
def test_each_document_of_the_corpus_has_its_outcome(case: Case, tmp_path: Path) -> None:
    document = document_of(case, tmp_path)
    began = time.thread_time()
    told, notes, value = "", (), None
    try:
        taken = PIPELINE.run(document)
    except XmlRefused as refused:
        outcome, told = Outcome.REFUSED, str(refused)
        assert refused.reason in ("malformed", "too_large")
    except Faulty as fault:
        outcome, told = Outcome.HUH, fault.why
        answer = huh(fault, about_tag=None)
        assert fault.expected, "nothing says what would be right"
        # The sender gets a payload that its own pipeline takes.
        assert isinstance(Pipeline(payload_type_of(Huh)).run_payload(answer), Huh)
        told_all = answer.decode()
        assert SECRET not in told_all
    else:
        notes, value = taken.notes, taken.value.expression
        outcome = Outcome.NOTED if notes else Outcome.ACCEPTED
        again = PIPELINE.run(wrapped(taken.message.payload, sender="a", to=None, thread=None))
        assert (again.value, again.message.payload) == (taken.value, taken.message.payload)
    assert time.thread_time() - began < 5
    assert outcome is case.outcome, (told, notes)
    assert case.says in (told or "; ".join(notes))
    assert SECRET not in told + "".join(notes) + (value or "")
    if value is not None:
        assert value == case.value


@pytest.mark.requirement("XP-03")
@pytest.mark.parametrize(
    ("document", "limit_s"), [(b"x" * 50_000_000, 0.1), (b"<a>" * 300_000, 0.5)], ids=["50 MB", "300,000 deep"]
)
def test_what_is_far_beyond_a_limit_is_refused_at_once(document: bytes, limit_s: float) -> None:
    began = time.thread_time()
    with pytest.raises(XmlRefused) as refused:
        open_document(document)
    assert time.thread_time() - began < limit_s
    assert refused.value.reason == "too_large"


def test_what_is_told_quotes_no_value_and_little_else() -> None:
    secret = "hunter2-" * 40
    document = to_xml(Calculate("1")).replace(
        b"</expression>", f"</expression><digits>{secret}</digits>".encode()
    )
    with pytest.raises(Faulty) as told:
        PIPELINE.run_payload(document)
    assert "hunter2" not in huh(told.value, about_tag="calculate").decode()
    with pytest.raises(Faulty) as told:
        PIPELINE.run_payload(document.replace(b"digits", b"d" * 3000))
    assert huh(told.value, about_tag="x" * 3000).count(b"d" * 201) == 0
