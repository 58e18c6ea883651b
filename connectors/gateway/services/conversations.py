"""Conversations with listeners, as the gateway's handlers need them: who asked in which thread, what was said.

Each side of a conversation knows it by a thread of its own (XP-07). What a listener is asked in thread T is
answered to who opened T, on the thread that this one knows. The index has the newest messages; for what is
older, the view `registry_threads` knows who asked, and what was said is in the tables.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import MAILBOX_VIEW, MessageRow, Row, ThreadRow
from schemas.keys.sealing import Keyring
from schemas.wire.message import DEFAULT_REALM

_Value = TypeVar("_Value")

_THREADS: Final = 50_000
_SAID_MOST: Final = 1000


class Place(msgspec.Struct, frozen=True, gc=False):
    """Who opened a thread, and as which thread this one knows the conversation; who knows it by the thread.
    `root_thread`, `on_behalf_of`: where it all began, and in whose name.
    """

    asker: str
    seen_by: str
    parent_thread: str | None
    root_thread: str
    on_behalf_of: str


def child_thread(keyring: Keyring, parent: str, sender: str, recipient: str) -> str:
    """The thread by which `recipient` knows what `sender` calls `parent`: always the same, also when another
    master key seals, and nobody without the master keys can tell one from the other.
    """
    return str(uuid.UUID(bytes=keyring.oldest.derive(f"thread/{parent}/{sender}/{recipient}")[:16], version=4))


def thread_of(keyring: Keyring, row: MessageRow) -> str:
    """The thread by which a message's recipient knows the conversation. What the sender's door calls a thread,
    and the message's id, are the sender's words: only the pump itself writes a root.
    """
    if row.thread is not None and row.root_thread is not None:
        return row.thread
    return child_thread(keyring, row.thread or row.message_id, f"{row.realm}/{row.sender}", row.recipient)


class Conversations:
    """By thread: its place, and the keys of the messages in it, oldest first.

    One thread changes, any looks up.
    """

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._lock = threading.Lock()
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._said: OrderedDict[str, dict[str, None]] = OrderedDict()
        # By `<recipient>/<message id>`: where the answer belongs of a message that was handed to its recipient.
        self._thread_of: OrderedDict[str, str] = OrderedDict()

    def load(self, rows: Iterable[Row]) -> None:
        """Take in what the live view held when it was opened."""
        for row in sorted((row for row in rows if isinstance(row, MessageRow)), key=lambda row: row.posted_at):
            self._take_in(row)

    def changed(self, change: AppliedChange) -> None:
        """Take in a change of the live view."""
        if change.view == MAILBOX_VIEW and isinstance(change.row, MessageRow):
            self._take_in(change.row)

    def place(self, thread: str, row: Row | None) -> Place | None:
        """Where a thread belongs; `row` is its row of `registry_threads`, for what is not in memory."""
        with self._lock:
            found = self._places.get(thread)
        if found is not None or not isinstance(row, ThreadRow):
            return found
        return Place(row.opened_by, row.seen_by, row.parent_thread, row.root_thread, row.on_behalf_of)

    def said(self, thread: str) -> list[str]:
        """The keys of what was said to and by who knows this thread, oldest first."""
        with self._lock:
            return list(self._said.get(thread, ()))

    def _take_in(self, row: MessageRow) -> None:
        # How it was posted is all that counts, so the first that is seen of it.
        posted = f"{row.recipient}/{row.message_id}"
        if row.realm != DEFAULT_REALM or posted in self._thread_of:
            return
        key, thread = f"{row.realm}/{posted}", thread_of(self._keyring, row)
        with self._lock:
            _put(self._thread_of, posted, thread)
            is_answer = row.root_thread is not None and row.parent_thread is None
            if not is_answer and thread not in self._places:
                root, behalf = row.root_thread or thread, row.on_behalf_of or row.sender
                _put(self._places, thread, Place(row.sender, row.recipient, row.parent_thread, root, behalf))
            self._note(thread, key)
            if row.parent_thread is not None:
                self._note(row.parent_thread, key)
            elif row.in_reply_to is not None:
                own = self._thread_of.get(f"{row.sender}/{row.in_reply_to}")
                if own is not None:
                    self._note(own, key)

    def _note(self, thread: str, key: str) -> None:
        said = self._said.get(thread)
        if said is None:
            said = {}
            _put(self._said, thread, said)
        said[key] = None
        if len(said) > _SAID_MOST:
            del said[next(iter(said))]


def _put(known: OrderedDict[str, _Value], key: str, value: _Value) -> None:
    known[key] = value
    if len(known) > _THREADS:
        known.popitem(last=False)
