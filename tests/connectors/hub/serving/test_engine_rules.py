"""The engine keeps the rules of all requests: rights, turns, places, limits, waits and traces of what it did.

`test_engine_waits.py` has the rules of waits.
"""

from __future__ import annotations

import asyncio
import re

import pytest

from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.turns import BURST
from connectors.operations.messages.message_operations import MESSAGES
from tests.connectors.doors.http_api.held_hub import TAKE, Asking, HeldHub, run, steps
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.wire.verdicts import TOO_LARGE

pytestmark = pytest.mark.requirement("ST-90")


def test_each_caller_has_its_own_rights_and_not_those_of_another_one_of_its_role() -> None:
    async def test(hub: HeldHub) -> None:
        assert Asking(hub, "bo").is_admitted
        for name in ("eye", "task", "nobody"):
            assert not Asking(hub, name).is_admitted
        assert Asking(hub, "task", TAKE).is_admitted and Asking(hub, "ada").is_admitted
        assert not Asking(hub, "ada", has_place=False).is_admitted
        assert Asking(hub, "op").is_operator and not Asking(hub, "ada").is_operator

    run(test)


def test_a_principal_begins_one_request_in_a_step_and_has_few_records_under_way() -> None:
    async def test(hub: HeldHub) -> None:
        asked = [Asking(hub, "ada") for _ in range(7)]
        calm = Asking(hub, "cy")
        assert hub.senders == ["ada", "cy"]
        await steps()
        assert hub.senders == ["ada", "cy", "ada", "ada", "ada"]
        hub.settle_held()
        assert hub.senders == ["ada"] * 3 and calm.statuses == [200]
        hub.settle_held()
        assert [one.statuses for one in asked] == [[200]] * 7
        assert not hub.under_way.mailboxes and not hub.under_way._count

    run(test)


def test_all_that_wait_behind_records_that_fail_are_answered_once() -> None:
    async def test(hub: HeldHub) -> None:
        asked = [Asking(hub, "ada") for _ in range(9)]
        await steps()
        while hub.under_log:
            hub.settle_held(error=BackboneUnreachable("away"))
        await steps()
        assert [one.statuses for one in asked] == [[503]] * 9
        assert not hub.under_way.mailboxes and not hub.under_way._count

    run(test)


def test_a_request_with_several_records_is_answered_after_the_last_with_what_each_became() -> None:
    async def test(hub: HeldHub) -> None:
        for _ in range(3):
            Asking(hub, "ada")
            await steps()
            hub.settle_held()
        taking = Asking(hub, "bo", TAKE, query=b"limit=2&lease=60")
        hub.settle_held()
        await steps()
        ((status, taken),) = taking.answered
        assert status == 200 and taken["left"] == 1
        leased = [one["id"] for one in taken["messages"]]
        (other,) = set(hub.mailboxes.waiting(("default", "bo"))) - set(leased)
        wanted = [other, *leased]
        body = {"lease_id": taken["lease_id"], "message_ids": wanted}
        asked = Asking(hub, "bo", f"POST {MESSAGES}/ack".encode(), body)
        held = hub.under_log
        hub.settle_held(2, 1)
        assert not asked.answered
        hub.under_log = held[:1]
        hub.settle_held()
        ((status, said),) = asked.answered
        assert status == 200 and said["done"] == leased
        assert [one["message_id"] for one in said["refused"]] == [other]

    run(test)


def test_a_refusal_beyond_a_limit_is_held_recorded_counted_and_has_its_line() -> None:
    async def test(hub: HeldHub) -> None:
        hub.limit("ada", messages_per_minute=1)
        first = Asking(hub, "ada")
        hub.settle_held()
        for _ in range(BURST):
            hub.pace.held_s("ada")
        await steps()
        second = Asking(hub, "ada")
        await steps()
        assert first.statuses == [200] and second.statuses == []
        while not second.answered:
            await asyncio.sleep(0.01)
        assert second.statuses == [429] and hub.refused[0][0] == "rate_limited"
        assert [line[:3] for line in hub.request_lines.added] == [
            ("POST", MESSAGES, 200),
            ("POST", MESSAGES, 429),
        ]
        counted = [line for line in str(hub.metrics.text()).splitlines() if MESSAGES in line]
        for status in (200, 429):
            assert any(f'status="{status}"' in line and "requests_total" in line for line in counted)

    run(test)


def test_a_repeated_request_is_told_apart_from_a_new_one_also_beyond_a_limit() -> None:
    async def test(hub: HeldHub) -> None:
        hub.limit("ada", messages_per_minute=1)
        found = []
        for _ in range(2):
            found.append(Asking(hub, "ada", key=b"key-1"))
            hub.settle_held()
            await steps()
        assert found[0].answered == found[1].answered and found[0].statuses == [200]
        assert [re.findall(rb"verdict: (\w+)", one.head) for one in found] == [[b"accepted"], [b"duplicate"]]

    run(test)


def test_a_mailbox_that_the_log_calls_full_gets_no_more_records_for_a_while() -> None:
    async def test(hub: HeldHub) -> None:
        hub.limit("bo", bytes_most=10)
        long = {"recipient": "bo", "type": "note", "payload": "a text of more than ten bytes"}
        found = []
        for _ in range(2):
            found.append(Asking(hub, "ada", body=long))
            await steps()
        assert len(hub.under_log) == 2
        hub.settle_held()
        await steps()
        found.append(Asking(hub, "cy", body=long))
        await steps()
        assert not hub.under_log
        assert {one.answered[0][1]["reason"] for one in found} == {"mailbox_full"}

    run(test)


def test_a_record_that_kafka_refuses_for_its_size_is_recorded_as_a_refusal() -> None:
    async def test(hub: HeldHub) -> None:
        asked = Asking(hub, "ada")
        hub.settle_held(error=ApiError(413, TOO_LARGE, "Kafka takes no record of this size"))
        await steps()
        assert asked.statuses == [413]
        assert [one[0] for one in hub.refused] == [TOO_LARGE]

    run(test)


def test_an_error_that_nobody_expected_is_told_without_its_text() -> None:
    async def test(hub: HeldHub) -> None:
        asked = Asking(hub, "ada")
        hub.settle_held(error=KeyError("a secret"))
        await steps()
        assert asked.statuses == [500] and "secret" not in str(asked.answered)

    run(test)


def test_a_long_answer_a_long_body_and_a_client_that_left_are_not_for_the_engine() -> None:
    async def test(hub: HeldHub) -> None:
        long = Asking(hub, "ada", body={"recipient": "bo", "type": "note", "payload": "x" * 1000})
        assert long.passed_on == 1 and not hub.under_log
        Asking(hub, "cy")
        hub.settle_held()
        await steps()
        gone = Asking(hub, "bo", TAKE, is_there=False)
        assert gone.passed_on == 1 and not hub.under_log
        counted = hub.metrics.text().decode()
        for result, times in (("passed_on", 2), ("answered", 1)):
            assert f'trunkline_direct_requests_total{{result="{result}"}} {times}.0' in counted
        await steps()
        assert Asking(hub, "bo", TAKE, query=b"lease=60", is_there=False).passed_on == 0
        hub.under_log.clear()
        hub.gate.body_limit_bytes = 100_000
        for _ in range(2):
            await steps()
            Asking(hub, "cy", body={"recipient": "bo", "type": "note", "payload": "x" * 20_000})
            hub.settle_held()
        await steps()
        assert Asking(hub, "bo", TAKE).passed_on == 1 and not hub.under_log

    run(test)
