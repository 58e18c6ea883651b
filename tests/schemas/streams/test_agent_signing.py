"""Signatures of agents' requests (AM-02): the published vectors, and what must never be believed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent.mcp import signing as agent_signing
from trunkline_agent.mcp.signing import (
    checked_public_key,
    key_id,
    load_private_key,
    new_key_pair,
    private_key_pem,
    public_pem,
    sign,
    signature_bytes,
    timestamp_seconds,
    verify,
)

pytestmark = pytest.mark.requirement("AM-02")

PAGE = (PROJECT_ROOT / "docs" / "how-to" / "sign_agent_requests.md").read_text(encoding="utf-8")
FILE = PROJECT_ROOT / "tests" / "schemas" / "agent_signing_vectors.json"
PUBLISHED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
VECTORS: list[dict[str, str]] = PUBLISHED["vectors"]
NAMES = [vector["name"] for vector in VECTORS]
NOW = "1763829000"
# 512 bits: no library makes such a key any more, so it is written down.
SMALL_KEY = """-----BEGIN PUBLIC KEY-----
MFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBAL8u7frjOEnGUYDMkzpyldeVRkZtk1Rr
k+HuAIhZGIGMGVAM8b8/xXwpiqcJJjKs/zwW31fwxBEZgKmHtrvaRD0CAwEAAQ==
-----END PUBLIC KEY-----
"""


def private_key() -> rsa.RSAPrivateKey:
    """The key of the vectors, from its published numbers."""
    number = {name: int(digits, 16) for name, digits in PUBLISHED["key"].items()}
    n, e, d, p, q = (number[name] for name in "nedpq")
    public = rsa.RSAPublicNumbers(e, n)
    return rsa.RSAPrivateNumbers(
        p, q, d, d % (p - 1), d % (q - 1), rsa.rsa_crt_iqmp(p, q), public
    ).private_key()


KEY = private_key()
PEM: str = PUBLISHED["public_key"]


def spki(key: Any) -> str:
    """A public key as PEM."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()


@cache
def other_pem() -> str:
    """The public half of another key."""
    return new_key_pair()[1]


def test_the_page_shows_the_vectors_of_the_file() -> None:
    blocks = re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)
    assert json.loads(blocks[-1]) == PUBLISHED
    assert PAGE.isascii()
    assert len({vector["signature"] for vector in VECTORS}) == len(VECTORS)


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_our_signer_gives_the_published_signature_and_our_check_takes_it(vector: dict[str, str]) -> None:
    body = vector["body"].encode("utf-8")
    assert sign(KEY, vector["timestamp"], body) == vector["signature"]
    assert verify(PEM, vector["timestamp"], body, vector["signature"])


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_the_arithmetic_of_the_standard_gives_the_published_signature(vector: dict[str, str]) -> None:
    n, d = (int(PUBLISHED["key"][name], 16) for name in "nd")
    digest = hashlib.sha256(vector["timestamp"].encode() + vector["body"].encode("utf-8")).digest()
    # RFC 8017, section 9.2: 00 01 ff … ff 00, then the DER of a SHA-256 digest.
    info = bytes.fromhex("3031300d060960864801650304020105000420") + digest
    padded = b"\0\x01" + b"\xff" * (256 - 3 - len(info)) + b"\0" + info
    signature = pow(int.from_bytes(padded, "big"), d, n).to_bytes(256, "big")
    assert base64.b64encode(signature).decode() == vector["signature"]


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_the_signer_printed_on_the_page_gives_the_published_signature(vector: dict[str, str]) -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)[0], names)  # noqa: S102  our own page
    headers = names["signed_headers"](KEY, "ann", vector["body"].encode("utf-8"), vector["timestamp"])
    assert headers == {
        agent_signing.AGENT_HEADER: "ann",
        agent_signing.TIMESTAMP_HEADER: vector["timestamp"],
        agent_signing.SIGNATURE_HEADER: vector["signature"],
    }


def test_the_published_numbers_are_the_published_key_and_its_name() -> None:
    number = {name: int(digits, 16) for name, digits in PUBLISHED["key"].items()}
    assert number["p"] * number["q"] == number["n"]
    assert public_pem(KEY) == PEM == checked_public_key(PEM)
    der = base64.b64decode("".join(PEM.splitlines()[1:-1]))
    assert key_id(PEM) == PUBLISHED["key_id"] == hashlib.sha256(der).hexdigest()[:16]


@given(st.integers(0, 10**10), st.binary(max_size=300), st.integers(0, 255), st.data())
@settings(max_examples=60, deadline=None)
def test_one_change_in_timestamp_body_signature_or_key_and_it_is_not_believed(
    seconds: int, body: bytes, byte: int, data: st.DataObject
) -> None:
    timestamp = str(seconds)
    signature = sign(KEY, timestamp, body)
    assert verify(PEM, timestamp, body, signature)
    assert not verify(other_pem(), timestamp, body, signature)
    assert not verify(PEM, str(seconds + 1), body, signature)
    place = data.draw(st.integers(0, len(body)))
    changed = body[:place] + bytes([byte]) + body[place + 1 :]
    assert (changed == body) == verify(PEM, timestamp, changed, signature)
    raw = bytearray(base64.b64decode(signature))
    raw[data.draw(st.integers(0, 255))] ^= 1 << data.draw(st.integers(0, 7))
    assert not verify(PEM, timestamp, body, base64.b64encode(raw).decode())


HOSTILE = st.one_of(
    st.text(max_size=60),
    st.text("0123456789.", max_size=20),
    st.sampled_from(
        ["", "\0", NOW + "\0", "１７６３８２９０００", "\ud800", "nan", "1e9", "-1", "A" * 10**6, PEM]
    ),
    st.binary(max_size=20),
    st.none(),
    st.integers(),
)


@given(HOSTILE, HOSTILE, st.binary(max_size=20) | st.none() | st.text(max_size=5), HOSTILE)
@settings(max_examples=200, deadline=None)
def test_no_input_makes_the_check_raise(pem: Any, timestamp: Any, body: Any, signature: Any) -> None:
    good = sign(KEY, NOW, b"x")
    for arguments in ((pem, NOW, b"x", good), (PEM, timestamp, b"x", good), (PEM, NOW, b"x", signature)):
        assume(arguments != (PEM, NOW, b"x", good))
        assert verify(*arguments) is False
    assert verify(pem, timestamp, body, signature) is False
    assert verify(PEM, NOW, body, good) is (body == b"x")


ODD_KEYS = {
    "elliptic": spki(ec.generate_private_key(ec.SECP256R1()).public_key()),
    "edwards": spki(ed25519.Ed25519PrivateKey.generate().public_key()),
    "512 bits": SMALL_KEY,
    "1024 bits": spki(rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()),  # noqa: S505
    "exponent 3": spki(rsa.RSAPublicNumbers(3, KEY.public_key().public_numbers().n).public_key()),
    "long exponent": spki(rsa.RSAPublicNumbers(2**64 + 1, KEY.public_key().public_numbers().n).public_key()),
    "16384 bits": spki(rsa.RSAPublicNumbers(65537, 2**16383 + 1).public_key()),
    "private": private_key_pem(KEY),
    "no PEM": "ssh-rsa AAAA",
    "cut short": PEM[:200],
    "long": PEM + " " * 20_000,
    "surrogate": "\ud800" + PEM,
}


@pytest.mark.parametrize("pem", ODD_KEYS.values(), ids=ODD_KEYS)
def test_a_key_that_is_no_usable_rsa_key_is_refused_and_verifies_nothing(pem: str) -> None:
    with pytest.raises(ValueError):
        checked_public_key(pem)
    with pytest.raises(ValueError):
        key_id(pem)
    for length in (64, 128, 256, 1024, 2048):
        assert not verify(pem, NOW, b"x", base64.b64encode(b"\x01" * length).decode())


def test_a_key_in_another_notation_is_registered_under_one_form_and_one_name() -> None:
    pkcs1 = KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.PKCS1).decode()
    for notation in (pkcs1, PEM.replace("\n", "\r\n"), "a word before\n" + PEM, PEM.rstrip()):
        assert checked_public_key(notation) == PEM
        assert key_id(notation) == PUBLISHED["key_id"]
        assert verify(notation, NOW, b"x", sign(KEY, NOW, b"x"))


def test_one_signature_has_one_notation_so_no_replay_looks_like_another_request() -> None:
    good = sign(KEY, NOW, b"x")
    raw = base64.b64decode(good)
    n = KEY.public_key().public_numbers().n
    loose = good[:-3] + chr(ord(good[-3]) + 1) + "=="
    assert base64.b64decode(loose) == raw
    others = [
        loose,
        good.rstrip("="),
        good + "\n",
        " " + good,
        good.replace("=", ""),
        "\n".join([good[:76], good[76:]]),
    ]
    others.append(base64.b64encode(b"\0" + raw).decode())
    larger = int.from_bytes(raw, "big") + n
    if larger < 2**2048:
        others.append(base64.b64encode(larger.to_bytes(256, "big")).decode())
    for other in others:
        assert not verify(PEM, NOW, b"x", other)
    assert signature_bytes(good) == raw


def test_a_timestamp_is_decimal_in_ascii_and_nothing_else() -> None:
    assert timestamp_seconds("1763829000") == 1763829000
    assert timestamp_seconds("1763829000.25") == 1763829000.25
    for other in (
        "",
        " 1",
        "1\n",
        "+1",
        "-1",
        "1.",
        ".5",
        "1e9",
        "0x1",
        "1_0",
        "１",
        "inf",
        "1" * 13,
        "1." + "1" * 10,
    ):
        assert timestamp_seconds(other) is None
        with pytest.raises(ValueError):
            sign(KEY, other, b"")


def test_a_new_pair_is_of_2048_bits_signs_and_is_never_the_same() -> None:
    private_pem, public = new_key_pair()
    key = load_private_key(private_pem)
    assert (key.key_size, key.public_key().public_numbers().e) == (2048, 65537)
    assert public_pem(key) == public == checked_public_key(public)
    assert verify(public, NOW, b"{}", sign(key, NOW, b"{}"))
    assert public != other_pem()


def test_what_is_no_private_key_is_refused_without_showing_it() -> None:
    locked = KEY.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"canary"),
    )
    small = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505
    others = [private_key_pem(key).encode() for key in (small, ed25519.Ed25519PrivateKey.generate())]
    for pem in (b"", b"canary", b"\0" * 50, PEM.encode(), locked, locked[:300], *others):
        with pytest.raises(ValueError) as error:
            load_private_key(pem)
        assert "canary" not in str(error.value)
        assert len(str(error.value)) < 100
