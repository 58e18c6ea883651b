"""Signatures (JE-05): the published vectors, the page that explains them, and our fast signer."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold.entries import Entries
from schemas.settings.settings import PROJECT_ROOT
from schemas.streams.fold import settle
from tests.schemas.job_records import (
    JOB_ID,
    KEYRING,
    NOTATIONS,
    OTHER_SECRET,
    SECRET,
    document_record,
    event,
    make_record,
    registration,
    sealed,
    signed,
    written,
)
from tests.schemas.streams import job_model
from trunkline_agent.wire.signing import KeyedHash, Signer, new_secret, sign_event, signed_bytes
from trunkline_agent.wire.strict_json import decode

pytestmark = pytest.mark.requirement("JE-05")

PAGE = (PROJECT_ROOT / "docs" / "how-to" / "publish_from_another_language.md").read_text(encoding="utf-8")
VECTORS: list[dict[str, str]] = json.loads(re.findall(r"```json\n(\[.*?\n\])\n```", PAGE, re.DOTALL)[0])
NAMES = [vector["name"] for vector in VECTORS]


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_our_signer_gives_the_published_signature(vector: dict[str, str]) -> None:
    document, _ = decode(vector["event"].encode("utf-8"))
    assert signed_bytes(document) == vector["signed"].encode("utf-8")
    assert sign_event(document, vector["secret"])["data"]["hmac_sig"] == vector["hmac_sig"]


@pytest.mark.parametrize("size", [0, 1, 55, 63, 64, 65, 128, 5000])
def test_the_prepared_key_gives_the_hash_of_the_standard_library(size: int) -> None:
    key, data = bytes(range(256))[: size % 256] or b"k", b"x" * size
    with_key = KeyedHash(key)
    for more in (b"", b"y", data):
        assert with_key.digest(data + more) == hmac.digest(key, data + more, "sha256")


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_the_standard_library_gives_the_published_signature(vector: dict[str, str]) -> None:
    mac = hmac.new(vector["secret"].encode(), vector["signed"].encode("utf-8"), hashlib.sha256)
    assert mac.hexdigest() == vector["hmac_sig"]
    assert job_model.content_of(json.loads(vector["event"])) == vector["signed"].encode("utf-8")


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_the_signer_printed_on_the_page_gives_the_published_signature(vector: dict[str, str]) -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(# sign\.py: .*?)\n```", PAGE, re.DOTALL)[0], names)  # noqa: S102  our own page
    assert (
        names["sign"](json.loads(vector["event"]), vector["secret"])["data"]["hmac_sig"] == vector["hmac_sig"]
    )


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_the_fold_accepts_a_published_event_with_its_signature(vector: dict[str, str]) -> None:
    entries = Entries()
    body = registration(sealed_secret=sealed(vector["secret"]))
    settle(document_record(body, "job.registered"), entries, KEYRING, Entries())
    document = json.loads(vector["event"])
    document["data"]["hmac_sig"] = vector["hmac_sig"]
    for notation in NOTATIONS:
        settled = settle(make_record(written(document, notation)), entries, KEYRING, Entries())
        assert settled.verdict == ("accepted" if notation == "canonical" else "duplicate")


def test_the_page_covers_what_another_language_gets_wrong() -> None:
    texts = "".join(vector["signed"] for vector in VECTORS)
    for literal in (
        "0.1,",
        "1.0",
        "-0.0",
        "1e+16",
        "1e-07",
        "1e-05",
        "9223372036854775807",
        "-9223372036854775808",
    ):
        assert literal in texts, literal
    assert texts.index('"\ue000"') < texts.index('"\U0001f600"'), "sorted by code point, not by UTF-16 unit"
    assert "日本語" in texts
    assert r"\u0007" in texts
    assert PAGE.isascii()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=150), st.binary(max_size=200))
@settings(max_examples=80, deadline=None)
def test_the_fast_signer_is_the_standard_librarys_hmac(secret: str, data: bytes) -> None:
    right = hmac.new(secret.encode("utf-8"), data, hashlib.sha256).hexdigest()
    signer = Signer(secret)
    assert signer.hexdigest(data) == signer.hexdigest(data) == right
    assert signer.verifies(data, right)
    assert not signer.verifies(data + b"x", right)


ODD_SIGNATURES = (None, 1, True, "", [], {}, "0" * 64, "é" * 64, "g" * 64, b"0" * 64)


@pytest.mark.parametrize("signature", ODD_SIGNATURES, ids=repr)
def test_what_is_no_signature_verifies_nothing_and_does_not_raise(signature: object) -> None:
    assert not Signer(SECRET).verifies(b"data", signature)


def test_a_signature_in_upper_case_cut_short_or_padded_is_none() -> None:
    signer = Signer(SECRET)
    right = signer.hexdigest(b"data")
    for wrong in (right.upper(), right[:-1], right + "0", " " + right[1:], right + "\n"):
        assert not signer.verifies(b"data", wrong)


def job() -> Entries:
    """The entries of a registered job."""
    entries = Entries()
    settle(document_record(registration(), "job.registered"), entries, KEYRING, Entries())
    return entries


@given(st.sampled_from(sorted(event())), st.integers(-9, 9) | st.text(max_size=5))
@settings(max_examples=80, deadline=None)
def test_a_signature_over_other_content_is_not_believed(field: str, value: Any) -> None:
    body = signed(1, more="x")
    for forged in ({**body, "more": value}, {**body, "data": {**body["data"], field: value}}):
        if forged != body:
            assert settle(document_record(forged), job(), KEYRING, Entries()).reason == "bad_signature"


def test_a_missing_signature_or_one_with_another_jobs_secret_is_bad_signature() -> None:
    for body in (event(), event(data={"hmac_sig": None}), signed(1, secret=OTHER_SECRET)):
        assert settle(document_record(body), job(), KEYRING, Entries()).reason == "bad_signature"


def test_signing_leaves_the_event_as_it_was_and_replaces_an_old_signature() -> None:
    body = event(data={"hmac_sig": "old", "x": 1})
    fresh = sign_event(body, SECRET)
    assert body == event(data={"hmac_sig": "old", "x": 1})
    assert fresh == sign_event(event(data={"x": 1}), SECRET)


def test_a_new_secret_has_256_bits_and_is_never_the_same() -> None:
    made = {new_secret() for _ in range(20)}
    assert len(made) == 20
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", secret) for secret in made)


def test_a_secret_sealed_for_another_job_signs_nothing() -> None:
    entries = Entries()
    stolen = registration(sealed_secret=sealed(job_id="00000000"))
    settle(document_record(stolen, "job.registered"), entries, KEYRING, Entries())
    settled = settle(document_record(signed()), entries, KEYRING, Entries())
    assert settled.verdict == "rejected"
    assert settled.stream_id == JOB_ID
