"""Compares what was promised with what there is, in Jepsen's words. Pure: plain values in, findings out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.faults.prove.oracle import ACKED, ASKED, ENDED, FOREIGN, FORGED, HANDED, TERMINAL, Note
from trunkline_agent.wire.verdicts import UNAUTHENTICATED_RECORD

LOST, DUPLICATE, DIVERGENT = "lost", "duplicate", "divergent"
OUT_OF_ORDER, CHANGED, MISBEHAVED = "out_of_order", "changed_after_end", "misbehaved"
KINDS: Final = (LOST, DUPLICATE, DIVERGENT, OUT_OF_ORDER, CHANGED, MISBEHAVED)
# Record types with new content. Derived records, claims and acks of messages are not among them.
_SAYS: Final = frozenset({"job.event", "job.registered", "task.started", "message.posted", "agent.said"})
_SAID_IN: Final = {
    "job": ("job.event", "job.registered"),
    "task": ("task.started",),
    "mailbox": ("message.posted", "agent.said"),
}
# The kind of the messages of a schedule, which are all alike.
TICK: Final = "tick"
# Where a message stands that somebody has been given.
_TAKEN: Final = frozenset({"claimed", "read"})


@dataclass(frozen=True)
class Line:
    """A row of the ledger, as the comparison needs it. `id`: of an event its seq, of a message its id.
    `request`: of a claim the id of its request.
    """

    partition: int
    offset: int
    stream: str
    type: str
    verdict: str
    id: str
    hash: str = ""
    status_after: str = ""
    ce_id: str = ""
    reason: str = ""
    request: str = ""


@dataclass(frozen=True)
class Mail:
    """A message in a mailbox: where it stands, what it says, how often and why it came back, who took it."""

    stream: str
    id: str
    status: str
    hash: str = ""
    kind: str = ""
    body: str = ""
    attempts: int = 0
    last_reason: str | None = None
    request: str = ""


@dataclass
class Shown:
    """One reader's state: the states of jobs and tasks by stream, and messages by mailbox and id."""

    name: str
    states: dict[str, str] = field(default_factory=dict)
    mail: dict[tuple[str, str], Mail] = field(default_factory=dict)


@dataclass(frozen=True)
class Reader:
    """A reader of a mailbox, which notes each message that it is handed.

    `gets_all`: the reader, or its file, is there until the end. A message that waits then has not reached it.
    """

    stream: str
    gets_all: bool = False


@dataclass
class Evidence:
    """The state of the backbone at the end.

    `views` are the tables; `others` (gateways, a live view) must show the same.
    `differences`: what a comparison field by field, with a refold of the ledger, has found. `in_files`: how
    often each message of a mailbox stands in its reader's file.
    """

    ledger: list[Line] = field(default_factory=list)
    views: Shown = field(default_factory=lambda: Shown("views"))
    others: list[Shown] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    in_files: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Finding:
    """A promise that was broken."""

    kind: str
    what: str


def compare(
    notes: Sequence[Note], evidence: Evidence, readers: Sequence[Reader] = (), *, is_at_rest: bool = True
) -> list[Finding]:
    """All that is not as it was promised. `readers`: those who note all that they are handed. Not at rest, only
    what no record that is under way can mend: what is not there yet cannot be told from what is lost.
    """
    accepted: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in evidence.ledger:
        if line.verdict == "accepted":
            accepted[line.stream, _name(line.type), line.id].append(line)
    by_kind = {
        kind: [note for note in notes if note.what == kind]
        for kind in (ACKED, HANDED, ENDED, FORGED, ASKED, FOREIGN)
    }
    found = [
        *_twice(accepted, evidence),
        *_handed_twice(by_kind[HANDED]),
        *_forged(by_kind[FORGED], evidence.ledger),
        *_foreign(by_kind[FOREIGN], evidence.ledger, is_at_rest),
        *_disorder(by_kind[ACKED], accepted),
        *_accepted_after_end(evidence.ledger),
    ]
    if is_at_rest:
        found += _acknowledged(by_kind[ACKED], accepted, evidence)
        found += _handed(by_kind[HANDED], evidence.views)
        found += unreached(readers, by_kind[HANDED], evidence.views, evidence.in_files)
        found += _answers(by_kind[ASKED], evidence.views)
        found += _changed(by_kind[ENDED], evidence)
        found += _divergent(evidence)
    return found


def _name(record_type: str) -> str:
    """Ids are those of a stream and of a kind of saying."""
    return record_type if record_type in _SAYS else ""


def _lines_of(note: Note, accepted: Mapping[tuple[str, str, str], list[Line]]) -> list[Line]:
    kinds = _SAID_IN[note.stream.partition("/")[0]]
    return [line for kind in kinds for line in accepted.get((note.stream, kind, note.id), ())]


def _acknowledged(
    notes: Sequence[Note], accepted: Mapping[tuple[str, str, str], list[Line]], evidence: Evidence
) -> Iterator[Finding]:
    for note in notes:
        where = f"{note.door}: {note.stream} {note.id} of {note.sender}"
        lines = _lines_of(note, accepted)
        if not lines:
            yield Finding(LOST, f"{where} was acknowledged and is in no accepted row of the ledger")
            continue
        if note.hash and lines[0].hash != note.hash:
            yield Finding(DIVERGENT, f"{where} says something else in the ledger")
        if not note.stream.startswith("mailbox/"):
            if note.stream not in evidence.views.states:
                yield Finding(LOST, f"{where}: it is not in the view")
        else:
            mail = evidence.views.mail.get((note.stream, note.id))
            if mail is None:
                yield Finding(LOST, f"{where} was acknowledged and is not in the view of the mailbox")
            elif note.hash and mail.hash != note.hash:
                yield Finding(DIVERGENT, f"{where} says something else in the view")


def _twice(accepted: Mapping[tuple[str, str, str], list[Line]], evidence: Evidence) -> Iterator[Finding]:
    for (stream, kind, name), lines in accepted.items():
        if kind and len(lines) > 1:
            yield Finding(DUPLICATE, f"{stream} {name} ({kind}) was accepted {len(lines)} times")
    rows = Counter((line.partition, line.offset) for line in evidence.ledger)
    for (partition, offset), count in rows.items():
        if count > 1:
            yield Finding(DUPLICATE, f"record {partition}/{offset} has {count} rows in the ledger")
    # Each message of the load says something that no other says, but for those of a schedule.
    mails = [mail for mail in evidence.views.mail.values() if mail.kind != TICK]
    said = Counter((mail.stream, mail.hash) for mail in mails if mail.hash)
    for (stream, _), count in said.items():
        if count > 1:
            yield Finding(DUPLICATE, f"{stream} holds the same message {count} times")
    # Each job and each task is asked for once, however often the request was sent.
    asked = Counter(
        (kind, line.hash)
        for (_, kind, _), lines in accepted.items()
        for line in lines[:1]
        if kind in ("job.registered", "task.started") and line.hash
    )
    for (kind, found), count in asked.items():
        if count > 1:
            yield Finding(DUPLICATE, f"one request was accepted as {kind} in {count} streams: {found}")
    for (stream, name), count in evidence.in_files.items():
        if count > 1:
            yield Finding(DUPLICATE, f"{stream} {name} stands {count} times in its reader's file")


def _handed_twice(notes: Sequence[Note]) -> Iterator[Finding]:
    requests: dict[tuple[str, str], set[str]] = defaultdict(set)
    for note in notes:
        requests[note.stream, note.id].add(note.request)
    for (stream, name), asked in requests.items():
        if len(asked) > 1:
            yield Finding(DUPLICATE, f"{stream} {name} was handed out to {len(asked)} requests")


def _handed(notes: Sequence[Note], views: Shown) -> Iterator[Finding]:
    for stream, name in dict.fromkeys((note.stream, note.id) for note in notes):
        mail = views.mail.get((stream, name))
        if mail is None:
            yield Finding(LOST, f"{stream} {name} was handed out and is not in the view")
        elif mail.status not in TERMINAL:
            yield Finding(CHANGED, f"{stream} {name} was handed out for good and is {mail.status}")


def unreached(
    readers: Sequence[Reader], notes: Sequence[Note], shown: Shown, in_files: Mapping[tuple[str, str], int]
) -> Iterator[Finding]:
    """Yield messages that were taken and handed to no reader, or that wait although their reader is there.

    `notes`: the notes of messages that were handed out.
    """
    by_stream = {reader.stream: reader for reader in readers}
    handed = {(note.stream, note.id) for note in notes}
    for key, mail in shown.mail.items():
        reader = by_stream.get(mail.stream)
        if reader is None or key in handed or key in in_files:
            continue
        if mail.status in _TAKEN:
            yield Finding(LOST, f"{mail.stream} {mail.id} is {mail.status} and was handed to nobody")
        elif reader.gets_all and mail.status not in TERMINAL:
            yield Finding(LOST, f"{mail.stream} {mail.id} is {mail.status} and its reader did not get it")


def _forged(notes: Sequence[Note], ledger: Sequence[Line]) -> Iterator[Finding]:
    forged = {(note.stream, note.hash) for note in notes}
    for line in ledger:
        if line.verdict == "accepted" and (line.stream, line.hash) in forged:
            yield Finding(DIVERGENT, f"{line.stream} {line.id} was accepted and nobody who may has said it")


def _foreign(notes: Sequence[Note], ledger: Sequence[Line], is_at_rest: bool) -> Iterator[Finding]:
    """Check that each record of a stranger has a row, and was rejected because no door has made it."""
    lines = {line.ce_id: line for line in ledger if line.ce_id}
    for note in notes:
        line, where = lines.get(note.id), f"{note.stream} {note.id}, which no door has made,"
        if line is None:
            if is_at_rest:
                yield Finding(LOST, f"{where} has no row in the ledger")
        elif (line.verdict, line.reason) != ("rejected", UNAUTHENTICATED_RECORD):
            yield Finding(DIVERGENT, f"{where} is {line.verdict} ({line.reason}), not {UNAUTHENTICATED_RECORD}")


def _answers(notes: Sequence[Note], views: Shown) -> Iterator[Finding]:
    """Check that each acknowledged record has its answer once."""
    answers: Counter[tuple[str, str, str]] = Counter()
    wanted = {(note.recipient, note.kind, note.body) for note in notes}
    kinds = {(recipient, kind) for recipient, kind, _ in wanted}
    for mail in views.mail.values():
        if (mail.stream, mail.kind) in kinds:
            for recipient, kind, body in wanted:
                if (recipient, kind) == (mail.stream, mail.kind) and body in mail.body:
                    answers[recipient, kind, body] += 1
    for note in {(note.recipient, note.kind, note.body): note for note in notes}.values():
        count = answers[note.recipient, note.kind, note.body]
        if count != 1:
            what = f"{note.stream} {note.id} has {count} answers {note.kind} in {note.recipient}, not one"
            yield Finding(LOST if count == 0 else DUPLICATE, what)


def _disorder(notes: Sequence[Note], accepted: Mapping[tuple[str, str, str], list[Line]]) -> Iterator[Finding]:
    """Check that the records of each sender are in its order.

    A repeated record, such as the reply to a message that came again, lies where it was said first.
    """
    senders: dict[tuple[str, str], list[Note]] = defaultdict(list)
    said_by: dict[tuple[str, str], set[str]] = defaultdict(set)
    for note in notes:
        if note.order is not None and note.sender not in said_by[note.stream, note.id]:
            said_by[note.stream, note.id].add(note.sender)
            senders[note.sender, note.stream].append(note)
    for (sender, stream), said in senders.items():
        last, last_id = -1, ""
        for note in sorted(said, key=lambda note: note.order or 0):
            if len(said_by[stream, note.id]) > 1:
                continue
            lines = _lines_of(note, accepted)
            if not lines:
                continue
            if lines[0].offset < last:
                yield Finding(OUT_OF_ORDER, f"{stream}: {note.id} of {sender} lies before {last_id}")
            last, last_id = max(last, lines[0].offset), note.id


def _accepted_after_end(ledger: Sequence[Line]) -> Iterator[Finding]:
    ended: set[str] = set()
    for line in sorted(ledger, key=lambda line: (line.partition, line.offset)):
        if not line.stream.startswith(("job/", "task/")) or line.verdict != "accepted":
            continue
        if line.stream in ended:
            yield Finding(CHANGED, f"{line.stream} {line.id} was accepted after the end")
        if line.status_after in TERMINAL:
            ended.add(line.stream)


def _changed(notes: Sequence[Note], evidence: Evidence) -> Iterator[Finding]:
    for shown in (evidence.views, *evidence.others):
        for note in notes:
            status = shown.states.get(note.stream)
            if status is not None and status != note.status:
                yield Finding(CHANGED, f"{note.stream} had ended as {note.status}; {shown.name}: {status}")


def _divergent(evidence: Evidence) -> Iterator[Finding]:
    yield from (Finding(DIVERGENT, difference) for difference in evidence.differences)
    views = evidence.views
    for other in evidence.others:
        for stream in sorted(views.states.keys() | other.states.keys()):
            here, there = views.states.get(stream), other.states.get(stream)
            if here != there:
                yield Finding(DIVERGENT, f"{stream}: {here} in the view, {there} at {other.name}")
        for key in sorted(views.mail.keys() | other.mail.keys()):
            one, two = views.mail.get(key), other.mail.get(key)
            if one is None or two is None or _state(one) != _state(two):
                yield Finding(DIVERGENT, f"{key[0]} {key[1]}: {one} in the view, {two} at {other.name}")


def _state(mail: Mail) -> tuple[str, str, int, str | None]:
    return mail.status, mail.hash, mail.attempts, mail.last_reason
