"""Waits of the engine: what wakes a request for messages, what ends it, and who gets the message instead."""

from __future__ import annotations

import uuid

import pytest

from connectors.hub.services.mailboxes import own_mailboxes
from connectors.hub.serving.identities import Unidentified
from connectors.operations.messages.deliveries import ATTEMPTS, Taken, Taking, take_messages
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim
from schemas.wire.record import OutgoingRecord
from tests.connectors.doors.http_api.held_hub import CALLERS, TAKE, Asking, HeldHub, run, steps

pytestmark = pytest.mark.requirement("ST-94")
LONG = b"wait=10"
SHORT_S = 0.05
SHORT = b"wait=%.2f" % SHORT_S


def sent(hub: HeldHub) -> None:
    """Send a message to bo, which is settled now."""
    asked = Asking(hub, "ada")
    hub.settle_held()
    assert asked.statuses == [200]


def other_claim(number: int) -> OutgoingRecord:
    """Return the claim of another reader for one message of bo."""
    return MailboxClaim(to="bo", request_id=f"other-{number}", limit=1, bytes_most=1000).record(
        door="http", principal="bo"
    )


def messages(asked: Asking) -> int:
    """Return the number of messages in the one answer."""
    ((status, told),) = asked.answered
    assert status == 200
    return len(told["messages"])


async def settled(hub: HeldHub) -> None:
    """Let the requests that were woken append their records, and settle these."""
    await steps()
    hub.settle_held()
    await steps()


@pytest.mark.parametrize("query", [LONG, LONG + b"&lease=60"])
def test_a_message_wakes_the_request_that_waits_longest_and_only_that(query: bytes) -> None:
    async def test(hub: HeldHub) -> None:
        found = []
        for _ in range(3):
            found.append(Asking(hub, "bo", TAKE, query=query))
            await steps()
        assert hub.mailbox_waits.count() == 3 and not any(one.answered for one in found)
        sent(hub)
        await settled(hub)
        assert messages(found[0]) == 1 and not found[1].answered and not found[2].answered
        assert hub.mailbox_waits.count() == 2 and not hub.under_log
        assert [one.passed_on for one in found] == [0, 0, 0]
        for _ in range(2):
            sent(hub)
            await settled(hub)
        assert sum(messages(one) for one in found if one.answered) == 3

    run(test)


def test_a_wait_ends_in_its_time_with_no_message_once_the_gateway_has_caught_up() -> None:
    async def test(hub: HeldHub) -> None:
        looks = []

        async def catch_up() -> None:
            looks.append(hub.mailbox_waits.count())

        hub.catch_up = catch_up  # type: ignore[method-assign]
        waiting = Asking(hub, "bo", TAKE, query=SHORT)
        await steps()
        assert not waiting.answered and not looks
        while not waiting.answered:
            await steps()
        assert messages(waiting) == 0 and looks == [1] and hub.mailbox_waits.count() == 0
        at_once = Asking(hub, "bo", TAKE)
        await steps()
        assert messages(at_once) == 0 and looks == [1, 0]

    run(test)


def test_a_message_that_comes_while_a_wait_catches_up_is_its_answer() -> None:
    async def test(hub: HeldHub) -> None:
        async def catch_up() -> None:
            sent(hub)

        hub.catch_up = catch_up  # type: ignore[method-assign]
        waiting = Asking(hub, "bo", TAKE, query=SHORT)
        while not hub.under_log:
            await steps()
        await settled(hub)
        assert messages(waiting) == 1

    run(test)


def test_a_repeated_request_is_passed_on_when_the_log_has_given_it_messages() -> None:
    async def test(hub: HeldHub) -> None:
        sent(hub)
        await steps()
        Asking(hub, "bo", TAKE, query=LONG, key=b"one")
        ((claim, _),) = hub.under_log
        hub.add(claim)
        await steps()
        assert Asking(hub, "bo", TAKE, query=LONG, key=b"one").passed_on == 1
        await steps()
        assert Asking(hub, "bo", TAKE, query=LONG, key=b"other").passed_on == 0

    run(test)


def test_a_wait_is_woken_by_the_messages_that_another_gateway_gave_to_the_same_request() -> None:
    async def test(hub: HeldHub) -> None:
        Asking(hub, "ada")
        ((message, _),) = hub.under_log
        hub.under_log.clear()
        found = {}
        for key in (b"other", b"one", b"third"):
            found[key] = Asking(hub, "bo", TAKE, query=LONG, key=key)
            await steps()
        timer = found[b"third"].exchange.timer
        # At the other gateway this was the request's second record, since another reader got all of the first.
        request_id = f"{found[b'one'].exchange.wait.request}00"  # type: ignore[union-attr]
        claim = MailboxClaim(to="bo", request_id=request_id, limit=1, bytes_most=1000).record(
            door="http", principal="bo"
        )
        hub.add(message)
        assert hub.add(claim).verdict == "accepted"
        await steps()
        # The careful path gives it the same messages. The other one was woken in vain, and waits again.
        assert found[b"one"].passed_on == 1
        assert not found[b"other"].passed_on and not found[b"other"].answered and not hub.under_log
        assert hub.mailbox_waits.count() == 2 and found[b"third"].exchange.timer is timer

    run(test)


def test_a_message_goes_to_the_next_when_the_first_client_has_left_during_its_wait() -> None:
    async def test(hub: HeldHub) -> None:
        left, there = Asking(hub, "bo", TAKE, query=LONG), Asking(hub, "bo", TAKE, query=LONG)
        await steps()
        await steps()
        left.is_there = False
        sent(hub)
        await settled(hub)
        await settled(hub)
        assert messages(left) == 0 and messages(there) == 1 and hub.mailbox_waits.count() == 0

    run(test)


def test_a_wait_ends_when_its_connection_does_and_a_request_under_the_log_goes_on() -> None:
    async def test(hub: HeldHub) -> None:
        left, there = Asking(hub, "bo", TAKE, query=LONG), Asking(hub, "bo", TAKE, query=LONG)
        await steps()
        for _ in range(2):
            hub.engine.leave(left.exchange)
        assert hub.mailbox_waits.count() == 1 and not left.answered
        assert [line[2] for line in hub.request_lines.added] == [499]
        sending = Asking(hub, "ada")
        hub.engine.leave(sending.exchange)
        hub.settle_held()
        assert sending.statuses == [200]
        await settled(hub)
        assert messages(there) == 1 and not left.answered and hub.mailbox_waits.count() == 0

    run(test)


def test_who_waits_for_a_lease_is_not_probed_but_gets_none_after_it_has_left() -> None:
    async def test(hub: HeldHub) -> None:
        left, silent = (Asking(hub, "bo", TAKE, query=LONG + b"&lease=60") for _ in range(2))
        await steps()
        left.has_ended, silent.is_there = True, False
        sent(hub)
        await settled(hub)
        await settled(hub)
        assert messages(left) == 0 and messages(silent) == 1

    run(test)


def test_a_client_whose_token_has_ended_gets_an_error_and_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(hub: HeldHub) -> None:
        waiting = Asking(hub, "bo", TAKE, query=LONG)
        await steps()
        monkeypatch.setitem(CALLERS, "bo", Unidentified("revoked"))
        sent(hub)
        await steps()
        assert waiting.statuses == [401] and b"www-authenticate" in waiting.head
        assert not hub.under_log and hub.mailbox_waits.count() == 0

    run(test)


def test_a_gateway_that_stops_ends_its_waits_with_an_error() -> None:
    async def test(hub: HeldHub) -> None:
        waiting = Asking(hub, "bo", TAKE, query=LONG)
        await steps()
        hub.stopping.set()
        hub.mailbox_waits.wake_all()
        await steps()
        assert waiting.statuses == [503] and hub.mailbox_waits.count() == 0

    run(test)


@pytest.mark.parametrize(("query", "is_answered"), [(b"", True), (LONG, False)])
def test_a_request_that_was_too_slow_for_a_message_looks_or_waits_again(
    query: bytes, is_answered: bool
) -> None:
    async def test(hub: HeldHub) -> None:
        sent(hub)
        await steps()
        taking = Asking(hub, "bo", TAKE, query=query, key=b"one")
        await steps()
        assert hub.add(other_claim(0)).verdict == "accepted"
        ((first, _),) = hub.under_log
        await settled(hub)
        assert taking.passed_on == 0 and bool(taking.answered) == is_answered
        if not is_answered:
            sent(hub)
            await steps()
            ((second, _),) = hub.under_log
            assert second.value != first.value
            await settled(hub)
            assert messages(taking) == 1

    run(test)


def test_a_wait_after_a_lost_race_catches_up_again_in_the_end() -> None:
    async def test(hub: HeldHub) -> None:
        looks = []

        async def catch_up() -> None:
            looks.append(len(looks))

        hub.catch_up = catch_up  # type: ignore[method-assign]
        sent(hub)
        await steps()
        taking = Asking(hub, "bo", TAKE, query=SHORT)
        hub.add(other_claim(0))
        await settled(hub)
        assert not taking.answered and looks == [0]
        while not taking.answered:
            await steps()
        assert messages(taking) == 0 and looks == [0, 1]

    run(test)


def test_a_client_that_has_left_when_its_race_is_lost_waits_no_more() -> None:
    async def test(hub: HeldHub) -> None:
        async def catch_up() -> None:
            taking.has_ended = True

        hub.catch_up = catch_up  # type: ignore[method-assign]
        sent(hub)
        await steps()
        taking = Asking(hub, "bo", TAKE, query=LONG)
        hub.add(other_claim(0))
        await settled(hub)
        assert messages(taking) == 0 and hub.mailbox_waits.count() == 0

    run(test)


def test_a_request_that_is_always_too_slow_ends_after_its_last_attempt() -> None:
    async def test(hub: HeldHub) -> None:
        sent(hub)
        await steps()
        taking, claims = Asking(hub, "bo", TAKE, query=LONG), 0
        while not taking.answered and claims < 2 * ATTEMPTS:
            ((claim, done),) = hub.under_log
            hub.under_log.clear()
            claims += 1
            assert hub.add(other_claim(claims)).verdict == "accepted"
            done(hub.add(claim))
            sent(hub)
            await steps()
        assert messages(taking) == 0 and claims == ATTEMPTS

    run(test)


def test_a_repeatable_request_of_a_task_with_a_mailbox_of_its_own_is_passed_on_and_catches_up_twice() -> None:
    async def test(hub: HeldHub) -> None:
        looks = []

        async def catch_up() -> None:
            looks.append(len(looks))

        hub.catch_up = catch_up  # type: ignore[method-assign]
        gateway = hub.settings.gateway.model_copy(update={"mailbox_per_token": True})
        hub.settings = hub.settings.model_copy(update={"gateway": gateway})
        assert Asking(hub, "task", TAKE, query=LONG, key=b"one").passed_on == 1
        await steps()
        assert Asking(hub, "task", TAKE, query=LONG).passed_on == 0
        taking = Taking(
            own_mailboxes(CALLERS["task"], per_token=True),
            {"door": "http", "principal": "bo"},
            uuid.uuid4(),
            is_repeatable=True,
            limit=1,
            bytes_most=1000,
            wait_s=SHORT_S,
        )
        assert await take_messages(hub, taking) == Taken() and looks == [0, 1]  # type: ignore[arg-type]

    run(test)
