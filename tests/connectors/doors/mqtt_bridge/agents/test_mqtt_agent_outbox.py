"""The outbox that an agent keeps on disk: its seq, its bytes, and the secret that they were signed with."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from schemas.settings.settings import Settings
from tests.mailbox_credentials import mailbox_credentials
from trunkline_agent.errors import OutboxBusy, TrunklineError, UsageError
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.outbox.outbox import AgentOutbox

pytestmark = pytest.mark.requirement("JE-26")

SECRET = "the secret"


def outbox(folder: Path, secret: str = SECRET, name: str = "ann") -> AgentOutbox:
    return AgentOutbox(folder, name, secret, 0.1)


def test_who_comes_back_goes_on_counting_and_has_the_same_bytes(tmp_path: Path) -> None:
    with outbox(tmp_path) as first:
        first.add(lambda seq: b'{"seq":%d}' % seq)
        first.confirm(first.add(lambda seq: b'{"seq":%d}' % seq))
    with outbox(tmp_path) as again:
        assert [(word.seq, word.wire_bytes) for word in again.pending] == [(1, b'{"seq":1}')]
        assert again.add(lambda seq: b"x").seq == 3
    assert stat.S_IMODE((tmp_path / "ann.json").stat().st_mode) == 0o600


def test_after_a_new_registration_it_begins_anew(tmp_path: Path) -> None:
    with outbox(tmp_path) as first:
        first.add(lambda seq: b"x")
    with outbox(tmp_path, "another secret") as again:
        assert again.pending == ()
        assert again.add(lambda seq: b"y").seq == 1


def test_two_at_once_do_not_share_a_seq(tmp_path: Path) -> None:
    with outbox(tmp_path), pytest.raises(OutboxBusy), outbox(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"agent_name":1}'])
def test_a_file_that_is_none_of_its_own_is_not_overwritten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ann.json").write_bytes(content)
    with pytest.raises(TrunklineError, match="not the state"), outbox(tmp_path):
        pass
    assert (tmp_path / "ann.json").read_bytes() == content


@pytest.mark.parametrize("name", ["../ann", "", "a/b", "a+", "a" * 129])
def test_what_is_no_name_makes_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not an agent's name"):
        outbox(tmp_path, name=name)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"to": "../etc"}, "to:"),
        ({"kind": ""}, "kind:"),
        ({"priority": "urgent"}, "priority:"),
        ({"message_id": "a b"}, "message_id:"),
        ({"body": float("nan")}, "not JSON"),
        ({"body": {1, 2}}, "not JSON"),
        ({"body": "\ud800"}, "not JSON"),
        ({"body": "x" * 2_000_000}, "bytes"),
        ({"body": "see the-secret here"}, "secret"),
    ],
)
def test_what_must_not_be_sent_is_refused_before_it_has_a_seq(
    tmp_path: Path, fields: dict[str, object], why: str
) -> None:
    agent = MqttAgent(mailbox_credentials(Settings(), "ann", "the-secret"), tmp_path, print)
    said = {"to": "bob", "kind": "note", "body": "hello", **fields}
    with pytest.raises(UsageError, match=why):
        agent.send(**said)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
