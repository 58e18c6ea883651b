"""Threads, the conversations between two listeners (XP-07): their rows, and the records that opened them.

Each side of a conversation knows it by its own opaque UUID. The row of a thread records which listener called
which, and on whose behalf. A thread is never closed. The message that opens a thread makes its row. Before fold
version 10 a record `thread.opened` made it. The state of that record's stream is one entry, `thread`: the
digest of the thread's place in the tree.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field

from schemas.fold.memories import content_digest
from schemas.fold.settled import Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import Name, WireBody
from trunkline_agent.wire.ids import THREAD
from trunkline_agent.wire.verdicts import SEQ_CONFLICT

THREAD_OPENED: Final = "thread.opened"
REGISTRY_THREADS: Final = "registry_threads"
ALL: Final = ""
"""The list of all threads."""

_THREAD: Final = "thread"


class ThreadRow(Row, frozen=True, gc=False):
    """A row of `registry_threads`: a conversation that one listener began by calling another (XP-07).

    Threads form a tree: a call opens a thread below that of the caller. The thread at the root, which a client
    began, has no row.
    """

    VIEW: ClassVar = REGISTRY_THREADS
    KEY: ClassVar = ("thread",)
    ORDER: ClassVar = "opened_at"

    thread: str
    """Id by which the called listener knows the conversation."""
    parent_thread: str
    """Id of the thread above, in which the caller made the call."""
    root_thread: str
    """Id of the thread at the root of the tree."""
    opened_by: str
    """Listener that made the call."""
    seen_by: str
    """Listener that was called."""
    on_behalf_of: str
    """Principal on whose behalf the thread at the root began."""
    kind: str
    """Kind of the message that opened the thread."""
    message_id: str
    """Id of the message that opened the thread."""
    opened_at: Moment
    """Time at which the thread was opened."""

    @property
    def is_live(self) -> bool:
        """False: no record closes a thread, so the gateway does not keep it in memory."""
        return False

    @property
    def lists(self) -> tuple[str, ...]:
        """The list of all threads, and that of the thread's tree."""
        return (ALL, self.root_thread)


class ThreadOpened(WireBody):
    """Body of `thread.opened`: a listener called another one, which opened a thread.

    Attributes:
        thread: the id by which the called listener knows the conversation.
        parent_thread: the id of the thread above, in which the caller made the call.
        root_thread: the id of the thread at the root of the tree.
        opened_by: the listener that made the call.
        seen_by: the listener that was called.
        on_behalf_of: the principal on whose behalf the thread at the root began.
        kind: the kind of the message that opened the thread.
        message_id: the id of that message.
    """

    TYPE: ClassVar = THREAD_OPENED
    STREAM: ClassVar = "thread/{thread}"
    OMITS_NULLS: ClassVar = True

    thread: Name
    parent_thread: Name
    root_thread: Name
    opened_by: Name
    seen_by: Name
    on_behalf_of: Name
    kind: Annotated[str, Field(min_length=1, max_length=128)]
    message_id: Name


def settle_thread(given: FoldInput) -> Outcome:
    """Settle a record of `thread/<id>`: update the stream state, return verdict and changed rows.

    The first record opens the thread. A later one is a duplicate if it has the same place in the tree, else it
    is rejected as `seq_conflict`. `schemas.streams.fold.settle` calls this function with a checked body. The
    changes of the stream state, `given.entries`, count only if the record is accepted.
    """
    body = given.body
    # Two gateways may record different first messages of a thread, but never different places in the tree.
    place = {name: body[name] for name in ("parent_thread", "root_thread", "opened_by", "seen_by")}
    digest, known = content_digest(place), given.entries.get(_THREAD)
    if known is not None:
        if known == digest:
            return duplicate(None)
        return rejected(SEQ_CONFLICT, "the thread was opened otherwise")
    given.entries.put(_THREAD, digest)
    said = {name: body[name] for name in ThreadOpened.model_fields if name != "schema_version"}
    return accepted(None, (changed(ThreadRow(**said, opened_at=given.now_us)),))


THREAD_KIND: Final = StreamKind(
    name=THREAD,
    models={THREAD_OPENED: ThreadOpened},
    settle=settle_thread,
    row_of_each_stream=(ThreadRow,),
    later_rows=(ThreadRow,),
    named_by="thread",
)
