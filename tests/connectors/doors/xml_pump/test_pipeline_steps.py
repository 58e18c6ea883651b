"""The pipeline's steps and their order (XP-02), the system's pipeline (XP-10), the cache of schemas (XP-01)."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from connectors.doors.xml_pump import Pipeline, payload, payload_type_of, to_xml
from connectors.plumbing.xml_payloads.huh import Huh, huh
from connectors.plumbing.xml_payloads.payload_types import cached_schema
from connectors.plumbing.xml_wire.documents import Faulty, XmlRefused
from connectors.plumbing.xml_wire.envelope import open_document, text_payload
from tests.connectors.doors.xml_pump.pump_payloads import GOOD, SPACE, Calculate, calculate, enveloped

KIND = payload_type_of(Calculate)


@pytest.mark.requirement("XP-02")
def test_a_timed_run_names_its_steps_in_their_order() -> None:
    taken = Pipeline(KIND).run(GOOD.encode(), timed=True)
    assert list(taken.step_ns) == ["repair", "canonicalization", "envelope", "extraction", "payload", "value"]
    assert min(taken.step_ns.values()) > 0
    assert Pipeline(KIND).run(GOOD.encode()).step_ns == {}
    assert taken.value == Calculate("1 + 2")


@pytest.mark.requirement("XP-02")
def test_the_first_step_that_fails_is_the_one_that_is_told() -> None:
    wrong = enveloped(calculate("<digits>x</digits>"), "<to>../x</to>")
    for document, step in (
        (wrong, "envelope"),
        (wrong.replace("../", ""), "payload"),
        (enveloped(calculate(f"<expression/><digits>{'9' * 4001}</digits>")), "value"),
    ):
        with pytest.raises(Faulty) as told:
            Pipeline(KIND).run(document.encode())
        assert told.value.step == step
    with pytest.raises(XmlRefused):
        Pipeline(KIND).run(b"<!DOCTYPE a>" + wrong.encode())


@pytest.mark.requirement("XP-02")
def test_a_fault_tells_what_was_repaired_before_it() -> None:
    document = enveloped(calculate("<expression>1 & 2</expression><wrong/>"))
    with pytest.raises(Faulty) as told:
        Pipeline(KIND).run(document.encode())
    assert told.value.notes == ("escaped an & that begins no reference",)
    assert b"escaped an &amp; that begins no reference" in huh(told.value, about_tag="calculate")


@pytest.mark.requirement("XP-02")
def test_a_huh_says_what_was_wrong_and_what_would_be_right() -> None:
    with pytest.raises(Faulty) as told:
        Pipeline(KIND).run(GOOD.replace("expression>", "formula>").encode())
    found = Pipeline(payload_type_of(Huh)).run_payload(huh(told.value, about_tag="calculate"))
    assert (found.about, found.step) == ("calculate", "payload")
    assert found.why == "Element 'formula': This element is not expected. Expected is ( expression )."
    assert Pipeline(KIND).run_payload(found.expected.encode())
    found = Pipeline(payload_type_of(Huh)).run_payload(
        huh("it took too long\x07", about_tag=None, step="handler")
    )
    assert found == Huh("", "handler", "it took too long\ufffd", "")


@pytest.mark.requirement("XP-10")
def test_the_system_takes_every_payload_and_refuses_what_all_refuse() -> None:
    system = Pipeline(None)
    for root in ("boot", "whatever"):
        taken = system.run(enveloped(f'<{root} xmlns="urn:any:1" a="1"><b/></{root}>').encode())
        assert (taken.message.root_tag, taken.value.tag) == (root, f"{{urn:any:1}}{root}")
    with pytest.raises(Faulty, match="no payload"):
        system.run(enveloped("").encode())
    with pytest.raises(XmlRefused, match="DOCTYPE"):
        system.run(b"<!DOCTYPE a>" + GOOD.encode())
    text = system.run_payload(text_payload("ask", "Is it < 2?"))
    assert (text.get("kind"), text.text) == ("ask", "Is it < 2?")


def test_a_payload_of_another_door_is_parsed_as_carefully_as_a_document() -> None:
    pipeline = Pipeline(KIND)
    assert pipeline.run_payload(calculate().encode()) == Calculate("1 + 2")
    assert pipeline.run_payload(calculate("<expression>a & b</expression>").encode()) == Calculate("a & b")
    for body in (b"", b"hello", b"<!DOCTYPE a>" + calculate().encode(), calculate().encode("utf-16")):
        with pytest.raises(XmlRefused):
            pipeline.run_payload(body)
    with pytest.raises(Faulty, match="asked for is <calculate"):
        pipeline.run_payload(b"<calculate/>")


@pytest.mark.long
@pytest.mark.requirement("XP-01")
def test_threads_may_share_a_pipeline_and_each_gets_its_own_faults() -> None:
    pipeline = Pipeline(KIND)

    def told(number: int) -> str:
        if number % 2:
            return str(pipeline.run(GOOD.replace("1 + 2", str(number)).encode()).value.expression)
        with pytest.raises(Faulty) as fault:
            pipeline.run(GOOD.replace("expression>", f"wrong-{number}>").encode())
        return fault.value.why

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(told, range(2000)))
    for number, text in enumerate(found):
        assert text == str(number) if number % 2 else f"'wrong-{number}'" in text


@pytest.mark.requirement("XP-01")
def test_a_schema_is_cached_and_a_changed_class_makes_the_next_version(tmp_path: Path) -> None:
    folder = tmp_path / "calculator" / "calculate"
    for _ in range(2):
        assert cached_schema(tmp_path, "calculator", KIND).validate(open_tree(calculate()))
        assert [path.name for path in folder.iterdir()] == ["v1.xsd"]
    assert (folder / "v1.xsd").read_text() == KIND.xsd
    changed = payload("calculate", namespace=SPACE)(dataclasses.make_dataclass("Changed", [("formula", str)]))
    schema = cached_schema(tmp_path, "calculator", payload_type_of(changed))
    assert not schema.validate(open_tree(calculate()))
    # Changed back: the newest is what the class says, so that is the third.
    cached_schema(tmp_path, "calculator", KIND)
    assert sorted(path.name for path in folder.iterdir()) == ["v1.xsd", "v2.xsd", "v3.xsd"]
    # A file that is no version, and one that a crash has left, are no schema.
    (folder / "v4.xsd.bak").write_text("x")
    (folder / "v4.xsd").write_text("")
    assert Pipeline(KIND, cached_schema(tmp_path, "calculator", KIND)).run(GOOD.encode()).value
    assert (folder / "v5.xsd").read_text() == KIND.xsd


@pytest.mark.requirement("XP-01")
def test_many_who_ask_for_a_schema_at_once_make_one_version(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: cached_schema(tmp_path, "calculator", KIND), range(64)):
            pass
    assert [path.name for path in (tmp_path / "calculator" / "calculate").iterdir()] == ["v1.xsd"]


@pytest.mark.parametrize("listener", ["", "../x", "a/b", "/x", ".", "é"])
def test_a_listener_that_is_no_name_has_no_folder(tmp_path: Path, listener: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        cached_schema(tmp_path / "cache", listener, KIND)
    assert not (tmp_path / "cache").exists()


def open_tree(text: str) -> object:
    """The tree of a payload."""
    return Pipeline(None).run_payload(text.encode())


def test_what_is_written_is_what_a_document_holds() -> None:
    assert open_document(enveloped(to_xml(Calculate("1 < 2")).decode()).encode()).payload == to_xml(
        Calculate("1 < 2")
    )
