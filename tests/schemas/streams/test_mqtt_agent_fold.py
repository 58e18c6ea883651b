"""The fold of agents over MQTT: registered, removed, and what they say, in the order of checks (JE-26)."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from schemas.fold.entries import Entries
from schemas.fold.memories import DIGESTS_KEPT
from schemas.fold.settled import Settled
from schemas.keys.sealing import Keyring, mqtt_agent_secret_purpose
from schemas.settings.settings import PROJECT_ROOT
from schemas.streams.agents.mqtt_agents import (
    REGISTRY_MQTT_AGENTS,
    AgentMqttRegistered,
    AgentMqttRemoved,
    MqttAgentRow,
    body_text,
    mqtt_agent_secret,
    registered_by_request,
)
from schemas.streams.fold import settle
from schemas.wire.record import OutgoingRecord, Record, oversized
from tests.schemas.hub_records import AGENT_KEY, MQTT_SECRET, confirming, saying
from tests.schemas.job_records import KEYRING, make_record, said, written
from trunkline_agent.wire.agent_message import confirmation, said_bytes, sign_said
from trunkline_agent.wire.strict_json import canonical, decode

pytestmark = pytest.mark.requirement("JE-26")
PAGE = (PROJECT_ROOT / "docs" / "how-to" / "publish_from_another_language.md").read_text(encoding="utf-8")
VECTORS: list[dict[str, str]] = json.loads(re.findall(r"```json\n(\[.*?\n\])\n```", PAGE, re.DOTALL)[1])
SAID, CONFIRMED = "agent.said", "agent.confirmed"
NAME = "coder"


class Agent:
    """One stream `agent/coder`."""

    def __init__(self) -> None:
        self.entries = Entries()
        self.offset = 0

    def settle(
        self, value: bytes, record_type: str = SAID, ce_id: str | None = None, sender: str = "mqtt/unverified"
    ) -> Settled:
        """Settle a record."""
        self.offset += 1
        return settle(
            make_record(
                value,
                record_type,
                key=AGENT_KEY,
                ce_id=ce_id or f"id {self.offset}",
                offset=self.offset,
                sender=sender,
            ),
            self.entries,
            KEYRING,
            Entries(),
        )

    def register(self, request_id: str = "r1", secret: str = MQTT_SECRET) -> Settled:
        """Register it."""
        return self._made(
            AgentMqttRegistered(
                sealed_secret=KEYRING.seal(secret.encode(), mqtt_agent_secret_purpose(NAME)),
                agent_name=NAME,
                request_id=request_id,
            ).record(door="http", principal="operator")
        )

    def remove(self, request_id: str = "r2") -> Settled:
        """Remove it."""
        return self._made(
            AgentMqttRemoved(agent_name=NAME, request_id=request_id).record(door="http", principal="operator")
        )

    def says(self, seq: int = 1, **changed: Any) -> Settled:
        """It says something, signed."""
        return self.settle(written(saying(seq, **changed)))

    def row(self, settled: Settled) -> MqttAgentRow:
        """The row that was changed."""
        (change,) = settled.changes
        assert change.view == REGISTRY_MQTT_AGENTS
        assert isinstance(change.row, MqttAgentRow)
        return change.row

    def _made(self, record: OutgoingRecord) -> Settled:
        return self.settle(record.value, record.type, record.ce_id, f"{record.door}/{record.principal}")


@pytest.fixture
def agent() -> Agent:
    """An agent that is registered."""
    found = Agent()
    assert found.register().verdict == "accepted"
    return found


def test_registration_seals_the_secret_and_shows_none_of_it() -> None:
    agent = Agent()
    row = agent.row(agent.register())
    assert (row.agent_name, row.status, row.registered_by) == (NAME, "registered", "http/operator")
    assert MQTT_SECRET not in str(msgspec.structs.asdict(row))
    assert all(MQTT_SECRET.encode() not in value for value in agent.entries.stored().values())
    assert mqtt_agent_secret(NAME, agent.entries, KEYRING) == MQTT_SECRET
    assert registered_by_request(agent.entries) == "r1"


def test_the_same_request_again_is_the_same_and_another_is_refused_while_it_is_registered(agent: Agent) -> None:
    assert said(agent.register()) == ("duplicate", None)
    assert said(agent.register(secret="another")) == ("rejected", "seq_conflict")
    assert said(agent.register("r9")) == ("rejected", "illegal_transition")


def test_after_a_removal_it_may_be_registered_anew_with_another_secret_and_seqs_of_its_own(
    agent: Agent,
) -> None:
    agent.says(5)
    assert agent.row(agent.remove()).status == "removed"
    assert said(agent.remove("r3")) == ("rejected", "after_terminal")
    assert said(agent.says(6)) == ("rejected", "after_terminal")
    assert said(agent.says(5)) == ("duplicate", None)
    assert mqtt_agent_secret(NAME, agent.entries, KEYRING) is None
    assert registered_by_request(agent.entries) is None
    row = agent.row(agent.register("r4", "a new secret"))
    assert (row.status, row.last_seq, row.messages, row.removed_at) == ("registered", 0, 0, None)
    assert said(agent.says(1)) == ("rejected", "bad_signature")
    assert said(agent.settle(written(sign_said(saying(1), "a new secret")))) == ("accepted", None)


def test_who_is_not_registered_cannot_be_removed_and_is_not_heard() -> None:
    assert said(Agent().remove()) == ("rejected", "unknown_stream")
    assert said(Agent().says()) == ("rejected", "unknown_stream")


@pytest.mark.parametrize("name", ["operator", "hub", "trunkline", "../x"])
def test_names_that_the_programs_use_are_nobodys(name: str) -> None:
    with pytest.raises(ValueError, match="agent_name"):
        AgentMqttRegistered(
            sealed_secret=KEYRING.seal(b"s", mqtt_agent_secret_purpose(name)), agent_name=name, request_id="r"
        ).record(door="http", principal="operator")


@pytest.mark.parametrize("notation", ["canonical", "spaced", "escaped", "indented", "backwards"])
def test_a_word_is_believed_in_any_notation(agent: Agent, notation: str) -> None:
    body = {"ü": 1.0, "b": [1e16, -0.0, 9007199254740993], "\U0001f600": None}
    settled = agent.settle(written(saying(1, body=body), notation))
    assert (said(settled), settled.seq, settled.status_after) == (("accepted", None), 1, "registered")
    row = agent.row(settled)
    assert (row.last_seq, row.messages) == (1, 1)
    assert row.last_said_at is not None


def test_the_version_may_be_left_out_and_nothing_else_that_is_required(agent: Agent) -> None:
    unsigned = {key: value for key, value in saying(1).items() if key not in ("schema_version", "hmac_sig")}
    assert said(agent.settle(written(sign_said(unsigned, MQTT_SECRET)))) == ("accepted", None)
    for missing in ("message_id", "to", "kind", "body", "seq"):
        less = {key: value for key, value in unsigned.items() if key != missing}
        assert said(agent.settle(written(sign_said(less, MQTT_SECRET)))) == ("rejected", "malformed"), missing


@pytest.mark.parametrize(
    "changed",
    [
        {"message_id": "a/b"},
        {"message_id": 1},
        {"to": "a b"},
        {"to": "+"},
        {"kind": ""},
        {"kind": "k" * 129},
        {"priority": "urgent"},
        {"in_reply_to": "../x"},
        {"thread": "\n"},
        {"subject": "a\nb"},
        {"subject": "x" * 201},
        {"seq": 0},
        {"seq": True},
        {"seq": 1.0},
        {"seq": "1"},
        {"schema_version": "1"},
        {"schema_version": True},
        {"schema_version": None},
    ],
)
def test_a_wrong_field_is_malformed_before_anything_is_looked_up(changed: dict[str, Any]) -> None:
    assert said(Agent().says(**changed)) == ("rejected", "malformed")


def test_another_version_is_told_before_another_wrong_field() -> None:
    assert said(Agent().says(schema_version=2, to="/")) == ("rejected", "schema_version")


def test_what_is_forged_changed_or_unsigned_is_a_bad_signature(agent: Agent) -> None:
    unsigned = {key: value for key, value in saying(1).items() if key != "hmac_sig"}
    for document in (
        unsigned,
        {**unsigned, "hmac_sig": None},
        {**unsigned, "hmac_sig": 7},
        {**unsigned, "hmac_sig": "0" * 64},
        sign_said(unsigned, "another secret"),
        {**saying(1), "body": "changed"},
        {**saying(1), "more": 1},
    ):
        assert said(agent.settle(written(document))) == ("rejected", "bad_signature")


def test_unknown_keys_are_kept_and_signed(agent: Agent) -> None:
    assert said(agent.says(1, mood="good", data={"x": 1})) == ("accepted", None)


def test_a_token_in_it_is_refused_and_masked(agent: Agent) -> None:
    settled = agent.says(1, data={"auth_token": "canary"})
    assert said(settled) == ("rejected", "secret_in_event")
    assert settled.shown is not None
    assert b"canary" not in settled.shown


def test_the_same_seq_is_a_duplicate_or_a_conflict_and_an_old_one_late_or_too_late(agent: Agent) -> None:
    assert said(agent.says(2)) == ("accepted", None)
    assert said(agent.says(2)) == ("duplicate", None)
    assert said(agent.says(2, body="other")) == ("rejected", "seq_conflict")
    late = agent.says(1)
    assert (said(late), late.late, agent.row(late).last_seq) == (("accepted", None), True, 2)
    for seq in range(10, 10 + DIGESTS_KEPT):
        assert agent.says(seq).verdict == "accepted"
    assert said(agent.says(3)) == ("rejected", "too_late")


@pytest.mark.requirement("ST-10")
def test_an_agent_that_is_registered_again_has_no_seqs_of_before() -> None:
    agent = Agent()
    for request_id, first in (("r1", 1), ("r3", 2)):
        assert agent.register(request_id).verdict == "accepted"
        seqs = range(first, 60, first)
        assert {agent.says(seq, body=request_id).verdict for seq in seqs} == {"accepted"}
        assert any(key.startswith("mqtt/seqs/") for key in agent.entries.stored())
        assert said(agent.says(first, body=request_id)) == ("duplicate", None)
        assert said(agent.says(first, body="other")) == ("rejected", "seq_conflict")
        assert agent.remove(f"remove-{request_id}").verdict == "accepted"
    assert agent.register("r5").verdict == "accepted"
    assert {key for key in agent.entries.stored() if "/seqs/" in key} == set()


def test_too_long_a_body_is_too_large_and_rubbish_is_malformed(agent: Agent) -> None:
    long = OutgoingRecord("agent/coder", "id", "mqtt", "unverified", SAID, b"x" * 5000)
    names, values = zip(*oversized(long, 1000).headers(), strict=True)
    record = Record("t", 0, 9, 1, AGENT_KEY, long.value[:1024], names, values)
    assert said(settle(record, agent.entries, KEYRING, Entries())) == ("rejected", "too_large")
    for value in (b"", b"[]", b"\xff", b'{"seq":1,"seq":1}', b"[" * 100):
        assert said(agent.settle(value)) == ("rejected", "malformed")


def test_a_word_of_another_kind_of_stream_is_malformed() -> None:
    record = make_record(written(saying(1)), SAID, key=b"task/t1")
    assert said(settle(record, Entries(), KEYRING, Entries())) == ("rejected", "malformed")


def test_a_secret_under_another_master_key_costs_the_record_and_changes_nothing(agent: Agent) -> None:
    record = make_record(written(saying(1)), SAID, key=AGENT_KEY)
    other = Keyring({"k2": b"x" * 32}, "k2")
    assert said(settle(record, agent.entries, other, Entries())) == ("rejected", "fold_failed")
    assert said(agent.says(1)) == ("accepted", None)


def test_a_definition_and_keys_of_the_same_name_are_left_alone(agent: Agent) -> None:
    assert set(agent.entries.stored()) == {"mqtt"}


def test_a_body_is_kept_as_text_or_as_canonical_json() -> None:
    assert body_text("plain ü") == ("plain ü", "text/plain")
    assert body_text({"b": 1.0, "a": "ü"}) == ('{"a":"ü","b":1.0}', "application/json")
    assert body_text(None) == ("null", "application/json")
    assert canonical({"x": 1}).decode() == body_text({"x": 1})[0]


@pytest.mark.requirement("JE-05")
@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_a_published_vector_is_signed_so_and_believed(vector: dict[str, str]) -> None:
    document, _ = decode(vector["payload"].encode("utf-8"))
    assert said_bytes(document) == vector["signed"].encode("utf-8")
    assert sign_said(document, vector["secret"])["hmac_sig"] == vector["hmac_sig"]
    agent = Agent()
    agent.register(secret=vector["secret"])
    sent = {**json.loads(vector["payload"]), "hmac_sig": vector["hmac_sig"]}
    if sent.get("confirms") == []:
        return  # this one is no record
    record_type = CONFIRMED if "confirms" in sent else SAID
    assert said(agent.settle(json.dumps(sent).encode(), record_type)) == ("accepted", None)


@pytest.mark.requirement("DL-30")
def test_a_confirmation_counts_as_often_as_it_comes_and_changes_no_row_and_no_entry(agent: Agent) -> None:
    agent.says(1)
    before = agent.entries.stored()
    for _ in range(2):
        settled = agent.settle(written(confirming("m1", "m2")), CONFIRMED)
        assert (said(settled), settled.changes) == (("accepted", None), ())
    assert agent.entries.stored() == before


@pytest.mark.requirement("DL-32")
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (confirmation(["m1"], "another secret"), "bad_signature"),
        ({**confirming("m1"), "confirms": ["m2"]}, "bad_signature"),
        ({"schema_version": 1, "confirms": ["m1"]}, "bad_signature"),
        (confirming("../m1"), "malformed"),
        (sign_said({"confirms": []}, MQTT_SECRET), "malformed"),
        (sign_said({"confirms": ["m1"] * 101}, MQTT_SECRET), "malformed"),
        (sign_said({"confirms": ["m1"], "data": {"auth_token": "t"}}, MQTT_SECRET), "secret_in_event"),
    ],
)
def test_a_confirmation_that_is_forged_or_malformed_is_rejected(
    agent: Agent, payload: dict[str, Any], reason: str
) -> None:
    assert said(agent.settle(written(payload), CONFIRMED)) == ("rejected", reason)


@pytest.mark.requirement("DL-32")
def test_only_an_agent_that_is_registered_confirms(agent: Agent) -> None:
    assert said(Agent().settle(written(confirming("m1")), CONFIRMED)) == ("rejected", "unknown_stream")
    agent.remove()
    assert said(agent.settle(written(confirming("m1")), CONFIRMED)) == ("rejected", "after_terminal")
