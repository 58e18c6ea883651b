"""What a gateway keeps of messages: much, and nothing of it for Python's collector to walk (decision 0014)."""

from __future__ import annotations

import gc
import itertools

from connectors.gateway.conversations import Conversations
from connectors.gateway.mailboxes import MailboxIndex
from connectors.live_state import LiveState
from connectors.settled_feed import SettledFeed
from schemas.mailbox_requests import claim_record
from schemas.message import Message, posting_record
from schemas.record import OutgoingRecord
from schemas.sealing import Keyring
from schemas.settled import AppliedChange
from tests.schemas.stream_records import as_read

KEYRING = Keyring({"test": b"k" * 32}, "test")
MESSAGES = 500


def message(number: int) -> Message:
    return Message.model_validate(
        {
            "message_id": f"message-{number}",
            "from": "planner",
            "to": f"agent-{number % 3}",
            "kind": "note",
            "body": '{"text": "step 7"}',
        }
    )


def test_what_is_kept_of_a_message_is_nothing_that_the_collector_walks():
    state, feed, mailboxes, conversations = (
        LiveState(KEYRING),
        SettledFeed(),
        MailboxIndex(),
        Conversations(KEYRING),
    )
    mailboxes.load([])
    offsets = itertools.count()

    def changed(change: AppliedChange) -> None:
        mailboxes.changed(change)
        conversations.changed(change)

    def settle(outgoing: OutgoingRecord) -> None:
        settled = state.apply(as_read(outgoing, next(offsets)), changed)
        assert settled is not None
        assert settled.verdict == "accepted"
        feed.extend([settled])

    def exchange(numbers: range) -> int:
        for number in numbers:
            posted = message(number)
            settle(posting_record(posted, door="http", principal="planner"))
            taken = claim_record(
                "default", posted.recipient, f"drain-{number}", 10, door="http", principal=posted.recipient
            )
            settle(taken)
            assert mailboxes.handed(("default", posted.recipient), f"drain-{number}") == [posted.message_id]
        gc.collect()
        return len(gc.get_objects())

    # The first make the mailboxes and fill the caches.
    before = exchange(range(20))
    walked = exchange(range(20, 20 + MESSAGES)) - before
    assert len(mailboxes.messages(("default", "agent-0"))) > MESSAGES / 4
    assert walked < MESSAGES / 10
