"""`trunkline schedules` as a user runs it, against a real gateway (DL-23)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from tests.broker_processes import wait_until
from tests.connectors.cli.conftest import CommandLine, json_of

pytestmark = pytest.mark.requirement("DL-23")


def test_a_schedule_is_set_shown_with_its_next_runs_listed_and_removed(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    cron = ("--cron", "30 9 * * 1-5", "--missed", "latest", "--priority", "high", "--expires", "10m")
    done = trunkline.call("schedules", "set", "report", "operator", "ask", "--text", "what is new?", *cron)
    assert (done.returncode, done.stderr) == (0, "")
    first, blank, heading, *runs = done.stdout.splitlines()
    assert first == "schedule report posts to operator, 30 9 * * 1-5"
    assert (blank, heading) == ("", "NEXT RUNS (UTC)")
    assert len(runs) == 5
    assert all(run.endswith("T09:30:00Z") for run in runs)
    row = trunkline.json("schedules", "show", "report")
    assert (row["owner"], row["kind"], row["body"]) == ("operator", "ask", '{"text":"what is new?"}')
    assert (row["missed"], row["priority"], row["expires_in_ms"]) == ("latest", "high", 600_000)
    shown = trunkline.call("schedules", "show", "report").stdout
    assert re.search(r"^cron +30 9 \* \* 1-5$", shown, re.MULTILINE)
    assert shown.splitlines()[-5:] == runs
    assert trunkline.json("schedules", "set", "tick", "hub", "tick", "--every", "90m", "[1]")["every_s"] == 5400
    table = trunkline.call("schedules", "list").stdout.splitlines()
    assert [line.split()[0] for line in table[1:]] == ["report", "tick"]
    assert "every 90m" in table[2]
    assert [one["schedule"] for one in trunkline.json("schedules", "list")["schedules"]] == ["report", "tick"]
    done = trunkline.call("schedules", "remove", "tick")
    assert (done.returncode, done.stdout) == (0, "schedule tick is removed after 0 runs\n")
    assert trunkline.json("schedules", "show", "tick")["status"] == "removed"
    assert trunkline.call("schedules", "remove", "tick").returncode == 4
    trunkline.call("schedules", "remove", "report")
    assert trunkline.call("schedules", "list").returncode == 3


def test_the_messages_of_an_interval_come_into_the_mailbox_with_the_payload_as_it_was_given(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "payload.json"
    file.write_text('["from", {"a": "file"}]')
    trunkline.json("schedules", "set", "tick", "operator", "tick", f"@{file}", "--every", "1s")
    wait_until(lambda: hub.get(path_of("mailboxes", "default", "operator"))["total"] >= 2, what="two messages")
    trunkline.json("schedules", "remove", "tick")
    drained = trunkline.json("messages", "drain")
    assert len(drained["messages"]) >= 2
    assert {(m["type"], str(m["payload"])) for m in drained["messages"]} == {
        ("tick", "['from', {'a': 'file'}]")
    }


def test_the_same_request_id_is_the_same_request(hub: GatewayClient, trunkline: CommandLine) -> None:
    given = ("schedules", "set", "tick", "hub", "tick", "--request-id", "r-1", "--json", "--every")
    first = json_of(trunkline.call(*given, "1h"))
    assert (first["revision"], first["request_id"]) == (1, "r-1")
    assert json_of(trunkline.call(*given, "60m")) == first
    refused = trunkline.call(*given, "2h")
    assert (refused.returncode, "seq_conflict" in refused.stderr) == (4, True)
    assert trunkline.json("schedules", "set", "tick", "hub", "tick", "--every", "1h")["revision"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("set", "tick", "hub", "tick"), 2, "one of the arguments --cron --every is required"),
        (("set", "tick", "hub", "tick", "--every", "1m", "--cron", "* * * * *"), 2, "not allowed with"),
        (("set", "tick", "hub", "tick", "--every", "1.5s"), 2, "whole seconds"),
        (("set", "tick", "hub", "tick", "--every", "soon"), 2, "expected a time"),
        (("set", "tick", "hub", "tick", "--every", "366d"), 2, "less than or equal to 31536000"),
        (("set", "tick", "hub", "tick", "--cron", "0 0 31 2 *"), 2, "never runs"),
        (("set", "tick", "hub", "tick", "--every", "1m", "--missed", "some"), 2, "invalid choice"),
        (("set", "tick", "hub", "tick", "{", "--every", "1m"), 2, "PAYLOAD"),
        (("set", "a/b", "hub", "tick", "--every", "1m"), 2, "not the name of a schedule"),
        (("set", "tick", "nobody", "tick", "--every", "1m"), 3, "unknown_recipient"),
        (("set", "tick", "hub", " ", "--every", "1m"), 4, "policy"),
        (("show", "nothing"), 3, "no schedule with this name"),
        (("remove", "nothing"), 3, "no schedule with this name"),
        (("list",), 3, "there are no such schedules"),
    ],
)
def test_what_cannot_be_done_has_its_exit_code_and_its_reason(
    unchanged: CommandLine, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = unchanged.call("schedules", *arguments)
    assert unchanged.call("schedules", "list").returncode == 3
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr


def test_a_schedule_of_somebody_else_is_refused(hub: GatewayClient, trunkline: CommandLine) -> None:
    token = hub.post(path_of("principals"), {"principal": "bo", "role": "worker"})["token"]
    trunkline.json("schedules", "set", "tick", "hub", "tick", "--every", "1h")
    for arguments in (("set", "tick", "hub", "tick", "--every", "1h"), ("show", "tick"), ("remove", "tick")):
        done = trunkline.call("schedules", *arguments, TRUNKLINE_TOKEN=token)
        assert (done.returncode, "policy" in done.stderr) == (4, True)
    assert trunkline.call("schedules", "list", TRUNKLINE_TOKEN=token).returncode == 3
