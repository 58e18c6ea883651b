"""An index of conversations with listeners: who opened a thread, and which messages it has.

Each side of a conversation has a thread id of its own (XP-07). An answer of a listener in thread T goes to the
principal that opened T, on that principal's thread. The index has the newest messages. Older threads are rows
of the view `registry_threads`, and older messages are in the tables.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from connectors.hub.live.row_lists import RowIndex
from schemas.keys.sealing import Keyring
from schemas.streams.mailboxes.message import DEFAULT_REALM, MessageRow
from schemas.streams.thread.threads import ThreadRow

_Value = TypeVar("_Value")

_THREADS: Final = 50_000
_SAID_MOST: Final = 1000


class Place(msgspec.Struct, frozen=True, gc=False):
    """The place of a thread in the tree of conversations that began with one message.

    Attributes:
        asker: The principal that opened the thread.
        seen_by: The principal that knows the conversation by this thread.
        parent_thread: The thread by which `asker` knows the conversation; None for the first thread of a tree.
        root_thread: The first thread of the tree.
        on_behalf_of: The principal that opened the root thread.
    """

    asker: str
    seen_by: str
    parent_thread: str | None
    root_thread: str
    on_behalf_of: str


def child_thread(keyring: Keyring, parent: str, sender: str, recipient: str) -> str:
    """Return the id of the thread by which `recipient` knows the conversation that `sender` knows as `parent`.

    The result is a UUID. It is derived from the oldest master key, so it stays the same when the key is
    rotated. Without the master keys the two ids cannot be linked.

    Args:
        keyring: The master keys.
        parent: The sender's thread id.
        sender: The principal that sends the message, or `<realm>/<principal>` if a pump did not write it.
        recipient: The name of the mailbox.
    """
    return str(uuid.UUID(bytes=keyring.oldest.derive(f"thread/{parent}/{sender}/{recipient}")[:16], version=4))


def thread_of(keyring: Keyring, row: MessageRow) -> str:
    """Return the id of the thread by which the recipient of a message knows the conversation.

    If the pump wrote the message, it is the message's own thread id. Any other sender chose that id freely, so
    `child_thread` derives the result from it. Without a thread id, the result is derived from the message's id.
    """
    if row.thread is not None and row.root_thread is not None:
        return row.thread
    return child_thread(keyring, row.thread or row.message_id, f"{row.realm}/{row.sender}", row.recipient)


class Conversations(RowIndex[MessageRow]):
    """An index of the newest 50,000 threads: the place of each in its tree, and the keys of its messages."""

    def __init__(self, keyring: Keyring) -> None:
        super().__init__(MessageRow)
        self._keyring = keyring
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._said: OrderedDict[str, dict[str, None]] = OrderedDict()
        # By `<recipient>/<message id>`: the thread by which the recipient knows the conversation.
        self._thread_of: OrderedDict[str, str] = OrderedDict()

    def load(self, rows: Iterable[MessageRow]) -> None:
        """Add the messages that the live view contains when it is open. Call it once, after `LiveView.open`."""
        super().load(sorted(rows, key=lambda row: row.posted_at))

    def place(self, thread: str, row: ThreadRow | None) -> Place | None:
        """Return the place of a thread in its tree, from memory or from the thread's row.

        Args:
            thread: The id of the thread.
            row: The thread's row of the view `registry_threads`; None if there is none. It is used for a thread
                that is no longer in memory.

        Returns:
            The place, or None for an unknown thread.
        """
        with self._lock:
            found = self._places.get(thread)
        if found is not None or row is None:
            return found
        return Place(row.opened_by, row.seen_by, row.parent_thread, row.root_thread, row.on_behalf_of)

    def message_keys(self, thread: str) -> list[str]:
        """Return the keys of a thread's newest 1,000 messages, oldest first, such as `default/bo/<message id>`.

        They are the messages to and from the principal that knows the conversation by this thread. The list is
        empty for an unknown thread, and for one that is older than the newest 50,000.
        """
        with self._lock:
            return list(self._said.get(thread, ()))

    def _add(self, row: MessageRow) -> None:
        # Only the posting matters, so the first change of a message is enough.
        posted = f"{row.recipient}/{row.message_id}"
        if row.realm != DEFAULT_REALM or posted in self._thread_of:
            return
        thread = thread_of(self._keyring, row)
        _put(self._thread_of, posted, thread)
        is_answer = row.root_thread is not None and row.parent_thread is None
        if not is_answer and thread not in self._places:
            root, behalf = row.root_thread or thread, row.on_behalf_of or row.sender
            _put(self._places, thread, Place(row.sender, row.recipient, row.parent_thread, root, behalf))
        known = self._places.get(thread)
        # An asker at another door chooses the thread of its answers, which may be that of another conversation.
        if not is_answer or known is None or known.seen_by == row.recipient:
            self._note(thread, row.key)
        own = row.parent_thread
        if own is None and row.in_reply_to is not None:
            own = self._thread_of.get(f"{row.sender}/{row.in_reply_to}")
        if own is not None:
            self._note(own, row.key)

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
