"""The threads of conversations (XP-07): the record that opens one, and its fold.

Outside, a thread is an opaque UUID, and each side knows it by another one; here is who called whom, in whose
name. One entry, `thread`: the digest of its place in the tree. It is never closed.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from schemas.fold.entries import Entries
from schemas.fold.request_memory import content_digest
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.view_rows import REGISTRY_THREADS, ThreadRow
from schemas.wire.ids import THREAD, stream_key
from schemas.wire.record import THREAD_OPENED, OutgoingRecord, Record
from schemas.wire.strict_json import canonical
from schemas.wire.verdicts import SEQ_CONFLICT
from schemas.wire.wire_body import Name, WireBody

_THREAD: Final = "thread"


class ThreadOpened(WireBody):
    """Body of `thread.opened`; the fields are those of its row."""

    thread: Name
    parent_thread: Name
    root_thread: Name
    opened_by: Name
    seen_by: Name
    on_behalf_of: Name
    kind: Annotated[str, Field(min_length=1, max_length=128)]
    message_id: Name


def thread_record(body: ThreadOpened, ce_id: str, *, door: str, principal: str) -> OutgoingRecord:
    """The record that opens a thread."""
    return OutgoingRecord(
        stream=stream_key(THREAD, body.thread),
        ce_id=ce_id,
        door=door,
        principal=principal,
        type=THREAD_OPENED,
        value=canonical(body.model_dump(mode="json", exclude_none=True)),
    )


def settle_thread(record: Record, name: str, body: dict[str, Any], entries: Entries) -> Outcome:
    """Settle one record of the thread's stream whose body passed the checks of its wire model."""
    # Which message of it was settled first may be seen differently; its place in the tree may not.
    place = {name: body[name] for name in ("parent_thread", "root_thread", "opened_by", "seen_by")}
    digest, known = content_digest(place), entries.get(_THREAD)
    if known is not None:
        if known == digest:
            return duplicate(None)
        return rejected(SEQ_CONFLICT, "the thread was opened otherwise")
    entries.put(_THREAD, digest)
    row = ThreadRow(
        thread=name,
        parent_thread=body["parent_thread"],
        root_thread=body["root_thread"],
        opened_by=body["opened_by"],
        seen_by=body["seen_by"],
        on_behalf_of=body["on_behalf_of"],
        kind=body["kind"],
        message_id=body["message_id"],
        opened_at=record.logged_at_us,
    )
    return accepted(None, (Change(REGISTRY_THREADS, name, row),))
