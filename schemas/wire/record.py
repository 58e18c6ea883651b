"""The Kafka record: CloudEvents 1.0 in the Kafka binary binding (cloudevents.io, kafka-protocol-binding 1.0).

A door passes an `OutgoingRecord` to the publisher. Both runners of the fold read it back as a `Record`. A door
that receives a body over the limit sends `oversized(...)`: the body's size, its SHA-256 and its first 1 KiB.

The partition of a stream is that of Kafka's default partitioner. The fold needs it, and imports no Kafka
client. Source of the algorithm: Austin Appleby's MurmurHash2 (32 bits), with the seed and the sign bit of
`org.apache.kafka.common.utils.Utils.murmur2`.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Final, TypedDict

import msgspec

from trunkline_agent.wire.ids import REFUSED, is_name, stream_key
from trunkline_agent.wire.moments import iso_second

JSON_CONTENT: Final = "application/json"
OVERSIZE_PREFIX_BYTES: Final = 1024
# The fold rejects a longer value from any door. The doors' own limit is a setting and lower. This one is a
# constant, so that both runners and a refold years later decide alike.
VALUE_LIMIT_BYTES: Final = 16 * 1024 * 1024

# The headers of nearly every record, in this order. `Record` keeps names and values apart so that the
# usual case is one comparison of a shared tuple.
STANDARD_HEADERS: Final = (
    "ce_specversion",
    "ce_id",
    "ce_source",
    "ce_type",
    "ce_time",
    "ce_subject",
    "content-type",
)
_MAC_KEY: Final = "ce_mackey"
_MAC: Final = "ce_mac"
MAC_HEADERS: Final = (*STANDARD_HEADERS, _MAC_KEY, _MAC)
"""The headers of nearly every record that has a MAC, in this order."""
NOT_UTF8: Final = "\ufffd"
"""The replacement character: a header's name contained bytes that are not UTF-8."""
_REQUIRED: Final = ("ce_specversion", "ce_id", "ce_source", "ce_type", "ce_subject")
_ID_LIMIT: Final = 512
_SENDER_LIMIT: Final = 1024
_EXTENSION_SIZE: Final = "ce_bodysize"
_EXTENSION_SHA256: Final = "ce_bodysha256"
_MAC_INPUT: Final = ("ce_id", "ce_source", "ce_type", _EXTENSION_SIZE, _EXTENSION_SHA256)
_MAC_LIMIT: Final = 256


class Record(msgspec.Struct, frozen=True, gc=False):
    """One Kafka record as it was read.

    `logged_at_us` is Kafka's append time in microseconds since 1970 UTC. `header_names[i]` belongs to
    `header_values[i]`.
    """

    topic: str
    partition: int
    offset: int
    logged_at_us: int
    key: bytes | None
    value: bytes | None
    header_names: tuple[str, ...]
    header_values: tuple[bytes | None, ...]


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """The values of a record's CloudEvents headers, checked.

    `door` and `principal` are the two parts of `ce_source`. `body_bytes` is the original size of a body that a
    door shortened because it was too long, else None. `mac` is the record's MAC in hex, and `mac_key` names the
    key of which it was made; None if the record has no MAC. Nothing but their form is checked here.
    """

    ce_id: str
    door: str
    principal: str
    type: str
    body_bytes: int | None = None
    mac_key: str | None = None
    mac: str | None = None


class BadEnvelopeError(ValueError):
    """The headers of a Kafka record do not have the required form. The message gives the reason."""


class Origin(TypedDict):
    """The keyword arguments `origin` of many functions: the door that appends a record, and its principal.

    The principal is the user, agent or program that caused the record.
    """

    door: str
    principal: str


class OutgoingRecord(msgspec.Struct, frozen=True):
    """A record that a door appends to the log.

    Attributes:
        stream: the stream's key, such as `job/0a1b2c3d`. It becomes the Kafka key and the CloudEvents subject.
        ce_id: the CloudEvents id. A repeated request has the same id.
        door: the name of the door that appends the record.
        principal: the user, agent or program that caused the record.
        type: the record type, the header `ce_type`.
        value: the body, or its first 1 KiB if it was too long.
        content_type: the media type of `value`.
        body_bytes: the original size of a shortened body, else None.
        body_sha256: the SHA-256 of a shortened body in hex, else None.
        traceparent: the W3C trace context of the request, or None without tracing.
        partition: the Kafka partition, or None for the one that the stream's key decides.
    """

    stream: str
    ce_id: str
    door: str
    principal: str
    type: str
    value: bytes
    content_type: str = JSON_CONTENT
    body_bytes: int | None = None
    body_sha256: str | None = None
    traceparent: str | None = None
    partition: int | None = None

    @property
    def key(self) -> bytes:
        """The Kafka key: `stream` as ASCII bytes. All records of a stream are in one partition."""
        return self.stream.encode("ascii")

    @property
    def mac_input(self) -> bytes:
        """The bytes of which the record's MAC is made (`mac_input`)."""
        size = None if self.body_bytes is None else str(self.body_bytes).encode()
        digest = None if size is None else (self.body_sha256 or "").encode()
        source = f"{self.door}/{self.principal}".encode()
        return mac_input(self.key, self.ce_id.encode(), source, self.type.encode(), size, digest, self.value)

    def headers(
        self, now: datetime | None = None, mac: tuple[str, str] | None = None
    ) -> list[tuple[str, bytes]]:
        """Return the Kafka headers of the record as pairs of name and value, in a fixed order.

        Args:
            now: the header `ce_time` (UTC). `None` means the current time, in nanoseconds. The header is only
                information, because the fold uses Kafka's append time. It tells equal records of two gateways
                apart.
            mac: the name of the key of the record's MAC, and the MAC in hex. `None`: the record has no MAC.
        """
        if now is None:
            seconds, ns = divmod(time.time_ns(), 1_000_000_000)
            moment = f"{iso_second(seconds)}.{ns:09d}Z"
        else:
            moment = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        found = [
            ("ce_specversion", b"1.0"),
            ("ce_id", self.ce_id.encode()),
            ("ce_source", f"{self.door}/{self.principal}".encode()),
            ("ce_type", self.type.encode()),
            ("ce_time", moment.encode()),
            ("ce_subject", self.stream.encode()),
            ("content-type", self.content_type.encode()),
        ]
        if mac is not None:
            found += ((_MAC_KEY, mac[0].encode()), (_MAC, mac[1].encode()))
        if self.body_bytes is not None:
            found.append((_EXTENSION_SIZE, str(self.body_bytes).encode()))
            found.append((_EXTENSION_SHA256, (self.body_sha256 or "").encode()))
        if self.traceparent is not None:
            found.append(("traceparent", self.traceparent.encode()))
        return found


_lengths: Final = struct.Struct(">7q").pack


def mac_input(*parts: bytes | None) -> bytes:
    """Return the bytes of which a record's MAC is made.

    The lengths of all parts come first, as eight bytes each, so that the same bytes divided otherwise give
    another result. An absent part has the length -1.

    Args:
        parts: the key, `ce_id`, `ce_source`, `ce_type`, `ce_bodysize`, `ce_bodysha256` and the value.
    """
    lengths = [-1 if part is None else len(part) for part in parts]
    return _lengths(*lengths) + b"".join(filter(None, parts))


def record_mac_input(record: Record) -> bytes:
    """Return the bytes of which the MAC of a record is made that was read from Kafka (`mac_input`).

    Call it only for a record whose headers `read_envelope` accepts.
    """
    values = record.header_values
    if record.header_names == MAC_HEADERS:
        return mac_input(record.key, values[1], values[2], values[3], None, None, record.value)
    found = dict(zip(_read_names(record.header_names), values, strict=True))
    return mac_input(record.key, *(found.get(name) for name in _MAC_INPUT), record.value)


def oversized(record: OutgoingRecord, limit_bytes: int) -> OutgoingRecord:
    """Return `record`, or a shortened copy if its body is longer than `limit_bytes`.

    The copy has the first 1 KiB of the body, and the original size and SHA-256 in its headers. The fold rejects
    the copy as `too_large`. A door calls this function before it appends a record.
    """
    size = len(record.value)
    if size <= limit_bytes:
        return record
    return msgspec.structs.replace(
        record,
        value=record.value[:OVERSIZE_PREFIX_BYTES],
        content_type="application/octet-stream",
        body_bytes=size,
        body_sha256=hashlib.sha256(record.value).hexdigest(),
    )


def refused_stream(door: str) -> str:
    """Return the stream key `refused/<door>`, for input that the door cannot assign to another stream.

    Raises ValueError if `door` is not a valid name (`is_name`).
    """
    return stream_key(REFUSED, door)


# Every record names one of a few senders. The cache keeps its arguments, so no long ones may reach it.
@lru_cache(maxsize=4096)
def _known_sender(source: bytes, kind: bytes) -> tuple[str, str, str]:
    """Return door, principal and type. Raises BadEnvelopeError."""
    try:
        door, _, principal = source.decode("ascii").partition("/")
        record_type = kind.decode("ascii")
    except UnicodeDecodeError:
        raise BadEnvelopeError("ce_source or ce_type is not ASCII") from None
    if not is_name(door) or not is_name(principal):
        raise BadEnvelopeError("ce_source is not a door and a principal")
    return door, principal, record_type


def read_envelope(record: Record) -> Envelope:
    """Parse and check the CloudEvents headers of `record`.

    Raises:
        BadEnvelopeError: a header is missing, occurs twice, is not text, is too long or has the wrong form, or
            `ce_subject` is not the Kafka key.
    """
    names, values = record.header_names, record.header_values
    size = mac_key = mac = None
    if names == STANDARD_HEADERS:
        version, ce_id, source, kind, _, subject, _ = values
    elif names == MAC_HEADERS:
        version, ce_id, source, kind, _, subject, _, mac_key, mac = values
    else:
        names = _read_names(names)
        found = dict(zip(names, values, strict=True))
        # Runtimes differ in how they decode such bytes, and so in whether two such names are equal.
        if any(NOT_UTF8 in name for name in names):
            raise BadEnvelopeError("a header's name is not UTF-8")
        if len(found) != len(values):
            raise BadEnvelopeError("a header twice")
        for name in _REQUIRED:
            if name not in found:
                raise BadEnvelopeError(f"no header {name}")
        version, ce_id, source, kind, subject = (found[name] for name in _REQUIRED)
        if _EXTENSION_SIZE in found:
            size = _size(found[_EXTENSION_SIZE])
        mac_key, mac = found.get(_MAC_KEY), found.get(_MAC)
    if version != b"1.0":
        raise BadEnvelopeError("ce_specversion is not 1.0")
    if subject != record.key:
        raise BadEnvelopeError("ce_subject is not the key")
    if not ce_id or source is None or kind is None or len(ce_id) > _ID_LIMIT:
        raise BadEnvelopeError("a header that is empty or too long")
    if len(source) + len(kind) > _SENDER_LIMIT:
        raise BadEnvelopeError("ce_source or ce_type is too long")
    door, principal, record_type = _known_sender(source, kind)
    try:
        if mac_key is None or mac is None:
            return Envelope(ce_id.decode("utf-8"), door, principal, record_type, size)
        return Envelope(
            ce_id.decode("utf-8"), door, principal, record_type, size, _mac_text(mac_key), _mac_text(mac)
        )
    except UnicodeDecodeError:
        raise BadEnvelopeError("ce_id is not UTF-8") from None


def _read_names(names: tuple[str, ...]) -> tuple[str, ...]:
    # C clients end a name at its first NUL, Java does not. Cut it here, so that all runtimes read the same.
    return tuple([name.partition("\0")[0] for name in names])


def _mac_text(raw: bytes) -> str:
    if len(raw) > _MAC_LIMIT or not raw.isascii():
        raise BadEnvelopeError("ce_mac or ce_mackey is too long or not ASCII")
    return raw.decode("ascii")


def _size(text: bytes | None) -> int:
    if text is None or not text.isdigit() or len(text) > 18:
        raise BadEnvelopeError(f"{_EXTENSION_SIZE} is not a size")
    return int(text)


_SEED: Final = 0x9747B28C
_FACTOR: Final = 0x5BD1E995
_WORD: Final = 0xFFFFFFFF
_HASH_CACHE: Final = 65_536


class Position(msgspec.Struct, frozen=True, order=True, gc=False):
    """The place of a record in the log. Positions are ordered by partition, then offset."""

    partition: int
    offset: int

    def __iter__(self) -> Iterator[int]:
        """Yield the partition and the offset."""
        yield self.partition
        yield self.offset


@lru_cache(maxsize=_HASH_CACHE)
def partition_for(key: bytes, partitions: int) -> int:
    """Return the number of the partition to which records with the key `key` are appended.

    `partitions` is the partition count of the topic. Results are cached, because hashes are slow in Python.
    """
    found = _SEED ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        mixed = int.from_bytes(key[at : at + 4], "little") * _FACTOR & _WORD
        mixed = (mixed ^ mixed >> 24) * _FACTOR & _WORD
        found = found * _FACTOR & _WORD ^ mixed
    if whole < len(key):
        found = (found ^ int.from_bytes(key[whole:], "little")) * _FACTOR & _WORD
    found = (found ^ found >> 13) * _FACTOR & _WORD
    return ((found ^ found >> 15) & 0x7FFFFFFF) % partitions
