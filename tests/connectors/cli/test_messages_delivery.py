"""`trunkline messages` and `dead-letters` at real gateways: follow, lease, acknowledge, ask, replay (DL-14)."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from connectors.cli.messages.messages_command import STATUSES
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.local_stack import free_port
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import MESSAGE_TRANSITIONS
from tests.broker_processes import ProgramProcess, wait_until
from tests.connectors.cli.conftest import WAIT_S, CommandLine, json_of
from trunkline_agent.errors import UsageError
from trunkline_agent.hub.plans import Request

HOSTILE = "red \x1b[31m bidi \u202e bell \x07 new\nline zero\u200b"
FOLLOW = ("messages", "follow", "--json")


class Following:
    """A started `trunkline messages follow`, and the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait(self, count: int) -> list[dict[str, Any]]:
        """The first lines as JSON, once there are so many."""
        wait_until(lambda: len(self.lines) >= count, WAIT_S, f"{count} lines in {self.lines}")
        return [json.loads(line) for line in self.lines[:count]]

    def interrupt(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Send Ctrl-C. Exit code and standard error."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """Exit code and standard error, once it has ended."""
        code = self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()


def send(hub: GatewayClient, recipient: str = "operator", payload: Any = None, **fields: Any) -> str:
    """Send a message; its id."""
    body = {"recipient": recipient, "type": "note", "payload": payload, **fields}
    return str(hub.post(path_of("messages"), body)["message_id"])


def add(hub: GatewayClient, name: str, role: str = "worker") -> str:
    """Add a principal; its token."""
    return str(hub.post(path_of("principals"), {"principal": name, "role": role})["token"])


def statuses(hub: GatewayClient, name: str = "operator") -> list[str]:
    return [one["status"] for one in hub.get(path_of("mailboxes", "default", name))["messages"]]


@contextmanager
def another_gateway(settings: Settings, folder: Path) -> Iterator[tuple[str, ProgramProcess, GatewayClient]]:
    """A second gateway on the same log: its URL, its process, and a client of it."""
    gateway = settings.gateway.model_copy(update={"port": free_port()})
    other = settings.model_copy(update={"gateway": gateway})
    program = ProgramProcess("connectors.programs.gateway_program", other, folder, "other")
    try:
        program.wait_ready(WAIT_S)
        with GatewayClient(other) as client:
            yield other.gateway_url, program, client
    finally:
        program.kill()


@pytest.mark.requirement("DL-14")
@pytest.mark.requirement("CM-06")
def test_follow_prints_each_message_as_it_comes_escaped_and_takes_none(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    waits = send(hub, payload={"text": HOSTILE})
    text, lines = Following(trunkline.start("messages", "follow")), Following(trunkline.start(*FOLLOW))
    assert lines.wait(1)[0]["payload"] == {"text": HOSTILE}
    comes = send(hub, payload=[2], in_reply_to="m-1", thread="t-1", subject="tea")
    found = lines.wait(2)
    assert [one["id"] for one in found] == [waits, comes]
    assert len({one["event_id"] for one in found}) == 2
    wait_until(lambda: len(text.lines) == 2, what="two lines of text")
    assert waits in text.lines[0]
    assert "in reply to m-1  thread t-1  subject tea  [2]" in text.lines[1]
    for line in (*text.lines, *lines.lines):
        assert line.endswith("\n")
        assert line[:-1].isprintable()
    assert text.interrupt() == (130, "")
    assert lines.interrupt() == (130, "")
    assert statuses(hub) == ["unread", "unread"]
    assert len(lines.lines) == 2


@pytest.mark.requirement("DL-14")
def test_follow_goes_on_at_another_gateway_without_a_gap_and_without_a_double(
    hub: GatewayClient, gateway: ProgramProcess, hub_settings: Settings, trunkline: CommandLine, tmp_path: Path
) -> None:
    with another_gateway(hub_settings, tmp_path) as (url, _, other):
        follow = Following(trunkline.start(*FOLLOW, "--url", hub_settings.gateway_url, "--url", url))
        sent = [send((hub, other)[n % 2], payload=n) for n in range(6)]
        follow.wait(6)
        # More come while the gateway that it follows is killed.
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(lambda: [send(other, payload=n) for n in range(6, 30)])
            gateway.stop(signal.SIGKILL)
            sent += rest.result(WAIT_S)
        assert [one["id"] for one in follow.wait(30)] == sent
        sent.append(send(other, payload=30))
        assert [one["id"] for one in follow.wait(31)] == sent
        code, notes = follow.interrupt()
        assert code == 130
        assert notes.count("trying again") == notes.count("connected again") == 1
        assert len(follow.lines) == 31
    # Without any gateway it says so.
    gone = trunkline.run(*FOLLOW, "--url", hub_settings.gateway_url, "--url", url)
    assert (gone.returncode, gone.stdout) == (5, "")
    assert url in gone.stderr


@pytest.mark.requirement("DL-14")
def test_follow_begins_after_its_state_file_or_an_event_and_refuses_what_is_no_place(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    state = tmp_path / "place"
    sent = [send(hub, payload=n) for n in range(3)]
    first = Following(trunkline.start(*FOLLOW, "--state", str(state)))
    events = first.wait(3)
    wait_until(lambda: state.exists() and state.read_text().strip() == events[2]["event_id"], what="the place")
    assert first.interrupt(signal.SIGKILL)[0] == -signal.SIGKILL
    sent.append(send(hub, payload=3))
    again = Following(trunkline.start(*FOLLOW, "--state", str(state)))
    assert [one["id"] for one in again.wait(1)] == sent[3:]
    assert again.interrupt() == (130, "")
    after = Following(trunkline.start(*FOLLOW, "--after", events[0]["event_id"]))
    assert [one["id"] for one in after.wait(3)] == sent[1:]
    assert after.interrupt() == (130, "")
    assert (len(again.lines), len(after.lines)) == (1, 3)
    for wrong in (b"", b"nonsense", b"\xff\xfe", b"9" * 200, b"1-", b"1\n2\n"):
        state.write_bytes(wrong)
        done = trunkline.run(*FOLLOW, "--state", str(state))
        assert (done.returncode, done.stdout) == (2, ""), wrong
        assert "no place of a mailbox" in done.stderr
    assert trunkline.run(*FOLLOW, "--state", str(tmp_path)).returncode == 2
    assert trunkline.run(*FOLLOW, "--after", "last").returncode == 2
    assert trunkline.run(*FOLLOW, "--after", "1", "--state", "x").returncode == 2


@pytest.mark.requirement("DL-14")
def test_a_forged_last_event_id_is_refused_or_begins_with_the_oldest_message(
    hub: GatewayClient, hub_settings: Settings
) -> None:
    sent = [send(hub, payload=n) for n in range(2)]
    for forged in ("", "x", "-1", "1-2", "1.5", "1e3", "0x1", "' or 1=1", "9" * 19, "9" * 64):
        request = Request("GET", path_of("messages", "events"), headers={"Last-Event-ID": forged})
        events = hub.events(request, WAIT_S)
        assert [next(events).json()["id"] for _ in sent] == sent, forged
    request = Request("GET", path_of("messages", "events"), headers={"Last-Event-ID": "9" * 65})
    with pytest.raises(UsageError) as refused:
        next(hub.events(request, WAIT_S))
    assert refused.value.reason == "malformed"


@pytest.mark.requirement("DL-14")
def test_follow_marks_as_read_what_it_has_printed_and_tells_what_another_reader_holds(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    held = send(hub, payload="held")
    assert [one["id"] for one in trunkline.json("messages", "lease")["messages"]] == [held]
    read = [send(hub, payload=n) for n in range(2)]
    follow = Following(trunkline.start(*FOLLOW, "--mark-read", "--state", str(tmp_path / "place")))
    follow.wait(3)
    wait_until(lambda: statuses(hub) == ["leased", "read", "read"], what="they are read")
    read.append(send(hub, payload=2))
    assert follow.wait(4)[-1]["id"] == read[-1]
    wait_until(lambda: statuses(hub)[-1] == "read", what="it is read")
    code, notes = follow.interrupt()
    assert code == 130
    assert f"another reader holds or has ended them: {held}" in notes
    assert trunkline.json("messages", "drain")["messages"] == []


@pytest.mark.requirement("DL-14")
def test_follow_ends_with_the_reason_when_its_token_is_revoked(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    token = add(hub, "bo")
    message_id = send(hub, "bo")
    follow = Following(trunkline.start(*FOLLOW, TRUNKLINE_TOKEN=token))
    assert follow.wait(1)[0]["id"] == message_id
    hub.post(path_of("principals", "bo", "revoke"))
    code, notes = follow.ended()
    assert code == 4
    assert "the token is revoked" in notes
    assert "TRUNKLINE_TOKEN" in notes
    assert "Traceback" not in notes
    send(hub, "operator")
    assert len(follow.lines) == 1


@pytest.mark.requirement("DL-14")
def test_leased_messages_are_acknowledged_given_back_and_extended(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    sent = [send(hub, payload={"text": HOSTILE}), send(hub, payload=1)]
    shown = trunkline.call("messages", "lease", "--for", "5m", "--limit", "1", "--request-id", "l-1")
    assert shown.returncode == 0
    assert "1 leased until " in shown.stderr
    assert all(line.isprintable() for line in (*shown.stdout.splitlines(), *shown.stderr.splitlines()))
    lease = trunkline.json("messages", "lease", "--for", "5m", "--limit", "1", "--request-id", "l-1")
    assert [one["id"] for one in lease["messages"]] == sent[:1]
    assert f"messages ack {lease['lease_id']}" in shown.stderr
    named = (lease["lease_id"], sent[0])
    extended = trunkline.call("messages", "extend", *named, "--for", "1h")
    assert (extended.returncode, "1 leased for longer until " in extended.stdout) == (0, True)
    nacked = trunkline.json("messages", "nack", *named, "--reason", "no disk")
    assert nacked == {"done": sent[:1], "refused": []}
    late = trunkline.call("messages", "ack", *named)
    assert (late.returncode, late.stdout) == (4, "0 acknowledged\n")
    assert f"{sent[0]}: " in late.stderr
    assert "illegal_transition" in late.stderr
    # A message that came back is handed out before newer ones.
    both = trunkline.json("messages", "lease", "--wait", "30s")
    assert [(one["id"], one["attempt"]) for one in both["messages"]] == list(zip(sent, (2, 1), strict=True))
    acked = trunkline.call("messages", "ack", both["lease_id"], *sent)
    assert (acked.returncode, acked.stdout) == (0, "2 acknowledged\n")
    assert trunkline.call("messages", "lease", "--wait", "0").returncode == 3
    for wrong in (("lease", "--for", "0"), ("lease", "--for", "1.5s"), ("lease", "--for", "2d"),
                  ("lease", "--wait", "6m"), ("drain", "--wait", "soon"), ("ack", "l1"),
                  ("ack", "l 1", "m1"), ("extend", "l1", "m1")):  # fmt: skip
        assert trunkline.call("messages", *wrong).returncode == 2, wrong


@pytest.mark.requirement("DL-14")
def test_a_drain_waits_for_a_message_longer_than_the_client_waits_for_an_answer(
    hub: GatewayClient, trunkline: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An answer without a wait would come within a second.
    monkeypatch.setattr("connectors.plumbing.gateway_client.gateway_client._ANSWER_MARGIN_S", -9.0)
    assert trunkline.settings.gateway.settle_timeout_s == 10
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: threading.Event().wait(3) or send(hub, payload=1))
        drained = trunkline.json("messages", "drain", "--wait", "30s")
        assert [one["id"] for one in drained["messages"]] == [sending.result(WAIT_S)]


@pytest.mark.requirement("DL-14")
def test_send_waits_for_the_reply_and_says_when_none_came(hub: GatewayClient, trunkline: CommandLine) -> None:
    bo = {"TRUNKLINE_TOKEN": add(hub, "bo")}
    ask = ("messages", "send", "bo", "ask", "[6, 7]", "--thread", "sums", "--request-id", "q-1")
    none = trunkline.call(*ask, "--wait-reply", "1s")
    assert none.returncode == 3
    assert "no reply came in time" in none.stderr
    message_id = trunkline.json(*ask)["message_id"]
    assert f"in_reply_to {message_id}" in none.stderr
    asking = trunkline.start(*ask, "--wait-reply", "60s")
    (question,) = trunkline.json("messages", "drain", "--wait", "30s", **bo)["messages"]
    assert (question["id"], question["payload"], question["thread"]) == (message_id, [6, 7], "sums")
    answer = ("messages", "send", question["sender"], "answer", "--text", HOSTILE, "--in-reply-to", message_id)
    reply_id = trunkline.json(*answer, "--thread", question["thread"], **bo)["message_id"]
    out, notes = asking.communicate(timeout=WAIT_S)
    assert (asking.returncode, notes) == (0, "")
    assert reply_id in out
    assert all(line.isprintable() for line in out.splitlines())
    # The same request gets the same reply, and no drain gets it.
    again = trunkline.json(*ask, "--wait-reply", "60s")
    assert (again["reply"]["id"], again["reply"]["payload"]) == (reply_id, {"text": HOSTILE})
    assert again["reply"]["in_reply_to"] == message_id
    assert trunkline.json("messages", "drain")["messages"] == []


@pytest.mark.requirement("DL-10")
@pytest.mark.requirement("DL-14")
def test_dead_messages_are_listed_and_replayed_from_the_command_line(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    bo = {"TRUNKLINE_TOKEN": add(hub, "bo")}
    assert trunkline.call("dead-letters", "messages").returncode == 3
    assert trunkline.json("dead-letters", "messages") == {"messages": [], "total": 0, "left": 0}
    message_id = send(hub, "bo", {"text": HOSTILE})
    for _ in range(trunkline.settings.gateway.max_attempts):
        lease = trunkline.json("messages", "lease", **bo)["lease_id"]
        assert (
            trunkline.call("messages", "nack", lease, message_id, "--reason", "no disk", **bo).returncode == 0
        )
    address = f"default/bo/{message_id}"
    for table in (
        trunkline.call("dead-letters", "messages"),
        trunkline.call("dead-letters", "messages", "bo", **bo),
    ):
        row = table.stdout.splitlines()[1]
        assert row.startswith(address)
        assert row.endswith(" 5         http/bo      no disk")
    assert "no disk" in trunkline.call("messages", "peek", "bo", "--status", "dead").stdout
    assert trunkline.call("messages", "peek", "bo", "--status", "unread").returncode == 3
    assert trunkline.call("dead-letters", "messages", **bo).returncode == 4
    first = trunkline.call("dead-letters", "replay", address, **bo)
    (new,) = trunkline.json("messages", "drain", **bo)["messages"]
    assert (first.returncode, first.stdout) == (0, f"{address} is posted again as {new['id']}\n")
    assert (new["replay_of"], new["payload"]) == (message_id, {"text": HOSTILE})
    again = trunkline.call("dead-letters", "replay", address)
    assert (again.returncode, f"was replayed before, as {new['id']}" in again.stdout) == (0, True)
    more = [
        json_of(trunkline.call("dead-letters", "replay", address, "--request-id", "r-2", "--json"))
        for _ in "12"
    ]
    assert [one["verdict"] for one in more] == ["accepted", "duplicate"]
    assert [one["replayed"] for one in more] == [address] * 2
    drained = trunkline.json("messages", "drain", **bo)["messages"]
    assert [one["id"] for one in drained] == [more[0]["message_id"]]
    for code, wrong in (
        (4, f"default/bo/{new['id']}"),
        (3, "default/bo/none"),
        (2, "default/b o/x"),
        (2, "1/2/3/4"),
    ):
        done = trunkline.call("dead-letters", "replay", wrong)
        assert (done.returncode, done.stdout) == (code, ""), (wrong, done.stderr)
    assert trunkline.call("dead-letters", "replay", address, TRUNKLINE_TOKEN=add(hub, "eve")).returncode == 4


def test_the_statuses_of_the_option_are_those_of_the_life_cycle() -> None:
    assert set(STATUSES) == set(MESSAGE_TRANSITIONS)
