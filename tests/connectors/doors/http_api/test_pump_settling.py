"""Messages that a pump reports together: few records, each answer once, also after a gateway was killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kafka.admin import KafkaAdminClient

from connectors.log.publisher import Publisher
from schemas.log_access.kafka_clients import client_options
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.mailbox_bodies import HandledMessage, MessagesHandled
from schemas.streams.mailboxes.message import Message
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess
from tests.connectors.doors.http_api.test_xml_messages import Organism, search
from tests.raw_records import read_to_end

COUNT = 4
Leased = list[dict[str, Any]]


@pytest.fixture
def organism(gateway: GatewayProcess, operator: httpx.Client, publisher: Publisher) -> Iterator[Organism]:
    """One gateway with five listeners."""
    yield Organism(gateway, operator, publisher)


def leased(organism: Organism) -> Leased:
    """Four messages to `fast`, leased."""
    for number in range(COUNT):
        assert organism.post(search(str(number)), head="<to>fast</to>").status_code == 202
    found: Leased = []
    while len(found) < COUNT:
        found += organism.lease("fast")["messages"]
    return found


def settle(organism: Organism, messages: Leased) -> list[str]:
    """Report all of these messages in one request, each with an answer; the verdicts."""
    names = ("listener", "message_id", "request_id")
    done = [
        {
            **{name: message[name] for name in names},
            "outcome": "handled",
            "answers": [{"kind": "found", "body": f"<found>{message['message_id']}</found>"}],
        }
        for message in messages
    ]
    answer = organism.operator.post("/api/hub/pump/settle", json={"pump": "p1", "done": done})
    assert answer.status_code == 200, answer.text
    assert [one["message_id"] for one in answer.json()["results"]] == [one["message_id"] for one in messages]
    return [one["verdict"] for one in answer.json()["results"]]


def wait_reactor(settings: Settings) -> None:
    """Wait until the reactor has dealt with all that is in the log, and appended nothing more."""
    admin = KafkaAdminClient(**client_options(settings.kafka))
    try:

        def is_done() -> bool:
            ends: Counter[int] = Counter()
            for record in read_to_end(settings.kafka):
                ends[record.partition] = record.offset + 1
            (found,) = admin.list_group_offsets([settings.gateway.reactor_group]).values()
            return {where.partition: told.offset for where, told in found.items()} == dict(ends)

        wait_until(is_done, 40, "the reactor is at the log's end")
    finally:
        admin.close()


def types(settings: Settings, stream: str) -> Counter[str]:
    """How many records of each type a stream has."""
    found = (one for one in read_to_end(settings.kafka) if one.key == stream.encode())
    return Counter(dict(one.headers)["ce_type"].decode() for one in found)


def bodies(organism: Organism) -> list[str]:
    """The answers in the operator's mailbox."""
    return sorted(one["body"] for one in organism.mailbox("operator"))


def wanted(messages: Leased) -> list[str]:
    """The answers to these messages."""
    return sorted(f"<found>{one['message_id']}</found>" for one in messages)


@pytest.mark.requirement("ST-50")
@pytest.mark.requirement("ST-51")
def test_messages_reported_together_are_one_record_and_each_answer_is_posted_once(
    organism: Organism, backbone_settings: Settings
) -> None:
    messages = leased(organism)
    assert settle(organism, messages) == ["accepted"] * COUNT
    wait_until(lambda: bodies(organism) == wanted(messages), what="the answers")
    # As a pump does that has got no answer.
    assert settle(organism, messages) == ["duplicate"] * COUNT
    wait_reactor(backbone_settings)
    found = types(backbone_settings, "mailbox/default/fast")
    del found["message.leased"], found["mailbox.opened"]
    assert found == {"message.posted": COUNT, "message.handled": 2}
    # Neither the reactor nor the repeated report has posted an answer once more.
    assert types(backbone_settings, "mailbox/default/operator") == {"message.posted": COUNT}
    # The conversations are in the view, without records of their own.
    threads = organism.operator.get("/api/hub/threads").json()["threads"]
    assert {one["message_id"] for one in threads} == {one["message_id"] for one in messages}
    assert not [one for one in read_to_end(backbone_settings.kafka) if one.key.startswith(b"thread/")]


@pytest.mark.requirement("ST-50")
def test_a_lost_lease_among_messages_reported_together_affects_no_other_message(
    organism: Organism, backbone_settings: Settings
) -> None:
    messages = leased(organism)
    organism.settle(messages[1], outcome="nack")
    assert settle(organism, messages) == ["accepted", "rejected", "accepted", "accepted"]
    kept = [messages[0], *messages[2:]]
    wait_until(lambda: bodies(organism) == wanted(kept), what="the answers")
    wait_reactor(backbone_settings)
    assert types(backbone_settings, "mailbox/default/operator") == {"message.posted": COUNT - 1}


@pytest.mark.requirement("ST-52")
def test_the_reactor_posts_the_answers_that_a_killed_gateway_has_not_posted(
    organism: Organism, publisher: Publisher, backbone_settings: Settings
) -> None:
    messages = leased(organism)
    handled = [
        HandledMessage(
            message_id=one["message_id"],
            request_id=one["request_id"],
            answers=[
                Message.model_validate(
                    {
                        "message_id": f"answer-{one['message_id']}",
                        "from": "fast",
                        "to": "operator",
                        "kind": "found",
                        "body": f"<found>{one['message_id']}</found>",
                        "content_type": "application/xml",
                    }
                )
            ],
        )
        for one in messages
    ]
    # The gateway that appended this record has ended at once.
    publisher.append(
        MessagesHandled(to="fast", messages=list(handled)).record(door="xml", principal="operator")
    ).result(10)
    wait_until(lambda: bodies(organism) == wanted(messages), what="the answers")
    wait_reactor(backbone_settings)
    assert types(backbone_settings, "mailbox/default/operator") == {"message.posted": COUNT}
