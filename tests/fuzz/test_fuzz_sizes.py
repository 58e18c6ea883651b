"""Inputs that are small to send and could be large to read: each parser is done with them in a moment."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from connectors.doors.out_of_band.signed_commands import CommandRefused, read_command
from connectors.hub.organism.organism_file import OrganismError, parsed
from tests.fuzz.fuzzing import within
from trunkline_agent.mcp.signing import checked_public_key
from trunkline_agent.queue.message_record import parse_line
from trunkline_agent.wire.receipt import read_receipt
from trunkline_agent.wire.strict_json import MalformedJsonError, decode

SIZE: Final = 256 * 1024
HOSTILE_S: Final = 3.0
# Times the input: a list of small objects in Python is some sixty times its text.
GROWTH: Final = 120


def json_reader(document: bytes) -> None:
    with suppress(MalformedJsonError):
        decode(document)


def command_reader(document: bytes) -> None:
    with suppress(CommandRefused):
        read_command(document)


def key_reader(document: bytes) -> None:
    with suppress(ValueError):
        checked_public_key(document.decode("latin-1"))


def organism_reader(document: bytes) -> None:
    with suppress(OrganismError):
        parsed(document, Path("organism.yaml"))


DOCUMENTS: Final[dict[str, bytes]] = {
    "arrays in arrays": b"[" * SIZE,
    "objects in objects": b'{"a":' * (SIZE // 5),
    "closed arrays in arrays": b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "one long number": b'{"seq":' + b"9" * SIZE + b"}",
    "one long text": b'{"a":"' + b"\\u0041" * (SIZE // 6) + b'"}',
    "many keys": b"{" + b",".join(b'"%d":1' % number for number in range(SIZE // 10)) + b"}",
    "one key many times": b"{" + b",".join([b'"a":1'] * (SIZE // 6)) + b"}",
    "many small arrays": b"[" + b",".join([b"[]"] * (SIZE // 3)) + b"]",
    "elements in elements": b"<a>" * (SIZE // 3),
    "attributes": b"<a " + b" ".join(b'a%d="1"' % number for number in range(SIZE // 10)) + b"/>",
    "entities of entities": b'<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa">]><a>' + b"&a;" * (SIZE // 3) + b"</a>",
    "a long key in PEM": b"-----BEGIN PUBLIC KEY-----\n"
    + b"QUFB" * (SIZE // 4)
    + b"\n-----END PUBLIC KEY-----\n",
}
READERS: Final[list[Callable[[bytes], object]]] = [
    json_reader,
    parse_line,
    read_receipt,
    command_reader,
    key_reader,
]


@pytest.mark.long
@pytest.mark.requirement("CM-02")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_hostile_document_is_read_or_refused_in_a_moment_and_in_little_memory(name: str) -> None:
    document = DOCUMENTS[name]
    within(document, HOSTILE_S, READERS)
    tracemalloc.start()
    try:
        for reader in READERS:
            reader(document)
        assert tracemalloc.get_traced_memory()[1] < GROWTH * len(document)
    finally:
        tracemalloc.stop()


@pytest.mark.long
@pytest.mark.requirement("XP-09")
@pytest.mark.parametrize(
    "document",
    [
        b"[" * 20_000,
        b"a: &a [x, x, x, x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (n, n) for n in range(500)),
        b"".join(b"k%d: 1\n" % number for number in range(12_000)),
        b"x: '" + b"y" * (4 * SIZE) + b"'",
    ],
    ids=["nested", "aliases", "many keys", "too large"],
)
def test_a_hostile_organism_is_refused_in_a_moment(document: bytes) -> None:
    within(document, HOSTILE_S, [organism_reader])
