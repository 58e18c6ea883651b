"""The vectors that the libraries share follow from the Python code.

They are canonical JSON, signatures, ids, logins, keys of handlings, errors of refusals and times to wait.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from schemas.settings.settings import PROJECT_ROOT
from trunkline_agent import errors
from trunkline_agent.hub.answer_errors import error_of, rejection_of, retry_after_s
from trunkline_agent.hub.hub_requests import Handling
from trunkline_agent.private_files import is_private
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.mqtt_password import job_user, mqtt_password
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("AG-61")

FOLDER = PROJECT_ROOT / "connectors" / "agent_sdk" / "vectors"
PAGE = PROJECT_ROOT / "docs" / "how-to" / "publish_from_another_language.md"


@pytest.fixture
def time_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that sets the time zone of this process, until the test ends."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


def vectors(name: str) -> Any:
    """The content of a file of vectors."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="ascii"))


def test_each_float_of_the_vectors_is_written_as_python_writes_it() -> None:
    for one in vectors("canonical_json")["floats"]:
        (number,) = struct.unpack(">d", bytes.fromhex(one["double"]))
        assert canonical(number).decode() == repr(number) == one["text"]


def test_the_ids_and_logins_of_the_vectors_are_those_of_python() -> None:
    found = vectors("signing")
    for one in found["content_ids"]:
        assert content_id(*[part.encode() for part in one["parts"]]) == one["id"]
    for one in found["mqtt_logins"]:
        user = job_user(one["job_id"], one["secret"])
        assert (user, mqtt_password(one["secret"], user)) == (one["user"], one["password"])


@pytest.mark.requirement("AG-92")
def test_a_handling_makes_the_keys_of_the_vectors() -> None:
    for one in vectors("hub")["derived_keys"]:
        handling = Handling(one["message_id"], one["attempt"])
        for call in one["calls"]:
            if call["call"] == "content":
                made = handling.content_key(call["what"], call["body"].encode())
            else:
                made = handling.reply_key() if call["call"] == "reply" else handling.own_key(call["own"])
            assert made == (call["key"], call["may_stand"]), call["name"]


@pytest.mark.requirement("AG-93")
def test_each_refusal_of_the_vectors_has_its_error_and_exit_code() -> None:
    for one in vectors("hub")["refusals"]:
        status, reason = one["status"], one["reason"]
        body = b"<html>" if reason is None else json.dumps({"reason": reason, "message": "so\nit is"}).encode()
        found = error_of(status, {}, body)
        kind = getattr(errors, one["error"])
        assert (type(found), found.exit_code) == (kind, one["exit_code"]), one
        assert found.reason == reason or (reason is None and found.reason == kind.reason)
        # A terminal obeys control characters, and the text may quote another client's.
        assert reason is None or "so\ufffdit is" in str(found)
        rejected = rejection_of(found)
        assert (type(rejected).__name__, rejected.exit_code) == (one["error_of_a_message"], one["exit_code"])
        assert str(rejected) == str(found)


@pytest.mark.requirement("AG-94")
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_retry_after_is_read_in_each_form_in_utc(zone: str, time_zone: Callable[[str], None]) -> None:
    time_zone(zone)
    found = vectors("hub")["retry_after"]
    now_s = datetime.fromisoformat(found["now"]).timestamp()
    for one in found["waits"]:
        headers = {"retry-after": one["retry_after"], **({"date": one["date"]} if one["date"] else {})}
        assert retry_after_s(headers, now_s) == (one["wait_s"] or 0), one["name"]
    assert retry_after_s({}) == 0


@pytest.mark.requirement("OP-52")
def test_each_mode_of_the_vectors_is_private_or_not_by_python() -> None:
    cases = vectors("private_files")["cases"]
    for mode, owner, user, expected in cases:
        assert is_private(int(mode, 8), owner, user) is expected, (mode, owner, user)
    assert len({tuple(case[:3]) for case in cases}) == len(cases) > 20
