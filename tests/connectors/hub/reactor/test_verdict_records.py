"""Records derived by a verdict: always the same ones, and none from a record that does not count."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.doors.mqtt_bridge.bridge_records import incoming
from connectors.hub.reactor.derived_records import FewNotices
from schemas.effects.recipients import limits_of
from schemas.fold.settled import Settled
from schemas.keys.sealing import job_secret_purpose, mqtt_agent_secret_purpose
from schemas.settings.settings import MqttSettings
from schemas.streams.agents.agent_registry import AgentStopped
from schemas.streams.agents.mqtt_agents import (
    AgentMqttRegistered,
    AgentMqttRemoved,
)
from schemas.streams.control.limits import LimitsSet
from schemas.streams.job.job_registry import JobRegistration
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import OutgoingRecord, Record, oversized, read_envelope
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.reactor.followed import follows, needs_verdict
from tests.schemas.job_records import KEYRING, SECRET, event, make_record
from trunkline_agent.wire.agent_message import confirmation, sign_said
from trunkline_agent.wire.signing import sign_event
from trunkline_agent.wire.strict_json import canonical, decode

pytestmark = pytest.mark.requirement("JE-26")
JOB = "ab12cd34"
BY = {"door": "http", "principal": "operator"}


class Log(FoldedLog):
    """A log with two agents, ann and bob."""

    def __init__(self) -> None:
        super().__init__(KEYRING)
        self.offset = 0
        for name in ("ann", "bob"):
            self.append(
                AgentMqttRegistered(
                    sealed_secret=KEYRING.seal(f"secret of {name}".encode(), mqtt_agent_secret_purpose(name)),
                    agent_name=name,
                    request_id="r",
                ).record(**BY)
            )

    def append(self, made: OutgoingRecord) -> tuple[Record, Settled]:
        """Settle a record."""
        self.offset += 1
        names = dict(made.headers())
        more = [(name, value) for name, value in names.items() if name.startswith("ce_body")]
        record = make_record(
            made.value,
            made.type,
            key=made.key,
            ce_id=made.ce_id,
            sender=f"{made.door}/{made.principal}",
            offset=self.offset,
            more_headers=more,
        )
        return record, self.add(record)

    def says(self, seq: int = 1, secret: str = "secret of ann", **changed: Any) -> list[OutgoingRecord]:  # noqa: S107
        """Return the records that follow from a message of ann's."""
        said = {"message_id": f"m{seq}", "to": "bob", "kind": "ask", "body": "?", "seq": seq, **changed}
        value = canonical(sign_said(said, secret))
        return self.after(
            *self.append(incoming(MqttSettings(agents_prefix="p"), "p/ann/outbox", value, None).record)
        )

    def after(self, record: Record, settled: Settled) -> list[OutgoingRecord]:
        """Return the records that follow from `record` now."""
        assert needs_verdict(record, self.get)
        return follows(record, self.get, settled)


def body_of(record: OutgoingRecord) -> Any:
    return decode(Message.model_validate(decode(record.value)[0]).body.encode())[0]


def test_a_word_becomes_a_message_of_its_agent_and_again_the_same_one() -> None:
    log = Log()
    value = canonical(
        sign_said(
            {"message_id": "m", "to": "bob", "kind": "k", "body": {"b": 1, "a": 2}, "seq": 1}, "secret of ann"
        )
    )
    record, settled = log.append(incoming(MqttSettings(agents_prefix="p"), "p/ann/outbox", value, None).record)
    (posting,) = log.after(record, settled)
    assert (posting.stream, posting.door, posting.principal) == ("mailbox/default/bob", "mqtt", "ann")
    assert (posting.ce_id, Message.model_validate(decode(posting.value)[0]).body) == ("m", '{"a":2,"b":1}')
    assert log.append(posting)[1].verdict == "accepted"
    # The recipient's later removal makes no difference.
    log.append(AgentMqttRemoved(agent_name="bob", request_id="r2").record(**BY))
    assert log.after(record, settled) == [posting]


@pytest.mark.requirement("DL-30")
def test_a_confirmation_becomes_a_claim_of_its_messages_and_again_the_same_one() -> None:
    log = Log()
    value = canonical(confirmation(["m1", "m2"], "secret of ann"))
    record, settled = log.append(incoming(MqttSettings(agents_prefix="p"), "p/ann/outbox", value, None).record)
    (claim,) = log.after(record, settled)
    assert (claim.stream, claim.door, claim.principal) == ("mailbox/default/ann", "mqtt", "ann")
    assert (claim.type, claim.ce_id) == ("message.claimed", read_envelope(record).ce_id)
    assert decode(claim.value)[0]["message_ids"] == ["m1", "m2"]
    assert log.after(record, settled) == [claim]
    # The same ids may be those of new messages a week later.
    again, settled = log.append(incoming(MqttSettings(agents_prefix="p"), "p/ann/outbox", value, None).record)
    (later,) = log.after(again, settled)
    assert decode(later.value)[0]["request_id"] != decode(claim.value)[0]["request_id"]


@pytest.mark.requirement("DL-32")
def test_no_claim_follows_from_a_forged_confirmation() -> None:
    log = Log()
    value = canonical(confirmation(["m1"], "another secret"))
    record, settled = log.append(incoming(MqttSettings(agents_prefix="p"), "p/ann/outbox", value, None).record)
    assert log.after(record, settled) == []


def test_who_was_not_known_stays_so_for_this_message() -> None:
    log = Log()
    value = canonical(
        sign_said({"message_id": "m", "to": "eve", "kind": "k", "body": "b", "seq": 1}, "secret of ann")
    )
    record, settled = log.append(incoming(MqttSettings(agents_prefix="p"), "p/ann/outbox", value, None).record)
    (told,) = log.after(record, settled)
    assert (told.stream, told.door) == ("mailbox/default/ann", "reactor")
    assert body_of(told) == {"message_id": "m", "to": "eve", "reason": "unknown_recipient"}
    log.append(told)
    log.append(
        AgentMqttRegistered(
            sealed_secret=KEYRING.seal(b"s", mqtt_agent_secret_purpose("eve")), agent_name="eve", request_id="r"
        ).record(**BY)
    )
    assert log.after(record, settled) == [told]


@pytest.mark.parametrize(
    "changed", [{"secret": "another"}, {"to": "../x"}, {"data": {"auth_token": "t"}}, {"schema_version": 2}]
)
def test_nothing_follows_from_what_does_not_count(changed: dict[str, Any]) -> None:
    assert Log().says(**changed) == []


def test_nothing_follows_from_a_duplicate_or_a_conflict() -> None:
    log = Log()
    assert len(log.says()) == 1
    assert log.says() == []
    assert log.says(body="other") == []


def test_a_posting_that_is_rejected_is_told_and_any_other_is_not() -> None:
    log = Log()
    (first,), (second,) = log.says(1, message_id="same"), log.says(2, message_id="same", body="other")
    assert log.after(*log.append(first)) == []
    (told,) = log.after(*log.append(second))
    assert (told.stream, body_of(told)["reason"]) == ("mailbox/default/ann", "seq_conflict")
    (long,) = log.says(3, body="x" * 5000)
    (too_long,) = log.after(*log.append(oversized(long, 1000)))
    assert body_of(too_long) == {"message_id": "m3", "to": "bob", "reason": "too_large"}


@pytest.mark.parametrize(("notify", "count"), [(None, 0), (["end"], 0), (["permission"], 1)])
def test_only_a_believed_question_for_permission_is_told_and_only_to_who_wants_it(
    notify: list[Any] | None, count: int
) -> None:
    log = Log()
    log.append(
        JobRegistration(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB)),
            job_id=JOB,
            description="x",
            notify=notify,
            request_id="q",
        ).record(door="http", principal="dora")
    )
    asked = sign_event(event(1, "permission_required", detail="may I?"), SECRET)
    for document, expected in (
        ({**asked, "detail": "forged"}, 0),
        (asked, count),
        (asked, 0),
        (sign_event(event(2, "progress", detail="no permission_required"), SECRET), 0),
    ):
        made = OutgoingRecord(
            f"job/{JOB}", f"id {log.offset}", "mqtt", "unverified", "job.event", canonical(document)
        )
        record, settled = log.append(made)
        found = follows(record, log.get, settled)
        assert len(found) == expected
        if found:
            assert body_of(found[0]) == {"job_id": JOB, "seq": 1, "detail": "may I?"}
            assert found[0].stream == "mailbox/default/dora"


def test_an_unsafe_question_is_masked() -> None:
    log = Log()
    log.append(
        JobRegistration(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB)),
            job_id=JOB,
            description="x",
            notify=["permission"],
        ).record(door="http", principal="dora")
    )
    asked = sign_event(event(1, "permission_required", detail="read /home/me/.ssh/id_rsa"), SECRET)
    made = OutgoingRecord(f"job/{JOB}", "id", "mqtt", "unverified", "job.event", canonical(asked))
    (told,) = log.after(*log.append(made))
    assert body_of(told)["detail"] == "[masked]"


def test_other_records_of_agents_hang_on_no_verdict() -> None:
    log = Log()
    stop = AgentStopped(agent_name="ann", request_id="r9").record(door="mqtt", principal="ann")
    record, _ = log.append(stop)
    assert not needs_verdict(record, log.get)
    assert not needs_verdict(make_record(b"?", key=b"\xff"), log.get)


@pytest.mark.requirement("LM-05")
def test_an_agent_over_mqtt_has_the_limits_of_the_role_agent_unless_it_has_its_own() -> None:
    log = Log()
    for scope, name, rate in (("all", "all", 100), ("role", "agent", 10), ("name", "bob", 1)):
        wanted = LimitsSet(scope=scope, name=name, request_id=name, messages_per_minute=rate)
        log.append(wanted.record(door="http", principal="operator"))
    rates = [limits_of(log.get, name).messages_per_minute for name in ("ann", "bob", "stranger")]
    assert rates == [10, 1, 100]


@pytest.mark.requirement("LM-05")
def test_the_sender_gets_one_notice_a_minute_of_a_full_mailbox_and_the_same_one_again() -> None:
    log, few = Log(), FewNotices()
    notices = []
    for seq in (1, 2):
        (posting,) = log.says(seq)
        full = Message.model_validate({**decode(posting.value)[0], "pending_most": 0}).record(
            door="mqtt", principal="ann"
        )
        record, settled = log.append(full)
        assert (settled.verdict, settled.reason) == ("rejected", "mailbox_full")
        notices.append(log.after(record, settled))
    first, second = notices
    assert (first[0].stream, first[0].ce_id) == ("mailbox/default/ann", second[0].ce_id)
    assert body_of(first[0]) == {"message_id": "m1", "to": "bob", "reason": "mailbox_full"}
    assert few.first(first) == first
    assert few.first(second) == []
    assert few.first(first) == first, "a repeated cause"
