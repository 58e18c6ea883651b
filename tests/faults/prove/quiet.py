"""True if a backbone has come to rest: nothing grows, every reader is at the log's end, and nothing is owed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import httpx
from kafka import KafkaConsumer, TopicPartition  # type: ignore[import-untyped]

from schemas.log_access.kafka_clients import client_options
from schemas.settings.settings import Settings
from tests.faults.prove.comparison import Reader, Shown, unreached
from tests.faults.prove.evidence import answered, in_files
from tests.faults.prove.load_messages import FRED
from tests.faults.prove.oracle import ACKED, ASKED, HANDED, TERMINAL, Note, Oracle
from tests.faults.prove.seed_parts import LISTENER
from tests.faults.test_agreement import end_offsets, views_are_at

_LOOKS: Final = 2
# Where nothing has moved for so long, what is owed does not come any more: it is for the comparison to say so.
_STILL_S: Final = 10.0


class Quiet:
    """Look again and again; `why` says what is not at rest."""

    def __init__(self, settings: Settings, oracle: Oracle, readers: Sequence[Reader]) -> None:
        self._settings, self._oracle, self._readers = settings, oracle, readers
        self._before: dict[int, int] = {}
        self._looks = 0
        self._still_since = math.inf
        self.why: str | None = "not looked at yet"

    def look(self) -> bool:
        """True if it was at rest at this look and the one before, or owes something and does not move."""
        ends = end_offsets(self._settings)
        self.why = self._unrest(ends)
        if self.why is not None:
            self._still_since = math.inf
        else:
            self._still_since = min(self._still_since, time.monotonic())
            self.why = self._owed()
            if self.why is not None and time.monotonic() - self._still_since >= _STILL_S:
                self.why = None
        self._before = ends
        self._looks = 0 if self.why else self._looks + 1
        return self._looks >= _LOOKS

    def _unrest(self, ends: dict[int, int]) -> str | None:
        if ends != self._before:
            return "the log grows"
        if not views_are_at(self._settings, ends):
            return "the views are behind the log"
        return None if self._reactor_is_at(ends) else "the reactor is behind the log"

    def _owed(self) -> str | None:
        """Describe a promise that the gateway does not show as kept yet."""
        notes = self._oracle.notes()
        try:
            shown = answered("gateway", self._settings.gateway_url, self._settings, _mailboxes_of(notes))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self._still_since = math.inf
            return f"the gateway does not answer: {error!r}"
        for mail in shown.mail.values():
            # A lease ends when its time is over, with no sign before.
            if mail.stream.endswith(f"/{LISTENER}") and mail.status in ("unread", "leased"):
                self._still_since = math.inf
                return f"a listener's message waits: {mail.id}"
        return owed(notes, shown, self._readers, in_files(self._settings, (FRED,)))

    def _reactor_is_at(self, ends: dict[int, int]) -> bool:
        kafka = self._settings.kafka
        consumer = KafkaConsumer(
            **client_options(kafka),
            group_id=self._settings.gateway.reactor_group,
            enable_auto_commit=False,
        )
        try:
            return all(
                (consumer.committed(TopicPartition(kafka.topic, partition)) or 0) >= end
                for partition, end in ends.items()
            )
        finally:
            consumer.close(autocommit=False)


def owed(
    notes: Sequence[Note], shown: Shown, readers: Sequence[Reader], files: Mapping[tuple[str, str], int]
) -> str | None:
    """Describe the first promise that is not kept yet, or return None.

    Promises are: a message reaches its mailbox and its reader, a request is answered, a message that was handed
    out is claimed.
    """
    handed = [note for note in notes if note.what == HANDED]
    for note in notes:
        key = (note.stream, note.id)
        if note.what == ACKED and note.stream.startswith("mailbox/") and key not in shown.mail:
            return f"not in its mailbox: {note}"
        if note.what == ASKED and not _is_answered(note, shown):
            return f"no answer: {note}"
        if note.what == HANDED and (key not in shown.mail or shown.mail[key].status not in TERMINAL):
            return f"handed out, and not claimed: {note}"
    return next((finding.what for finding in unreached(readers, handed, shown, files)), None)


def _mailboxes_of(notes: Sequence[Note]) -> set[str]:
    asked = {note.recipient for note in notes if note.what == ASKED}
    return asked | {note.stream for note in notes if note.stream.startswith("mailbox/")}


def _is_answered(note: Note, shown: Shown) -> bool:
    return any(
        (mail.stream, mail.kind) == (note.recipient, note.kind) and note.body in mail.body
        for mail in shown.mail.values()
    )
