"""Messages to a topic and of a schedule: who publishes and keeps them, and what must be true in the end."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.faults.prove.comparison import DUPLICATE, LOST, TICK, Finding, Line, Mail
from tests.faults.prove.delivery_checks import Key
from tests.faults.prove.delivery_doors import HubMailbox
from tests.faults.prove.delivery_notes import Deliveries, Delivery, Published, Taking
from tests.faults.prove.hub_client import Clock, HubClient, shown
from tests.faults.prove.load_messages import mailbox

TOPIC: Final = "prove"
_TOPIC_PATH: Final = f"/api/hub/topics/{TOPIC}"
_SCHEDULE_PATH: Final = "/api/hub/schedules/prove"
_PAUSE_S: Final = 0.4


def subscribe(operator: HubClient, names: Sequence[str]) -> None:
    """Subscribe these mailboxes to the topic, while all is well."""
    for name in names:
        answer = operator.ask("POST", f"{_TOPIC_PATH}/subscribe", json={"subscriber": name})
        if answer.status != 200:
            raise AssertionError(f"{name} was not subscribed: {shown(answer)}")


class Publisher:
    """Publishes to the topic, whose subscribers are `names`."""

    def __init__(self, own: HubMailbox, names: Sequence[str], log: Deliveries, clock: Clock) -> None:
        self._own, self._log, self._clock = own, log, clock
        self._mailboxes = tuple(mailbox(name) for name in names)

    def run(self) -> None:
        """Publish until the load ends."""
        while self._clock.may_begin():
            key = uuid.uuid4().hex
            text = f"{self._own.name} publishes {key} ☃"
            self._own.publish(TOPIC, text, key)
            self._log.note(Published(text, self._mailboxes))
            time.sleep(_PAUSE_S)


class ScheduleKeeper:
    """Sets a schedule that posts a message each second to the mailbox `to`, and removes it at the end."""

    def __init__(self, client: HubClient, to: str, clock: Clock) -> None:
        self._client, self._to, self._clock = client, to, clock

    def run(self) -> None:
        """Keep the schedule until the load ends."""
        message = {"recipient": self._to, "type": TICK, "payload": {"text": TICK}}
        self._ask(_SCHEDULE_PATH, {**message, "every_s": 1, "missed": "all"})
        while self._clock.may_begin():
            time.sleep(_PAUSE_S)
        self._ask(f"{_SCHEDULE_PATH}/remove", {})

    def _ask(self, path: str, body: dict[str, object]) -> None:
        answer = self._client.ask_known("POST", path, key=uuid.uuid4().hex, json=body)
        if answer.status != 200:
            raise AssertionError(f"{path}: {shown(answer)}")


def check_topics(
    notes: Sequence[Delivery], mail: Mapping[Key, Mail], ledger: Sequence[Line], *, is_at_rest: bool
) -> Iterator[Finding]:
    """Yield each message to a topic that a subscriber got not once, and runs that were not posted once.

    Args:
        notes: All that the clients saw.
        mail: The messages in the end.
        ledger: The ledger's rows.
        is_at_rest: False: what is not there yet may still come.
    """
    got: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for note in notes:
        for one in note.got if isinstance(note, Taking) else ():
            got[note.mailbox, one.body].add(one.id)
    for note in notes:
        for box in note.mailboxes if isinstance(note, Published) else ():
            count = len(got[box, note.text])
            if count > 1 or (is_at_rest and not count):
                kind = DUPLICATE if count else LOST
                yield Finding(kind, f"{box} got {count} copies of {note.text!r}")
    runs = sum(line.type == "schedule.ran" and line.verdict == "accepted" for line in ledger)
    posted = sum(one.kind == TICK for one in mail.values())
    if posted > runs or (is_at_rest and posted < runs):
        kind = DUPLICATE if posted > runs else LOST
        yield Finding(kind, f"a schedule ran {runs} times, and has {posted} messages")
