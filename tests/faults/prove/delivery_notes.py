"""The deliveries of a run as its clients saw them: each request for messages, each end of a lease, each event.

It knows nothing of the system. Times are seconds since 1970 on this machine, which also runs Kafka. `sent` is
before a request was sent for the first time, `answered` after its answer, and `sends` how often it was sent.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar

ACK, NACK, EXTEND = "ack", "nack", "extend"
EXTEND_S: Final = 3
# How often a message is handed out before it is dead: a setting of the gateways.
ATTEMPTS_MOST: Final = 3


@dataclass(frozen=True)
class Got:
    """A message as it was handed out. `attempt` and `deadline` (a time) are 0 for a message that is taken for
    good.
    """

    id: str
    attempt: int = 0
    deadline: float = 0.0
    sender: str = ""
    in_reply_to: str = ""
    body: str = ""


@dataclass(frozen=True)
class Taking:
    """A request for messages of a mailbox, and what it got. `gateway` has answered it. `lease_s` is 0, and
    `lease_id` is "", where messages are taken for good.
    """

    mailbox: str
    door: str
    gateway: str
    request: str
    sent: float
    answered: float
    sends: int
    limit: int
    wait_s: float
    lease_s: int
    lease_id: str
    got: tuple[Got, ...]


@dataclass(frozen=True)
class Timed:
    """A message that was sent with times, in seconds from its posting; 0 stands for none."""

    mailbox: str
    id: str
    sent: float
    answered: float
    deliver_after_s: float
    expires_in_s: float


@dataclass(frozen=True)
class Published:
    """A text that was published to a topic. `mailboxes` are those of its subscribers."""

    text: str
    mailboxes: tuple[str, ...]


@dataclass(frozen=True)
class BlobSent:
    """A message with a blob that was sent: the SHA-256 and the length of the content."""

    mailbox: str
    id: str
    digest: str
    bytes: int


@dataclass(frozen=True)
class Fetched:
    """The answer to a request for a message's blob. `said` is the text of a refusal."""

    mailbox: str
    id: str
    status: int
    digest: str
    bytes: int
    said: str = ""


@dataclass(frozen=True)
class Filled:
    """A text that was sent to a mailbox with a limit. `id` is the message's, "" if the mailbox was full."""

    mailbox: str
    text: str
    id: str


@dataclass(frozen=True)
class Ending:
    """The answer about one leased message: it was acknowledged, given back (`reason`) or extended, or not.

    `lease` is the id of the lease, `refusal` the reason of a refusal.
    """

    how: str
    mailbox: str
    lease: str
    id: str
    sent: float
    answered: float
    sends: int
    is_done: bool
    reason: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Answered:
    """The answer to a question: `id` is the question's, `reply` that of the reply, "" without one in time."""

    mailbox: str
    id: str
    sent: float
    answered: float
    reply: str = ""
    body: str = ""


@dataclass(frozen=True)
class Seen:
    """An event of a mailbox's stream that a follower got. `place` is the event's id."""

    follower: str
    mailbox: str
    place: str
    id: str
    at: float
    gateway: str


Delivery = Taking | Timed | Published | BlobSent | Fetched | Filled | Ending | Answered | Seen
_Kind = TypeVar("_Kind", Taking, BlobSent, Ending, Answered, Seen)


class Deliveries:
    """All of a run, in memory and one JSON line each in a file. Safe for several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._notes: list[Delivery] = []

    def note(self, note: Delivery) -> None:
        """Remember it."""
        with self._lock:
            self._notes.append(note)
            with self._path.open("a") as file:
                file.write(json.dumps({"what": type(note).__name__, **asdict(note)}) + "\n")

    def all(self) -> list[Delivery]:
        """All so far."""
        with self._lock:
            return list(self._notes)

    def of(self, kind: type[_Kind], mailbox: str = "") -> list[_Kind]:
        """All of a kind so far, of a mailbox if one is given."""
        return [note for note in self.all() if isinstance(note, kind) and mailbox in ("", note.mailbox)]
