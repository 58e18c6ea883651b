"""Full mailboxes and senders above their rate: lines wait in the files, and each counts once (LM-08).

The real fold settles what the carrier appends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from connectors.doors.file_bridge.held_lines import NOT_TRIED, Carried, HeldRetries, NotHeld
from connectors.doors.file_bridge.posting_rules import NO_VERDICT, BridgeRules, KnownLimits
from connectors.doors.file_bridge.session_carrier import SessionCarrier
from schemas.effects.recipients import Limits
from schemas.fold.entries import Entries
from schemas.streams.mailboxes.mailbox_bodies import LIMIT_MOST, MailboxClaim
from schemas.wire.record import OutgoingRecord, Position
from tests.connectors.doors.file_bridge.carriers import NO_RULES, carrier
from tests.schemas.mailbox_records import at
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.queue import Queue
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, MAILBOX_FULL, RATE_LIMITED, REJECTED


class Limited:
    """The rules of a test: limits by recipient, and senders that have to wait."""

    def __init__(self, **limits: dict[str, int | None]) -> None:
        self.of = limits
        self.slow: set[str] = set()

    def limits(self, recipient: str) -> dict[str, int | None]:
        """The limits of a mailbox."""
        return self.of.get(recipient, {})

    def refusal(self, session: str, recipient: str, sender: str, body_bytes: int) -> str | None:
        """The reason if the sender has to wait."""
        return RATE_LIMITED if sender in self.slow else None


class Mailboxes:
    """Mailboxes with the real fold. `then` happens after an append, before the carrier knows of it."""

    def __init__(self) -> None:
        self.entries: dict[str, Entries] = {}
        self.settled: list[tuple[str, str, str]] = []
        self.then: Callable[[], object] = lambda: None
        self._now_us = 0

    def append(self, records: Sequence[OutgoingRecord]) -> list[str | None]:
        """Settle the records, and return why mailboxes have not taken them."""
        found: list[str | None] = []
        for record in records:
            name = record.stream.rpartition("/")[2]
            self._now_us += 1000
            settled = at(self._now_us, record, self.entries.setdefault(name, Entries({})))
            self.settled.append((name, record.ce_id, settled.verdict))
            found.append(MAILBOX_FULL if settled.reason == MAILBOX_FULL else None)
        self.then()
        return found

    def take(self, name: str, ids: Sequence[str]) -> None:
        """Take messages out of a mailbox."""
        if not ids:
            return
        self._now_us += 1000
        claim = MailboxClaim(
            to=name, request_id=f"r{self._now_us}", message_ids=list(ids), limit=LIMIT_MOST
        ).record(door="file", principal="x")
        at(self._now_us, claim, self.entries.setdefault(name, Entries({})))

    def of(self, name: str, verdict: str = ACCEPTED) -> list[str]:
        """The ids of the messages of a mailbox with this verdict, in order."""
        return [one for to, one, said in self.settled if (to, said) == (name, verdict)]


class Run:
    """A queue, its mailboxes, and a new carrier for each step, as after a kill."""

    def __init__(self, root: Path, rules: Any = NO_RULES) -> None:
        self.queue, self.mailboxes, self.rules = Queue(root, fsync=False), Mailboxes(), rules
        self._root = root

    def send(self, to: str | None, **fields: Any) -> str:
        """Send a line."""
        return self.queue.send("ask", "body", to=to, **{"sender": "ann", **fields})

    @property
    def carrier(self) -> SessionCarrier:
        """A new carrier."""
        return carrier(self._root, self.mailboxes.append, rules=self.rules)

    def held(self) -> list[str]:
        """The held recipients."""
        return self.carrier.consumers().held

    def carry_held(self, recipient: str, most: int = 1000, consumers: Sequence[str] = ()) -> Carried:
        """Try a held recipient."""
        return self.carrier.carry_held(recipient, consumers, most)


@pytest.fixture(name="run")
def limited_run(tmp_path: Path) -> Run:
    """The mailbox of bo takes two messages, and that of cy any number."""
    return Run(tmp_path, Limited(bo={"pending_most": 2}))


@pytest.mark.requirement("LM-08")
def test_a_full_mailbox_holds_its_lines_and_no_others_until_it_has_room(run: Run) -> None:
    bo, cy = [], []
    for _ in range(5):
        bo.append(run.send("bo"))
        cy.append(run.send("cy"))
    carried = run.carrier.carry_some([])
    assert (carried.lines, carried.more, carried.held) == (10, False, {"bo": MAILBOX_FULL})
    assert (run.mailboxes.of("bo"), run.mailboxes.of("cy")) == (bo[:2], cy)
    assert run.held() == ["bo"]
    # Later lines are not posted at all while it is held.
    refused = run.mailboxes.of("bo", REJECTED)
    bo.append(run.send("bo"))
    cy.append(run.send("cy"))
    assert run.carrier.carry_some([]).held == {}
    assert run.mailboxes.of("bo", REJECTED) == refused and run.mailboxes.of("cy") == cy
    # A try with one line costs one record.
    assert run.carry_held("bo", 1).held == {"bo": MAILBOX_FULL}
    assert run.mailboxes.of("bo", REJECTED) == [*refused, bo[2]]
    run.mailboxes.take("bo", bo[:1])
    assert run.carry_held("bo").lines == 1
    assert run.mailboxes.of("bo") == bo[:3]
    run.mailboxes.take("bo", bo[1:3])
    run.rules = NO_RULES
    assert run.carry_held("bo", 2) == Carried(2, more=True, held={}, ids=bo[3:5])
    assert run.carry_held("bo") == Carried(1, more=False, held={}, ids=bo[5:])
    assert run.mailboxes.of("bo") == bo and run.mailboxes.of("bo", DUPLICATE) == []
    assert run.held() == []


@pytest.mark.requirement("LM-08")
def test_a_sender_above_its_rate_waits_without_a_record(tmp_path: Path) -> None:
    rules = Limited()
    run = Run(tmp_path, rules)
    rules.slow.add("ann")
    ids = [run.send("bo") for _ in range(3)]
    assert run.carrier.carry_some([]).held == {"bo": RATE_LIMITED}
    assert run.carry_held("bo").held == {"bo": RATE_LIMITED}
    assert run.mailboxes.settled == []
    rules.slow.clear()
    assert run.carry_held("bo") == Carried(3, more=False, held={}, ids=ids)
    assert run.mailboxes.of("bo") == ids and run.held() == []


@pytest.mark.requirement("LM-08")
def test_a_broadcast_reaches_those_with_room_and_the_others_later(run: Run) -> None:
    first = [run.send("bo") for _ in range(2)]
    told = run.send(None)
    run.carrier.carry_some(["bo", "cy"])
    assert run.mailboxes.of("cy") == [told] and run.held() == ["bo"]
    # An agent that comes later, and whose mailbox is full, too.
    run.rules = Limited(bo={"pending_most": 2}, dan={"pending_most": 0})
    assert run.carrier.carry_broadcasts(["dan"])
    assert run.held() == ["bo", "dan"]
    run.rules = NO_RULES
    for name in ("bo", "dan"):
        run.carry_held(name, consumers=["bo", "cy", "dan"])
    assert (run.mailboxes.of("bo"), run.mailboxes.of("dan")) == ([*first, told], [told])
    assert run.held() == []


@pytest.mark.requirement("LM-08")
def test_a_body_that_no_room_is_enough_for_holds_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path, Limited(bo={"bytes_most": 10}))
    long = run.queue.send("ask", "longer than ten", to="bo", sender="ann")
    short = run.send("bo")
    assert run.carrier.carry_some([]).held == {}
    assert (run.mailboxes.of("bo", REJECTED), run.mailboxes.of("bo")) == ([long], [short])


@pytest.mark.requirement("LM-08")
def test_a_name_too_long_for_a_cursor_keeps_its_session_waiting(tmp_path: Path) -> None:
    name = "b" * 128
    rules = Limited(**{name: {"pending_most": 0}})
    run = Run(tmp_path, rules)
    sent = run.send(name)
    with pytest.raises(NotHeld, match="too long"):
        run.carrier.carry_some([])
    rules.of.clear()
    assert run.carrier.carry_some([]).lines == 1
    assert run.mailboxes.of(name) == [sent]


@pytest.mark.requirement("LM-08")
@pytest.mark.parametrize("when", ["hold", "cursor"])
def test_a_bridge_killed_while_it_holds_a_recipient_loses_nothing_and_posts_nothing_twice(
    run: Run, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bo = [run.send("bo") for _ in range(4)]

    def killed(*_: object) -> None:
        raise BackboneUnreachable("killed here")

    with monkeypatch.context() as patched, pytest.raises(BackboneUnreachable):
        named = {"hold": "hold", "cursor": "write_cursor"}[when]
        patched.setattr(f"connectors.doors.file_bridge.session_carrier.{named}", killed)
        run.carrier.carry_some([])
    run.carrier.carry_some([])
    assert run.mailboxes.of("bo") == bo[:2] and run.held() == ["bo"]
    run.rules = NO_RULES
    run.carry_held("bo")
    assert run.mailboxes.of("bo") == bo and run.held() == []


@pytest.mark.long
@pytest.mark.requirement("LM-08")
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_in_any_order_each_line_counts_once(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    rules = Limited(bo={"pending_most": 2}, cy={"pending_most": 3})
    run, consumers = Run(tmp_path, rules), ["bo", "cy"]
    expected = Counter([("dan", run.send("dan"))])

    def send() -> None:
        to = dice.choice(["bo", "cy", "dan", None])
        is_brief = dice.random() < 0.3
        sent = run.send(to, ttl_s=0.001 if is_brief else None, sender=dice.choice(["ann", "slow"]))
        if not is_brief:  # an expire may remove a brief one before it was carried
            expected.update((name, sent) for name in (consumers if to is None else [to]))

    def fail() -> None:
        if dice.random() < 0.5:
            raise BackboneUnreachable("killed here")
        if dice.random() < 0.7:
            send()
            run.queue.expire()

    steps: list[Callable[[], object]] = [
        *[send] * 4,
        *[lambda: run.carrier.carry_some(consumers)] * 2,
        *[lambda: run.carry_held(dice.choice(consumers), dice.choice([1, 2, 100]), consumers)] * 3,
        lambda: run.queue.expire(),
        lambda: rules.slow.symmetric_difference_update({"slow"}),
        *[lambda name=name: run.mailboxes.take(name, run.mailboxes.of(name)) for name in consumers],
    ]
    for _ in range(80):
        run.mailboxes.then = fail if dice.random() < 0.3 else lambda: None
        try:
            dice.choice(steps)()
        except BackboneUnreachable:
            continue
    run.mailboxes.then = lambda: None
    run.rules = NO_RULES
    while run.carrier.carry_some(consumers).more or run.held():
        for name in run.held():
            run.carry_held(name, consumers=consumers)
    accepted = Counter((to, one) for to, one, said in run.mailboxes.settled if said == ACCEPTED)
    assert set(accepted.values()) <= {1}
    assert expected.keys() <= accepted.keys()


def _row(scope: str, name: str, **limits: int) -> dict[str, Any]:
    return {"scope": scope, "name": name, **dict.fromkeys(Limits._fields), **limits}


class Answers:
    """A source of verdicts that answers at once, or not at all while `up` is False."""

    def __init__(self, *verdicts: tuple[str | None, str | None]) -> None:
        self.up, self.verdicts = True, list(verdicts)

    def ask(self, _position: Position, answer: Callable[[str | None, str | None], None]) -> None:
        """Answer with the next verdict."""
        answer(*self.verdicts.pop(0))


@pytest.mark.requirement("LM-08")
def test_the_limits_of_a_name_count_before_those_of_its_role_and_of_all() -> None:
    rows = [
        *(_row("all", "all", pending_most=1, bytes_most=1), _row("role", "worker", pending_most=2)),
        *(_row("role", "agent", pending_most=3), _row("name", "bo", pending_most=4)),
    ]
    known = KnownLimits(rows, {"bo": "worker", "cy": "worker", "op": "operator"})
    assert [known.of(name).pending_most for name in ("bo", "cy", "op", "any")] == [4, 2, 1, 3]
    assert known.of("bo").of_mailbox == {"pending_most": 4, "bytes_most": 1}
    assert known.own_mailboxes == {"bo"}


@pytest.mark.requirement("LM-08")
def test_without_verdicts_postings_have_no_limits_and_mailboxes_with_own_limits_wait() -> None:
    answers = Answers()
    rules = BridgeRules(answers)
    rules.own_before = {"bo"}
    answers.up = False
    rules.begin()
    assert rules.refusal("default", "bo", "ann", 1) == NO_VERDICT
    assert rules.refusal("other", "bo", "ann", 1) is None and rules.limits("bo") == {}
    assert rules.reasons([Position(0, 1)]) == [None] and not rules.is_complete
    rules.known = KnownLimits([_row("name", "cy", bytes_most=9)], {})
    assert [rules.refusal("default", name, "ann", 1) for name in ("bo", "cy")] == [None, NO_VERDICT]
    assert rules.limits("cy") == {}
    answers.up = True
    rules.begin()
    assert rules.is_complete and rules.refusal("default", "cy", "ann", 1) is None
    assert rules.limits("cy")["bytes_most"] == 9


@pytest.mark.requirement("LM-08")
def test_a_verdict_that_is_full_or_missing_is_a_reason_and_any_other_is_none() -> None:
    said = [
        (ACCEPTED, None),
        (REJECTED, MAILBOX_FULL),
        (None, None),
        (REJECTED, "seq_conflict"),
        (DUPLICATE, None),
    ]
    rules = BridgeRules(Answers(*said))
    rules.begin()
    positions = [Position(0, number) for number in range(len(said))]
    assert rules.reasons(positions) == [None, MAILBOX_FULL, NO_VERDICT, None, None]


@pytest.mark.requirement("LM-08")
def test_a_rate_counts_messages_and_bytes_of_a_sender_and_a_long_body_takes_a_minute() -> None:
    rules = BridgeRules(Answers())
    rules.known = KnownLimits(
        [_row("name", "ann", messages_per_minute=2), _row("name", "eve", bytes_per_minute=10)], {}
    )
    ask = partial(rules.refusal, "default", "bo")
    assert [ask("ann", 1) for _ in range(3)] == [None, None, RATE_LIMITED]
    assert [ask("eve", size) for size in (25, 1)] == [None, RATE_LIMITED]
    assert ask("cy", 10**9) is None


@pytest.mark.requirement("LM-08")
def test_a_held_recipient_is_tried_with_growing_pauses_and_freed_with_growing_portions() -> None:
    now = [0.0]
    retries = HeldRetries(lambda: now[0])
    retries.keep("default", ["old"])
    assert list(retries.due("default")) == [("old", 1)] and retries.reasons() == {"default": {"old": NOT_TRIED}}
    retries.keep("default", [])
    retries.begin("default", {"bo": MAILBOX_FULL})
    full, pauses = Carried(0, more=False, held={"bo": MAILBOX_FULL}), []
    for _ in range(10):
        began = now[0]
        while not list(retries.due("default")):
            now[0] += 0.25
        pauses.append(now[0] - began)
        retries.tried("default", "bo", full)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    now[0] += 60
    portions = []
    for _ in range(12):
        portions += [lines for _, lines in retries.due("default")]
        retries.tried("default", "bo", Carried(portions[-1], more=True, held={}))
    assert portions == [*(2**power for power in range(10)), 1000, 1000]
    assert retries.has("default", "bo")
    retries.tried("default", "bo", Carried(7, more=False, held={}))
    assert retries.reasons() == {} and not retries.has("default", "bo")
