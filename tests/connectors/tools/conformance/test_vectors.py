"""The vectors of canonical JSON and of signatures are those of the library, and the page's are among them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from connectors.tools.conformance.vector_checks import vectors
from tests.source_files import text_of
from trunkline_agent.wire.signing import SIGNATURE_FIELD, Signer, sign_event, signed_bytes
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode, decode_slowly

CANONICAL = vectors("canonical_json")
PAGE = "docs/how-to/publish_from_another_language.md"


def ids(vector: dict[str, Any]) -> str:
    return str(vector["name"])


@pytest.mark.requirement("CF-03")
@pytest.mark.parametrize("vector", CANONICAL["canonical"], ids=ids)
def test_a_vector_has_the_canonical_form_of_the_library(vector: dict[str, Any]) -> None:
    text = vector["json"].encode()
    for document in (decode(text)[0], decode_slowly(text)):
        assert canonical(document).decode() == vector["canonical"]
    assert canonical(decode(vector["canonical"].encode())[0]).decode() == vector["canonical"]


@pytest.mark.requirement("CF-03")
@pytest.mark.parametrize("vector", CANONICAL["refused"], ids=ids)
def test_a_refused_vector_is_refused_by_the_library(vector: dict[str, Any]) -> None:
    given = bytes.fromhex(vector["hex"])
    for parse in (decode, decode_slowly):
        with pytest.raises(MalformedJsonError):
            parse(given)


@pytest.mark.requirement("CF-03")
@pytest.mark.parametrize("vector", vectors("signing")["events"] + vectors("signing")["more_events"], ids=ids)
def test_a_signature_vector_is_that_of_the_library(vector: dict[str, Any]) -> None:
    event = decode(vector["event"].encode())[0]
    assert signed_bytes(event).decode() == vector["signed"]
    assert sign_event(event, vector["secret"])["data"][SIGNATURE_FIELD] == vector["hmac_sig"]


@pytest.mark.requirement("CF-03")
@pytest.mark.parametrize("vector", vectors("signing")["messages"], ids=ids)
def test_a_message_vector_is_that_of_the_library(vector: dict[str, Any]) -> None:
    message = decode(vector["payload"].encode())[0]
    message.pop(SIGNATURE_FIELD, None)
    assert canonical(message).decode() == vector["signed"]
    assert Signer(vector["secret"]).hexdigest(canonical(message)) == vector["hmac_sig"]


@pytest.mark.requirement("CF-03")
def test_the_vectors_of_the_page_are_among_those_of_the_files() -> None:
    lists = [json.loads(block) for block in re.findall(r"```json\n(\[\n.*?)```", text_of(PAGE), re.DOTALL)]
    assert len(lists) == 2
    for found, kind in zip(lists, ("events", "messages"), strict=True):
        assert [one for one in found if one not in vectors("signing")[kind]] == []


@pytest.mark.requirement("CF-03")
def test_the_vectors_have_the_numbers_and_texts_that_clients_get_wrong() -> None:
    accepted = "\n".join(one["canonical"] for one in CANONICAL["canonical"])
    for nasty in ("1e-05", "1e+16", "1e+22", "-0.0", "5e-324", "1.0", str(2**53 + 1), str(2**63 - 1)):
        assert re.search(rf"(?<![\d.]){re.escape(nasty)}(?![\d.])", accepted), nasty
    for text in ("\u2028", "\U0001f600", "\\u0000", "\x7f", "[" * 64):
        assert text in accepted
    refused = {one["name"] for one in CANONICAL["refused"]}
    assert refused >= {"a key twice", "a lone high surrogate", "65 levels", "2^63", "NaN"}
