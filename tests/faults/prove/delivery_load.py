"""All consumers, followers, askers and answerers of a seed, at two gateways and at the doors HTTP and MCP."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from tests.faults.prove.blob_messages import BlobSender, BlobTaker, check_blobs
from tests.faults.prove.comparison import Finding, Line, Mail
from tests.faults.prove.delivery_checks import Key, Outage, check_deliveries
from tests.faults.prove.delivery_doors import HubMailbox, McpMailbox
from tests.faults.prove.delivery_notes import (
    ATTEMPTS_MOST,
    Answered,
    Deliveries,
    Ending,
    Fetched,
    Filled,
    Published,
    Seen,
    Taking,
    Timed,
)
from tests.faults.prove.follow_checks import check_followers
from tests.faults.prove.full_mailboxes import Emptier, Filler, check_full_mailbox, limit_mailbox
from tests.faults.prove.hub_client import Clock, HubClient
from tests.faults.prove.load_deliveries import (
    Consumer,
    Follower,
    IsOver,
    PatientConsumer,
    SlowSender,
    SureConsumer,
)
from tests.faults.prove.load_messages import DORA, FOLA, mailbox
from tests.faults.prove.load_replies import Answerer, Asker, AskersMailbox
from tests.faults.prove.mcp_client import McpClient, new_participant
from tests.faults.prove.oracle import ACKED, Oracle
from tests.faults.prove.timed_messages import TimedSender, TimedTaker, check_times
from tests.faults.prove.topic_messages import Publisher, ScheduleKeeper, check_topics, subscribe

# Asker and answerer over HTTP, and over MCP.
ABEL, ROSA, ADA, ROLF = "abel", "rosa", "ada", "rolf"
# Mailboxes with few messages, with delayed ones and ones that expire, and with those of a schedule. The last
# two are subscribed to a topic.
NORA: Final = "nora"
TILDA, THEO = SUBSCRIBERS = ("tilda", "theo")
# A mailbox with messages that refer to blobs.
BELA: Final = "bela"
# Mailboxes of those who see to it that each way to end a lease is tried, over HTTP and over MCP.
GIL, GINA = "gil", "gina"
# A mailbox with a small limit.
LINA: Final = "lina"
FILLERS: Final = 3
ANSWERERS: Final = (ROSA, ROLF)
CONSUMED: Final = tuple(mailbox(name) for name in (DORA, NORA, ABEL, ROSA, ADA, ROLF, GIL, GINA))
Run = tuple[str, Callable[[], None]]


class DeliveryLoad:
    """Registers them all when it is made, while all is well.

    Args:
        hub_urls: The gateways. The clients take turns at them.
        mcp_urls: Their MCP doors.
        add_principal: Adds a worker of this name, and returns its token.
        operator: A client that may add participants.
        log: The notes of what they see.
        seed: The same seed gives the same choices.
    """

    def __init__(
        self,
        hub_urls: Sequence[str],
        mcp_urls: Sequence[str],
        add_principal: Callable[[str], str],
        operator: HubClient,
        log: Deliveries,
        oracle: Oracle,
        clock: Clock,
        seed: int,
    ) -> None:
        self._hub_urls, self._mcp_urls = list(hub_urls), list(mcp_urls)
        self._log, self._oracle, self._clock, self._seed = log, oracle, clock, seed
        self._clients: list[HubClient | McpClient | Follower] = []
        # The mailbox of a participant is that of the principal of the same name. In this order only: a
        # participant may not take the name of a principal.
        self._keys: dict[str, RSAPrivateKey] = {
            name: new_participant(operator, name) for name in (DORA, NORA, ADA, ROLF, GINA)
        }
        self._tokens = {
            name: add_principal(name) for name in (DORA, NORA, FOLA, ABEL, ROSA, BELA, GIL, *SUBSCRIBERS, LINA)
        }
        subscribe(operator, SUBSCRIBERS)
        limit_mailbox(operator, LINA)
        # The askers, and the takers of their mailboxes, that have not ended.
        self._asking: set[str] = set()
        self._expecting: set[str] = set()

    def token(self, name: str) -> str:
        """Return the token of a principal with a mailbox."""
        return self._tokens[name]

    def _hub(self, name: str, *, takes_refusals: bool = False) -> HubMailbox:
        client = HubClient(
            self._hub_urls, self._tokens[name], self._clock, self._next_seed, takes_refusals=takes_refusals
        )
        self._clients.append(client)
        return HubMailbox(client, name, self._log)

    def _mcp(self, name: str) -> McpMailbox:
        client = McpClient(self._mcp_urls, name, self._keys[name], self._clock, self._next_seed)
        self._clients.append(client)
        return McpMailbox(client, name, self._log)

    def _follower(self, name: str, number: int, is_over: IsOver) -> Follower:
        found = Follower(
            self._hub_urls, self._tokens[name], name, number, self._log, self._oracle, self._clock, is_over
        )
        self._clients.append(found)
        return found

    @property
    def _next_seed(self) -> int:
        return self._seed * 1000 + len(self._clients)

    def _draw(self, what: str) -> random.Random:
        return random.Random(f"{what}/{self._seed}")

    def runs(self, is_over: IsOver) -> Iterator[Run]:
        """Yield a name and a function for each thread. `is_over`: all other senders have ended."""
        log, oracle, clock = self._log, self._oracle, self._clock
        for number in range(2):
            for own in (self._hub(DORA), self._mcp(DORA)):
                draw = self._draw(f"consumer/{own.door}/{number}")
                yield f"Consumer-{own.door}-{number}", Consumer(own, draw, log, oracle, clock, is_over).run
        for own in (self._hub(GIL), self._mcp(GINA)):
            yield f"SureConsumer-{own.door}", SureConsumer(own, oracle, clock).run
        slow: set[str] = set()
        yield "SlowSender", _noted(slow, NORA, SlowSender(self._hub(ABEL), NORA, oracle, clock).run)
        for number, own in enumerate((self._hub(NORA), self._mcp(NORA))):
            draw = self._draw(f"patient/{number}")
            patient = PatientConsumer(own, draw, log, oracle, clock, lambda: not slow)
            yield f"PatientConsumer-{own.door}-{number}", patient.run
        timed: set[str] = set()
        sender = TimedSender(self._hub(ABEL), TILDA, self._draw("timed"), log, oracle, clock)
        yield "TimedSender", _noted(timed, TILDA, sender.run)
        publisher = Publisher(self._hub(ABEL), SUBSCRIBERS, log, clock)
        yield "Publisher", _noted(timed, ABEL, publisher.run)
        yield "ScheduleKeeper", _noted(timed, THEO, ScheduleKeeper(self._hub(ABEL).client, THEO, clock).run)
        for name in SUBSCRIBERS:
            yield f"TimedTaker-{name}", TimedTaker(self._hub(name), log, clock, lambda: not timed).run
        blobs: set[str] = set()
        uploader = BlobSender(self._hub(ABEL), BELA, self._draw("blobs"), log, oracle, clock)
        yield "BlobSender", _noted(blobs, BELA, uploader.run)
        yield "BlobTaker", BlobTaker(self._hub(BELA), log, clock, lambda: not blobs).run
        for number in range(FILLERS):
            filling = self._hub(ABEL, takes_refusals=True)
            filler = Filler(filling, LINA, self._draw(f"filler/{number}"), log, oracle, clock)
            yield f"Filler-{number}", filler.run
        yield "Emptier", Emptier(self._hub(LINA), clock).run
        for name, number in ((FOLA, 0), (FOLA, 1), (DORA, 0)):
            yield f"Follower-{name}-{number}", self._follower(name, number, is_over).run
        for asks in (self._hub(ABEL), self._mcp(ADA)):
            asker = Asker(asks, ANSWERERS, self._draw(f"asker/{asks.name}"), log, oracle, clock)
            yield f"Asker-{asks.name}", _noted(self._asking, asks.name, asker.run)
        for own in (self._hub(ABEL), self._mcp(ADA)):
            box = AskersMailbox(own, log, clock, lambda: not self._asking)
            yield f"AskersMailbox-{own.name}", _noted(self._expecting, own.name, box.run)
        for number, own in enumerate((self._hub(ROSA), self._hub(ROSA), self._mcp(ROLF))):
            draw = self._draw(f"answerer/{number}")
            answerer = Answerer(own, draw, oracle, clock, lambda: not self._expecting)
            yield f"Answerer-{own.name}-{number}", answerer.run

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()

    def done(self) -> dict[str, int]:
        """Return how often each operation was answered, for the results."""
        found: Counter[str] = Counter()
        for note in self._log.all():
            if isinstance(note, Taking):
                found[f"{note.door}:leased" if note.lease_s else "http:drained"] += len(note.got)
                found["answered_at_peer"] += note.gateway in (self._hub_urls[1], self._mcp_urls[1])
                found["interrupted"] += note.sends > 1
            elif isinstance(note, Timed):
                found["delayed"] += note.deliver_after_s > 0
                found["expiring"] += note.expires_in_s > 0
            elif isinstance(note, Published):
                found["published"] += 1
            elif isinstance(note, Fetched):
                found["fetched"] += 1
            elif isinstance(note, Filled):
                found["filled" if note.id else "refused_by_limit"] += 1
            elif isinstance(note, Ending):
                found[note.how if note.is_done else "refused"] += 1
            elif isinstance(note, Answered):
                found["asked"] += 1
                found["replied"] += bool(note.reply)
            elif isinstance(note, Seen):
                found["followed"] += 1
        found["resumed"] = sum(client.resumed for client in self._clients if isinstance(client, Follower))
        return dict(sorted(found.items()))


def _noted(names: set[str], name: str, run: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs, with the name among these until it has ended."""
    names.add(name)

    def noted() -> None:
        try:
            run()
        finally:
            names.discard(name)

    return noted


def judge_deliveries(
    log: Deliveries,
    oracle: Oracle,
    mail: Mapping[Key, Mail],
    ledger: Sequence[Line],
    outages: Sequence[Outage],
    *,
    is_at_rest: bool,
) -> list[Finding]:
    """Return all that consumers, askers and followers saw and should not have seen, or the other way round."""
    notes = log.all()
    offsets = {
        (line.stream, line.id): line.offset
        for line in ledger
        if line.verdict == "accepted" and line.type == "message.posted"
    }
    consumed = check_deliveries(
        notes, mail, CONSUMED, attempts_most=ATTEMPTS_MOST, outages=outages, is_at_rest=is_at_rest
    )
    consumed += check_times(notes, mail, is_at_rest=is_at_rest)
    consumed += check_blobs(notes, mail, is_at_rest=is_at_rest)
    consumed += check_topics(notes, mail, ledger, is_at_rest=is_at_rest)
    consumed += check_full_mailbox(notes, mail, ledger, mailbox(LINA), is_at_rest=is_at_rest)
    return consumed + check_followers(notes, oracle.notes(ACKED), offsets, is_at_rest=is_at_rest)


# Without one of these, a run says nothing about deliveries.
NEEDED: Final = (
    *("http:leased", "mcp:leased", "http:drained", "ack", "nack", "extend", "asked", "replied"),
    *("followed", "resumed", "answered_at_peer", "delayed", "expiring", "published", "fetched"),
    *("filled", "refused_by_limit"),
)
