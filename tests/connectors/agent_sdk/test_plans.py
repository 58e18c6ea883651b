"""The plans of the hub's requests without any connection: what is sent again, when, and how it ends."""

from __future__ import annotations

import json

import pytest

from trunkline_agent.errors import (
    BackboneUnreachable,
    NotFound,
    RateLimited,
    Refused,
    TrunklineError,
    UsageError,
)
from trunkline_agent.hub import agent_plans
from trunkline_agent.hub.answer_errors import LAUNCH_FAILED
from trunkline_agent.hub.held_messages import ACKNOWLEDGED, GIVEN_BACK, HeldMessages
from trunkline_agent.hub.http_exchange import EventParser
from trunkline_agent.hub.hub_requests import HANDLED, Handling, path_of, post_json, send_key
from trunkline_agent.hub.operation_values import Schedule
from trunkline_agent.hub.plans import Answer, Lost, Pause, Request, Retries, exchange
from trunkline_agent.jobs.delegator_plans import submission

OK = Answer(200, {}, b"{}")
POST = Request("POST", "/x")
ONCE = Request("POST", "/x", is_repeatable=False)


def of(status, reason="any", **headers):
    body = b'{"reason": "%s", "message": "so it is"}' % reason.encode()
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


class Clock:
    """A clock that only the pauses of a plan move."""

    def __init__(self):
        self.now = 0.0
        self.pauses = []

    def __call__(self):
        return self.now

    def play(self, plan, *outcomes):
        """Answer the plan's requests with one outcome after the other, the last one for ever; its result."""
        left, sent, result = list(outcomes), [], None
        try:
            while True:
                step = plan.send(result)
                if isinstance(step, Pause):
                    self.pauses.append(step.seconds)
                    self.now += step.seconds
                    result = None
                else:
                    sent.append(step)
                    result = left.pop(0) if len(left) > 1 else left[0]
        except StopIteration as end:
            self.sent = sent
            return end.value
        finally:
            self.sent = sent


@pytest.fixture
def clock():
    return Clock()


def retries(clock, patience_s=30.0, chance=1.0):
    return Retries(patience_s, clock, lambda: chance)


@pytest.mark.requirement("AG-04")
@pytest.mark.parametrize(
    "outcome",
    [Lost("lost"), of(408), of(429, retry_after="1"), of(502), of(503), of(504)],
    ids=str,
)
def test_what_may_pass_is_sent_again_with_the_same_key(clock, outcome):
    assert clock.play(post_json("/x", {"a": 1}, retries=retries(clock)), outcome, outcome, OK) == {}
    assert len(clock.sent) == 3 and len({one.headers["Idempotency-Key"] for one in clock.sent}) == 1


@pytest.mark.requirement("AG-04")
@pytest.mark.parametrize(
    ("outcome", "kind"),
    [(of(404), NotFound), (of(409), Refused), (of(500), TrunklineError), (of(502, LAUNCH_FAILED), Refused)],
)
def test_a_final_refusal_is_not_sent_again(clock, outcome, kind):
    with pytest.raises(kind, match="so it is"):
        clock.play(exchange(POST, retries(clock)), outcome)
    assert len(clock.sent) == 1 and clock.pauses == []


@pytest.mark.requirement("AG-04")
def test_pauses_grow_at_random_and_end_with_the_patience(clock):
    with pytest.raises(BackboneUnreachable, match="no route"):
        clock.play(exchange(POST, retries(clock, 10.0)), Lost("no route"))
    assert clock.pauses[:5] == [0.2, 0.4, 0.8, 1.6, 3.0] and clock.now <= 10.0
    low = Clock()
    with pytest.raises(BackboneUnreachable):
        low.play(exchange(POST, retries(low, 10.0, chance=0.0)), Lost("no route"))
    assert low.pauses[:3] == [0.1, 0.2, 0.4]
    none = Clock()
    with pytest.raises(BackboneUnreachable):
        none.play(exchange(POST, retries(none, 0.0)), Lost("no route"))
    assert none.pauses == []


@pytest.mark.requirement("AG-04")
@pytest.mark.parametrize(
    ("header", "pause"), [("2", 2.0), ("0", 0.2), ("nan", 0.2), ("-5", 0.2), ("soon", 0.2)]
)
def test_retry_after_makes_a_pause_longer(clock, header, pause):
    clock.play(exchange(POST, retries(clock)), of(503, retry_after=header), OK)
    assert clock.pauses == [pause]


@pytest.mark.requirement("AG-04")
@pytest.mark.parametrize("header", ["31", "inf", "1e300"])
def test_a_limit_beyond_the_patience_is_reported_at_once(clock, header):
    with pytest.raises(RateLimited) as failed:
        clock.play(exchange(POST, retries(clock)), of(429, "limit_reached", retry_after=header))
    assert failed.value.retry_after_s == float(header) and failed.value.reason == "limit_reached"
    assert len(clock.sent) == 1


@pytest.mark.requirement("AG-04")
@pytest.mark.parametrize(
    ("outcome", "count"),
    [(Lost("x", was_sent=False), 2), (of(503), 2), (of(429), 2), (Lost("x"), 1), (of(502), 1)],
)
def test_a_request_that_may_have_arrived_is_sent_again_only_if_it_is_repeatable(clock, outcome, count):
    if count == 1:
        with pytest.raises(BackboneUnreachable):
            clock.play(exchange(ONCE, retries(clock)), outcome, OK)
    else:
        clock.play(exchange(ONCE, retries(clock)), outcome, OK)
    assert len(clock.sent) == count


@pytest.mark.requirement("AG-04")
def test_the_caller_may_say_which_answers_are_final(clock):
    plan = exchange(POST, retries(clock), lambda answer: answer.status in (200, 403))
    assert clock.play(plan, of(503), of(403)).status == 403


@pytest.mark.requirement("AG-04")
def test_a_path_is_quoted():
    assert path_of("topics", "a/b ?ä") == "/api/hub/topics/a%2Fb%20%3F%C3%A4"


@pytest.mark.requirement("AG-10")
def test_keys_of_a_handling_come_from_the_message_the_content_and_the_count():
    a, b = b'"a"', b'"b"'

    def keys(*contents, message="m-1", attempt=1):
        token = HANDLED.set(Handling(message, attempt))
        try:
            return [send_key("message", one, None) for one in contents]
        finally:
            HANDLED.reset(token)

    first = keys(a, b, a)
    assert len({one.text for one in first}) == 3 and not any(one.may_stand for one in first)
    assert keys(b, a, a, attempt=2) == [first[1], first[0], first[2]]
    assert not {one.text for one in keys(a, message="m-2")} & {one.text for one in first}
    assert send_key("message", a, None) != send_key("message", a, None)
    assert send_key("message", a, "mine").text == "mine"


@pytest.mark.requirement("AG-74")
def test_a_job_that_a_handling_submits_has_a_key_of_its_message():
    def key(own=None, broker=None, message="m-1"):
        token = HANDLED.set(Handling(message, 1))
        try:
            sent = next(submission("dig", None, ["end"], broker, own, 0.0))
        finally:
            HANDLED.reset(token)
        return sent.headers["Idempotency-Key"]

    wanted = Handling("m-1", 1).content_key("job", b'{"description":"dig","notify":["end"]}').text
    assert key() == key() == key(broker={"password": "s3cret"}) == wanted
    assert key(message="m-2") != wanted and key(own="mine") == "mine"
    token = HANDLED.set(None)
    assert next(submission("dig", None, None, None, None, 0.0)).headers["Idempotency-Key"].count("/") == 0
    HANDLED.reset(token)


@pytest.mark.requirement("AG-10")
def test_keys_of_replies_and_of_the_caller_count_places():
    first, second = Handling("m-1", 1), Handling("m-1", 2)
    assert first.reply_key().text == second.reply_key().text != second.reply_key().text
    assert (first.own_key("k").may_stand, second.own_key("k").may_stand) == (False, True)
    long = second.own_key("k" * 255).text
    assert len(long) <= 255 and long != second.own_key("k" * 254).text
    assert Handling("m-1", None).own_key("k").may_stand is False


@pytest.mark.requirement("AG-09")
def test_leases_are_extended_together_when_a_third_has_passed():
    held = HeldMessages()
    assert held.next_due() is None and held.due(0.0) == []
    first, second = held.add(["a", "b"], "lease-1", 30, 0.0)
    (third,) = held.add(["c"], "lease-2", 3, 5.0)
    assert held.next_due() == 6.0 and held.due(5.9) == []
    assert held.due(6.0) == [("lease-2", 3, ["c"])] and held.next_due() == 7.0
    assert held.settle(first, ACKNOWLEDGED) and held.settle(third, GIVEN_BACK)
    assert not held.settle(first, ACKNOWLEDGED)
    with pytest.raises(UsageError, match="message a is acknowledged already"):
        held.settle(first, GIVEN_BACK)
    assert held.due(10.0) == [("lease-1", 30, ["b"])] and held.next_due() == 20.0
    held.lose("another lease", ["b"])
    assert not second.is_lost
    held.lose("lease-1", ["b", "a"])
    assert second.is_lost and held.rest() == [] and held.next_due() is None


@pytest.mark.requirement("AG-09")
def test_a_message_that_is_leased_again_is_not_settled_by_its_first_handling():
    held = HeldMessages()
    (first,) = held.add(["a"], "lease-1", 30, 0.0)
    (second,) = held.add(["a"], "lease-2", 30, 40.0)
    assert held.settle(first, ACKNOWLEDGED) and held.rest() == [second]


@pytest.mark.requirement("AG-06")
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_events_are_the_same_however_their_bytes_are_cut(step):
    whole = b": x\r\n\r\nevent: a\r\ndata: 1\r\n\r\nid: 7\ndata:2\ndata: 3\n\n: ping\n\ndata: \xc3\xa4\n\n"
    parser = EventParser()
    found = [one for at in range(0, len(whole), step) for one in parser.feed(whole[at : at + step])]
    assert [(one.name, one.data, one.id) for one in found] == [
        ("a", "1", None),
        ("message", "2\n3", "7"),
        ("message", "ä", None),
    ]


@pytest.mark.requirement("AG-99")
def test_messages_are_overdue_when_the_longest_time_since_the_last_beginning_has_passed():
    held, told = HeldMessages(), []
    first, second = held.add(["a", "b"], "lease-1", 30, 0.0, longest_s=20.0)
    (endless,) = held.add(["c"], "lease-2", 30, 0.0)
    first.on_overdue = lambda: told.append("a")
    assert held.next_due() == 10.0 and held.overdue(19.9) == []
    held.settle(first, ACKNOWLEDGED)
    held.begin(second, 15.0)
    assert held.overdue(34.9) == [] and held.overdue(35.0) == [second] and held.overdue(36.0) == []
    assert (second.is_lost, second.is_overdue, first.is_lost, endless.is_lost) == (True, True, False, False)
    assert told == [] and second.why_overdue == "it was handled for longer than 20 s"
    assert [one.message_ids for one in held.due(100.0)] == [["c"]]
    (third,) = held.add(["d"], "lease-3", 30, 0.0, longest_s=5.0)
    third.on_overdue = lambda: told.append("d")
    assert held.overdue(6.0) == [third] and told == ["d"]


@pytest.mark.requirement("LM-25")
@pytest.mark.parametrize("most", [2, 1000])
def test_all_schedules_are_listed_over_as_many_answers_as_they_take(clock, most):
    fields = {"recipient": "bo", "kind": "note", "cron": None, "every_s": 60, "status": "active"}

    def part(left, *names):
        rows = [{**fields, "schedule": name, "next_run_at": None, "runs": 0} for name in names]
        return Answer(200, {}, json.dumps({"schedules": rows, "total": 3, "left": left}).encode())

    # An answer ends with its largest number of rows, or of bytes.
    parts = [part(0, "a", "b"), part(0, "c")] if most == 2 else [part(1, "a", "b"), part(0, "c")]
    path, query = path_of("schedules"), {"limit": most}
    plan = agent_plans.list_rows(Schedule, path, "schedules", "schedule", query, retries(clock))
    found = clock.play(plan, *parts)
    assert [one.name for one in found] == ["a", "b", "c"]
    assert [dict(one.query or {}).get("after") for one in clock.sent] == [None, "b"]
