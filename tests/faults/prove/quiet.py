"""Whether a backbone has come to rest: nothing grows, every reader is at the log's end, and nothing is owed."""

from __future__ import annotations

from typing import Final

import httpx
from kafka import KafkaConsumer, TopicPartition  # type: ignore[import-untyped]

from schemas.settings import Settings
from tests.faults.prove.comparison import Shown
from tests.faults.prove.evidence import answered
from tests.faults.prove.oracle import ACKED, ASKED, Note, Oracle
from tests.faults.prove.seed_parts import LISTENER
from tests.faults.test_agreement import end_offsets, views_are_at

_LOOKS: Final = 2


class Quiet:
    """Look again and again; `why` says what is not at rest."""

    def __init__(self, settings: Settings, oracle: Oracle) -> None:
        self._settings, self._oracle = settings, oracle
        self._before: dict[int, int] = {}
        self._looks = 0
        self.why: str | None = "not looked at yet"

    def look(self) -> bool:
        """Whether it was at rest at this look and the one before."""
        ends = end_offsets(self._settings)
        self.why = self._unrest(ends)
        self._before = ends
        self._looks = 0 if self.why else self._looks + 1
        return self._looks >= _LOOKS

    def _unrest(self, ends: dict[int, int]) -> str | None:
        if ends != self._before:
            return "the log grows"
        if not views_are_at(self._settings, ends):
            return "the views are behind the log"
        owed = self._owed()
        if owed is not None:
            return owed
        return None if self._reactor_is_at(ends) else "the reactor is behind the log"

    def _owed(self) -> str | None:
        """What a gateway does not show yet and was promised."""
        acked = [note for note in self._oracle.notes(ACKED) if note.stream.startswith("mailbox/")]
        asked = self._oracle.notes(ASKED)
        boxes = {note.stream for note in acked} | {note.recipient for note in asked}
        try:
            shown = answered("gateway", self._settings.gateway_url, self._settings, boxes)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return f"the gateway does not answer: {error!r}"
        for note in acked:
            if (note.stream, note.id) not in shown.mail:
                return f"not in its mailbox: {note}"
        for note in asked:
            if not _is_answered(note, shown):
                return f"no answer: {note}"
        for mail in shown.mail.values():
            if mail.stream.endswith(f"/{LISTENER}") and mail.status in ("unread", "leased"):
                return f"a listener's message waits: {mail.id}"
        return None

    def _reactor_is_at(self, ends: dict[int, int]) -> bool:
        kafka = self._settings.kafka
        consumer = KafkaConsumer(
            bootstrap_servers=kafka.bootstrap_servers,
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


def _is_answered(note: Note, shown: Shown) -> bool:
    return any(
        (mail.stream, mail.kind) == (note.recipient, note.kind) and note.body in mail.body
        for mail in shown.mail.values()
    )
