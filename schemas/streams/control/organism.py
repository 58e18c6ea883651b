"""The stream `control/organism`: the listeners of the XML pump (XP-09, XP-11). Its records, rows and fold.

`request_id` is the nonce of the signed command. For the first load it is derived from the content of
`conf/organism.yaml`.

Entries of the state:
`listener/<name>`: one listener.
`loaded`: the digest of the file that was loaded last.
`nonces`: the commands of the last 15 minutes, so that none is accepted twice.
`version`: the number of accepted commands, 8 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.memories import content_digest
from schemas.fold.settled import Change, Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput
from schemas.fold.view_rows import Moment, Row
from schemas.streams.principal.principals import ACTIVE
from schemas.wire.wire_body import Name, Note, WireBody, models_of
from trunkline_agent.wire.ids import CONTROL, content_id, stream_key
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

ORGANISM_LOADED: Final = "organism.loaded"
LISTENER_ADDED: Final = "listener.added"
LISTENER_REMOVED: Final = "listener.removed"
REGISTRY_LISTENERS: Final = "registry_listeners"

ORGANISM: Final = "organism"
ORGANISM_STREAM: Final = stream_key(CONTROL, ORGANISM)
# The nonce of a command is remembered for this time, by Kafka's append times (XP-11). It is longer than the
# time for which a command is valid.
NONCES_KEPT_S: Final = 900
LISTENERS_MOST: Final = 1000
CONCURRENCY: Final = 8
CONCURRENCY_MOST: Final = 1000
PER_MINUTE_MOST: Final = 6000
TIMEOUT_MS: Final = 30_000
TIMEOUT_MS_MOST: Final = 3_600_000
_SCHEMA_LIMIT: Final = 64 * 1024
_DIGEST: Final = r"^[0-9a-f]{64}\z"
# In order: a function in the pump, a language model, a person at a terminal, and a listener that describes the
# other listeners.
ListenerType = Literal["handler", "llm", "human", "meta"]
# An XML name without a colon that is also a name by CM-01.
_PATTERN: Final = r"^[A-Za-z][A-Za-z0-9._-]{0,127}$"
_ROOT_TAG: Final = re.compile(_PATTERN.strip("^$")).fullmatch


def _root_tag(text: str) -> str:
    if _ROOT_TAG(text) is None:
        raise ValueError("not a root tag: letters, digits, '.', '_', '-', at most 128, first a letter")
    return text


# In the models `\w` is any letter, in JSON Schema only those of ASCII.
_HANDLER: Final = {"pattern": r"^[A-Za-z_][^:]*:[A-Za-z_][^:]*$"}
Handler = Annotated[
    str, Field(max_length=256, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*\z", json_schema_extra=_HANDLER)
]
"""The name of a handler in Python, `module:name`."""
RootTag = Annotated[str, AfterValidator(_root_tag), Field(json_schema_extra={"pattern": _PATTERN})]
"""The local name of a payload's root element."""


class ListenerRow(Row, frozen=True, gc=False):
    """A row of `registry_listeners`: a handler in the pump for messages with one root tag (XP-01, XP-09)."""

    VIEW: ClassVar = REGISTRY_LISTENERS
    KEY: ClassVar = ("listener",)

    listener: str
    """Name of the listener."""
    status: str
    """`active` or `removed`."""
    type: str
    """`handler`, `llm`, `human` or `meta`."""
    capability: str
    """Description of what the listener does."""
    root_tag: str
    """Root tag of the messages that the listener accepts."""
    namespace: str
    """XML namespace of the root tag."""
    handler: str | None
    """Python function that the pump calls for a message, as `module:attribute`. Null: its type needs none."""
    xsd: str | None
    """XML schema of the payload that the listener accepts. Null: none."""
    example: str | None
    """Example of a payload that the listener accepts. Null: none."""
    visible_tools: list[str] | None
    """Other listeners that the listener can see and send to. Null: all."""
    concurrency: int
    """How many messages to the listener all pumps together handle at once."""
    per_minute: int | None
    """How many messages to the listener all pumps together handle in a minute. Null: no limit."""
    tokens_per_minute: int | None
    """How many tokens of a language model the listener may use in a minute. Null: no limit."""
    timeout_ms: int
    """How long the listener may handle one message, in milliseconds."""
    options: str | None
    """Options of the listener's type, as canonical JSON. Null: none."""
    added_at: Moment
    """Time at which the listener was added or last changed."""
    removed_at: Moment | None
    """Time at which the listener was removed. Null: it is active."""


class Listener(BaseModel):
    """The declaration of a listener, as a part of a record's body.

    `ListenerRow` describes the fields. An absent field has its default.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Name
    type: ListenerType = "handler"
    capability: Note = ""
    root_tag: RootTag
    namespace: Annotated[str, Field(max_length=200, pattern=r"^[!-~]*\z")] = ""
    handler: Handler | None = None
    xsd: Annotated[str, Field(max_length=_SCHEMA_LIMIT)] | None = None
    example: Annotated[str, Field(max_length=_SCHEMA_LIMIT)] | None = None
    visible_tools: Annotated[list[Name], Field(max_length=LISTENERS_MOST)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=CONCURRENCY_MOST)] = CONCURRENCY
    per_minute: Annotated[int, Field(ge=1, le=PER_MINUTE_MOST)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=TIMEOUT_MS_MOST)] = TIMEOUT_MS
    options: Annotated[str, Field(max_length=_SCHEMA_LIMIT)] | None = None


class _OrganismBody(WireBody):
    STREAM: ClassVar = ORGANISM_STREAM
    OMITS_NULLS: ClassVar = True

    request_id: Name

    def derived_id(self, content: bytes, known: Mapping[str, Any]) -> str:
        """Return the CloudEvents id, which is derived from `request_id` alone.

        That is the nonce of the signed command, or is derived from the content of the loaded file. The fold
        rejects another body with the same `request_id` as `seq_conflict`.
        """
        return content_id(ORGANISM.encode(), self.request_id.encode())


class OrganismLoaded(_OrganismBody):
    """Body of `organism.loaded`: these listeners replace all listeners of the organism.

    `digest` is the SHA-256 of the file `conf/organism.yaml`, in hex.
    """

    TYPE: ClassVar = ORGANISM_LOADED

    digest: Annotated[str, Field(pattern=_DIGEST)]
    listeners: Annotated[list[Listener], Field(max_length=LISTENERS_MOST)]


class ListenerAdded(_OrganismBody):
    """Body of `listener.added`: the organism gets one more listener."""

    TYPE: ClassVar = LISTENER_ADDED

    listener: Listener


class ListenerRemoved(_OrganismBody):
    """Body of `listener.removed`: the listener `name` no longer belongs to the organism."""

    TYPE: ClassVar = LISTENER_REMOVED

    name: Name


ORGANISM_MODELS: Final = models_of(OrganismLoaded, ListenerAdded, ListenerRemoved)


ENTRY_VERSION: Final = 1
REMOVED: Final = "removed"
_LOADED: Final = "loaded"
# The values of the fields that the body of a listener may omit.
_DEFAULTS: Final = {name: one.default for name, one in Listener.model_fields.items() if not one.is_required()}
_VERSION: Final = "version"


class _ListenerEntry(msgspec.Struct, array_like=True, gc=False):
    """A listener. `body` is the listener as its record declared it."""

    version: int
    body: dict[str, Any]
    added_at: int


class _Nonces(msgspec.Struct, array_like=True, gc=False):
    """Each request id with its content digest and its record's time (microseconds since 1970 UTC)."""

    version: int
    known: dict[str, tuple[bytes, int]]


_LISTENERS: Final = StructEntries("listener/", _ListenerEntry)
_NONCES: Final = StructEntries("nonces", _Nonces)


def settle_organism(given: FoldInput) -> Outcome:
    """Settle a record of `control/organism`: update the stream state, return verdict and changed rows.

    The record adds or removes a listener, or replaces all. `settle_control` has checked its body. The changes
    of the stream state, `given.entries`, count only if the record is accepted.
    """
    now, body, entries = given.now_us, given.body, given.entries
    digest = content_digest(body)
    nonces = _NONCES.read(entries) or _Nonces(ENTRY_VERSION, {})
    oldest = now - NONCES_KEPT_S * 1_000_000
    newest = {nonce: known for nonce, known in nonces.known.items() if known[1] > oldest}
    known = newest.get(body["request_id"])
    if known is not None:
        if known[0] == digest:
            return duplicate(None)
        return rejected(SEQ_CONFLICT, "this request id was used with other content")
    if given.type == LISTENER_ADDED:
        if _LISTENERS.read(entries, body["listener"]["name"]) is not None:
            return rejected(ILLEGAL_TRANSITION, "there is a listener of this name")
        changes = [_put(body["listener"], now, entries)]
    elif given.type == LISTENER_REMOVED:
        listener = _LISTENERS.read(entries, body["name"])
        if listener is None:
            return rejected(UNKNOWN_STREAM, "there is no listener of this name")
        changes = [_remove(listener, now, entries)]
    else:
        names = [listener["name"] for listener in body["listeners"]]
        if len(set(names)) < len(names):
            return rejected(ILLEGAL_TRANSITION, "a listener's name twice")
        changes = _load(body, now, entries)
    nonces.known = {**newest, body["request_id"]: (digest, now)}
    _NONCES.write(entries, nonces)
    entries.put(_VERSION, (organism_version(entries) + 1).to_bytes(8, "big"))
    return accepted(None, tuple(changes))


def loaded_digest(entries: Entries) -> str | None:
    """Return the SHA-256 in hex of the organism file that was loaded last, or `None` if none was loaded.

    The gateway compares it with that of `conf/organism.yaml`, to load the file only if it has changed.
    `entries` is the state of the stream `control/organism`.
    """
    raw = entries.get(_LOADED)
    return None if raw is None else raw.decode("ascii")


def organism_version(entries: Entries) -> int:
    """Return the version of the organism: the number of accepted records that changed or loaded its listeners.

    A load of an unchanged file counts, too. The result is 0 if there is no such record. `entries` is the state
    of the stream `control/organism`.
    """
    raw = entries.get(_VERSION)
    return 0 if raw is None else int.from_bytes(raw, "big")


def _load(body: dict[str, Any], now: int, entries: Entries) -> list[Change]:
    """Replace the listeners. An unchanged listener is not written again."""
    wanted = {listener["name"]: listener for listener in body["listeners"]}
    names = [key.removeprefix(_LISTENERS.key) for key in entries.with_prefix(_LISTENERS.key)]
    known = {name: entry for name in names if (entry := _LISTENERS.read(entries, name)) is not None}
    changes = [_remove(entry, now, entries) for name, entry in known.items() if name not in wanted]
    for name, listener in wanted.items():
        if name not in known or known[name].body != listener:
            changes.append(_put(listener, now, entries))
    entries.put(_LOADED, body["digest"].encode("ascii"))
    return changes


def _put(listener: dict[str, Any], now: int, entries: Entries) -> Change:
    _LISTENERS.write(entries, _ListenerEntry(ENTRY_VERSION, listener, now), listener["name"])
    return _change(listener, now, None)


def _remove(entry: _ListenerEntry, now: int, entries: Entries) -> Change:
    entries.delete(_LISTENERS.key + entry.body["name"])
    return _change(entry.body, entry.added_at, now)


def _change(listener: dict[str, Any], added_at: int, removed_at: int | None) -> Change:
    fields = {**_DEFAULTS, **listener}
    name = fields.pop("name")
    status = ACTIVE if removed_at is None else REMOVED
    return changed(
        ListenerRow(listener=name, status=status, added_at=added_at, removed_at=removed_at, **fields)
    )
