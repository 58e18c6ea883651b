"""The limits of the messages that agents publish over MQTT, as the bridge enforces them (LM-05)."""

from __future__ import annotations

import json
import threading

import msgspec
import pytest

from connectors.doors.mqtt_bridge.publish_limits import OutboxLimits
from connectors.plumbing.gateway_client.verdict_stream import VerdictStream, _Line
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord, Position
from tests.broker_processes import wait_until
from trunkline_agent.wire.strict_json import decode

pytestmark = pytest.mark.requirement("LM-05")


class Bridge:
    """Limits with a clock of their own, and the refusals that they record."""

    def __init__(self, per_minute: int | None = None, bytes_per_minute: int | None = None) -> None:
        self.now = 100.0
        self.records: list[OutgoingRecord] = []
        self.limits = OutboxLimits(self.records.append, lambda: self.now)
        rates = {"messages_per_minute": per_minute, "bytes_per_minute": bytes_per_minute}
        self.limits.learn([{"agent_name": "ann", **rates}])

    def say(
        self, number: int, to: str = "bob", agent: str = "ann", *, is_repeated: bool = False, body: str = "x"
    ):
        """Publish a message; the answer."""
        return self.limits.admit(agent, f"ce-{number}", said(number, to, body), is_repeated=is_repeated)

    def settled(
        self, number: int, verdict: str | None, reason: str | None = None, to: str = "bob"
    ) -> int | None:
        """Settle a message."""
        return self.limits.settled(f"ce-{number}", said(number, to), verdict, reason)


def said(number: int, to: str, body: str = "x") -> bytes:
    """A payload as an agent publishes it."""
    return json.dumps(
        {"message_id": f"m-{number}", "to": to, "kind": "k", "body": body, "seq": number}
    ).encode()


def test_an_agent_publishes_so_many_messages_a_minute_and_the_others_are_not_limited() -> None:
    bridge = Bridge(per_minute=3)
    answers = [bridge.say(number) for number in range(5)]
    assert answers[:3] == [None] * 3
    assert answers[3:] == [("rejected", "rate_limited", 20)] * 2
    assert bridge.say(9, agent="bob") is None
    bridge.now += 20
    assert (bridge.say(5), bridge.say(6)) == (None, ("rejected", "rate_limited", 20))
    bridge.limits.learn([])
    assert bridge.say(6) is None


def test_an_agent_publishes_so_many_bytes_a_minute() -> None:
    bridge = Bridge(bytes_per_minute=60)
    assert bridge.say(1, body="y" * 50) is None
    refused = bridge.say(2, body="y" * 50)
    assert refused is not None and refused.reason == "rate_limited"
    assert bridge.limits.admit("ann", "ce-3", b"no JSON", is_repeated=False) is None, "the fold refuses it"


def test_a_flood_leaves_few_refusals_with_the_number_of_the_others() -> None:
    bridge = Bridge(per_minute=1)
    for number in range(1000):
        bridge.say(number)
        bridge.now += 0.025
    assert 6 <= len(bridge.records) <= 8
    last = decode(bridge.records[-1].value)[0]
    assert (last["reason"], last["principal"], last["route"]) == ("rate_limited", "ann", "MQTT outbox")
    assert last["suppressed"] > 100
    assert {one.stream for one in bridge.records} == {"refused/mqtt"}


def test_a_message_that_may_be_in_the_log_is_never_refused() -> None:
    bridge = Bridge(per_minute=1)
    assert bridge.say(1) is None
    assert bridge.say(1) is None, "its verdict is not known yet"
    assert bridge.settled(1, "accepted") is None
    assert bridge.say(1) == ("accepted", None, None), "beyond the rate the receipt is repeated"
    assert bridge.say(2, is_repeated=True) is None, "the broker delivers it again"


def test_nothing_is_appended_for_a_full_mailbox_for_a_second() -> None:
    bridge = Bridge()
    assert bridge.say(1) is None
    assert bridge.settled(1, "rejected", "mailbox_full") == 1
    assert bridge.say(2) == ("rejected", "mailbox_full", 1)
    assert bridge.say(3, to="eve") is None
    assert bridge.say(4, is_repeated=True) is None
    bridge.now += 1.01
    assert bridge.say(5) is None
    assert bridge.settled(5, "rejected", "bad_signature") is None
    assert bridge.say(6) is None


def test_a_late_verdict_also_shows_that_the_mailbox_is_full() -> None:
    bridge = Bridge()
    stream = VerdictStream(Settings(), 0.01)
    stream._up = True
    timing = threading.Thread(target=stream._time_out, daemon=True)
    timing.start()
    answers: list[tuple[str | None, str | None]] = []
    assert bridge.say(1) is None
    stream.ask(
        Position(0, 7),
        lambda verdict, reason: answers.append((verdict, reason)),
        bridge.limits.late("ce-1", said(1, "bob")),
    )
    wait_until(lambda: answers, what="the receipt has no verdict")
    assert bridge.say(2) is None
    line = b'{"settled":[[0,7,"rejected","mailbox_full"]]}'
    stream._take(msgspec.json.decode(line, type=_Line))
    assert answers == [(None, None)], "there is one receipt"
    assert bridge.say(3) == ("rejected", "mailbox_full", 1)
    stream._stop.set()
    stream._set_down()
    timing.join(5)
