"""Messages with blobs: who uploads and sends them, who fetches them, and what must be true of them (DL-25)."""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.faults.prove.comparison import LOST, MISBEHAVED, Finding, Mail
from tests.faults.prove.delivery_checks import Key
from tests.faults.prove.delivery_doors import HubMailbox
from tests.faults.prove.delivery_notes import ACK, BlobSent, Deliveries, Delivery, Fetched
from tests.faults.prove.hub_client import Clock, GaveUp, shown, text_of
from tests.faults.prove.load_deliveries import IsOver
from tests.faults.prove.load_messages import mailbox
from tests.faults.prove.oracle import Oracle

BLOBS: Final = "/api/hub/blobs"
_PAUSE_S: Final = 0.5
_LEASE_S: Final = 10
_BYTES_MOST: Final = 3 * 1024 * 1024
# Some contents come again, so that a blob is stored twice and several messages refer to it.
_CONTENTS: Final = 12


class BlobSender:
    """Uploads contents of many lengths, and sends messages that refer to them to the mailbox `to`."""

    def __init__(
        self, own: HubMailbox, to: str, draw: random.Random, log: Deliveries, oracle: Oracle, clock: Clock
    ) -> None:
        self._own, self._to, self._draw = own, to, draw
        self._log, self._oracle, self._clock = log, oracle, clock

    def run(self) -> None:
        """Send until the load ends."""
        while self._clock.may_begin():
            content = _content(self._draw.randrange(_CONTENTS))
            digest = hashlib.sha256(content).hexdigest()
            answer = self._own.client.ask("PUT", BLOBS, params={"digest": digest}, content=content)
            if answer.status != 200:
                raise AssertionError(f"an upload: {shown(answer)}")
            key = uuid.uuid4().hex
            text = f"{self._own.name} with a blob {key}"
            message_id = self._own.send(self._to, text, key, None, self._oracle, blob=digest)
            self._log.note(BlobSent(mailbox(self._to), message_id, digest, len(content)))
            time.sleep(_PAUSE_S)


def _content(number: int) -> bytes:
    """Return one of the contents: empty, short or long, always the same for its number."""
    draw = random.Random(number)
    return draw.randbytes((0, 1, draw.randrange(70_000), draw.randrange(_BYTES_MOST))[number % 4])


class BlobTaker:
    """Leases the messages of its mailbox, fetches the blob of each at one of the gateways, and acknowledges it.

    It takes none for good: a gateway that hangs may hand out messages to a request that was given up.
    """

    def __init__(self, own: HubMailbox, log: Deliveries, clock: Clock, is_over: IsOver) -> None:
        self._own, self._log, self._clock, self._is_over = own, log, clock, is_over
        self._fetched: set[str] = set()

    def run(self) -> None:
        """Take until the load ends, and then all that is left."""
        while not (self._is_over() and self._all_came()):
            lease = self._own.take(uuid.uuid4().hex, limit=3, lease_s=_LEASE_S, wait_s=1)
            for got in lease.got:
                self._fetch(got.id)
            if lease.got:
                self._own.end(ACK, lease.id, [got.id for got in lease.got])
            time.sleep(_PAUSE_S)
            if not self._clock.has_patience():
                raise GaveUp(f"the blobs of {self._own.name}")

    def _fetch(self, message_id: str) -> None:
        path = f"/api/hub/mailboxes/default/{self._own.name}/messages/{message_id}/blob"
        # Another gateway may not know the message yet, and then answers 404.
        answer = self._own.client.ask_known("GET", path)
        found = hashlib.sha256(answer.body).hexdigest()
        self._fetched.add(message_id)
        box, size = mailbox(self._own.name), len(answer.body)
        self._log.note(
            Fetched(
                box, message_id, answer.status, found, size, "" if answer.is_success else text_of(answer)[:200]
            )
        )

    def _all_came(self) -> bool:
        sent = self._log.of(BlobSent, mailbox(self._own.name))
        return self._fetched.issuperset(one.id for one in sent)


def check_blobs(notes: Sequence[Delivery], mail: Mapping[Key, Mail], *, is_at_rest: bool) -> Iterator[Finding]:
    """Yield each blob that did not come as it was sent, and in the end each that did not come.

    Args:
        notes: All that the clients saw.
        mail: The messages in the end.
        is_at_rest: False: what is not there yet may still come.
    """
    sent = {(note.mailbox, note.id): note for note in notes if isinstance(note, BlobSent)}
    came: set[tuple[str, str]] = set()
    for note in notes:
        one = sent.get((note.mailbox, note.id)) if isinstance(note, Fetched) else None
        if one is None or not isinstance(note, Fetched):
            continue
        came.add((one.mailbox, one.id))
        if note.status != 200:
            yield Finding(
                LOST, f"{one.mailbox} {one.id} has a blob that was refused: {note.status} {note.said}"
            )
        elif (note.digest, note.bytes) != (one.digest, one.bytes):
            yield Finding(
                MISBEHAVED, f"{one.mailbox} {one.id} has a blob of {one.bytes} B, and {note.bytes} B came"
            )
    for key, one in sent.items() if is_at_rest else ():
        if key not in came:
            status = mail[key].status if key in mail else "unknown"
            yield Finding(LOST, f"the blob of {one.mailbox} {one.id} did not come; the message is {status}")
