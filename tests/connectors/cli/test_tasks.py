"""`trunkline tasks` and `trunkline tokens` with a real gateway, which really launches the agent `echo`."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from tests.broker_processes import ProgramProcess, wait_until
from tests.connectors.cli.conftest import CommandLine, json_of, read_line, recycled

HOSTILE = "red bidi \u202e zero\u200b"


@pytest.mark.requirement("HH-03")
@pytest.mark.requirement("HH-04")
@pytest.mark.requirement("HH-05")
def test_a_task_is_submitted_shown_and_cancelled_and_its_token_is_told_only_when_asked_for(
    hub: GatewayClient, trunkline: CommandLine, echo: str
) -> None:
    submit = ("tasks", "submit", echo, f"answer Ann {HOSTILE}", "--request-id", "r-1")
    done = trunkline.run(*submit)
    assert (done.returncode, done.stderr) == (0, "")
    told = trunkline.json(*submit)
    task, token = told["task"]["id"], told["token"]
    assert done.stdout.splitlines()[0] == f"task   {task}"
    assert "--request-id r-1 --show-token" in done.stdout
    assert token not in done.stdout
    assert token in trunkline.call(*submit, "--show-token").stdout
    assert trunkline.call("tasks", "submit", echo, "else", "--request-id", "r-1").returncode == 4
    shown = trunkline.call("tasks", "show", task)
    assert "answer Ann red bidi \\u202e zero\\u200b" in shown.stdout
    listed = trunkline.call("tasks", "list", "--status", "running", "--agent", echo)
    assert task in listed.stdout
    assert trunkline.json("tasks", "list")["total"] == 1
    tokens = trunkline.call("tokens", "list", "--status", "active")
    (row,) = tokens.stdout.splitlines()[1:]
    token_id, state, _, left, *others = row.split()
    assert (token_id, state, left[-1]) == (told["task"]["token_id"], "active", "m")
    assert others == [echo, task, "answer", "-"]
    assert token not in shown.stdout + listed.stdout + tokens.stdout
    wait_until(lambda: "monitoring" in trunkline.call("tasks", "containers").stdout, what="the launch")
    (container,) = trunkline.json("tasks", "containers")["containers"]
    assert (container["task_id"], container["state"]) == (task, "monitoring")
    cancelled = trunkline.call("tasks", "cancel", task, "--reason", "lunch")
    assert (cancelled.returncode, cancelled.stdout) == (0, f"task {task} is cancelled\n")
    row = trunkline.json("tasks", "show", task)
    assert (row["status"], row["error"]) == ("cancelled", "lunch")
    again = trunkline.call("tasks", "cancel", task)
    assert (again.returncode, "after_terminal" in again.stderr) == (4, True)
    assert trunkline.call("tokens", "list", "--status", "active").returncode == 3
    assert trunkline.json("tokens", "list", "--status", "revoked")["total"] == 1
    wait_until(lambda: recycled(hub), 40, "the end of what was launched")


@pytest.mark.requirement("HH-04")
@pytest.mark.requirement("CM-06")
def test_a_task_is_completed_with_a_result_from_standard_input_or_failed_with_an_error(
    trunkline: CommandLine, echo: str
) -> None:
    first, second = (trunkline.json("tasks", "submit", echo, text)["task"]["id"] for text in ("a", "b"))
    done = trunkline.run("tasks", "complete", first, "--result", "-", "--json", stdin=f"two\nlines {HOSTILE}\n")
    assert json_of(done)["result"] == f"two\nlines {HOSTILE}"
    assert "result        two\\nlines red bidi \\u202e" in trunkline.call("tasks", "show", first).stdout
    failed = trunkline.call("tasks", "fail", second, "the mail is away")
    assert failed.stdout == f"task {second} is failed\n"
    table = trunkline.call("tasks", "list").stdout.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [[first, "completed"], [second, "failed"]]
    assert table[2].endswith("the mail is away")
    assert "1 of 2" in trunkline.call("tasks", "list", "--limit", "1").stderr
    for nothing in (("--status", "running"), ("--agent", "flaky")):
        assert trunkline.call("tasks", "list", *nothing).returncode == 3
        assert trunkline.json("tasks", "list", *nothing) == {"tasks": [], "total": 0, "left": 0}
    too_long = trunkline.run("tasks", "complete", second, "--result", "-", stdin="x" * 300_000)
    assert (too_long.returncode, "--result: longer than" in too_long.stderr) == (2, True)


@pytest.mark.requirement("HH-04")
@pytest.mark.requirement("HH-12")
def test_what_does_not_exist_is_exit_3_and_what_is_no_name_is_exit_2(trunkline: CommandLine, echo: str) -> None:
    stranger = "00000000-0000-4000-8000-000000000000"
    endings = (("complete",), ("fail", "why"), ("cancel",))
    for action, *more in (("show",), *endings):
        assert trunkline.call("tasks", action, stranger, *more).returncode == 3
        assert trunkline.call("tasks", action, "../agents", *more).returncode == 2
    assert trunkline.call("tasks", "submit", "stranger", "x").returncode == 3
    assert trunkline.call("tasks", "submit", echo, " ").returncode == 4
    assert trunkline.call("tasks", "submit", echo, "x", "--request-id", "two words").returncode == 2
    assert trunkline.call("tokens", "revoke", "0" * 12).returncode == 3
    assert trunkline.call("tasks", "containers").returncode == 3


@pytest.mark.requirement("HH-02")
def test_a_revoked_token_locks_its_agent_out_while_the_task_goes_on(trunkline: CommandLine, echo: str) -> None:
    told = trunkline.json("tasks", "submit", echo, "x")
    task, token, token_id = told["task"]["id"], told["token"], told["task"]["token_id"]
    assert trunkline.json("tasks", "show", task, TRUNKLINE_TOKEN=token)["status"] == "running"
    given = trunkline.call("tokens", "revoke", token)
    assert given.returncode == 2
    assert token not in given.stderr
    done = trunkline.call("tokens", "revoke", token_id, "--reason", "it was in a log")
    assert (done.returncode, done.stdout) == (0, f"token {token_id} of task {task} is revoked\n")
    assert trunkline.json("tokens", "revoke", token_id)["revoked_why"] == "it was in a log"
    locked_out = trunkline.call("tasks", "show", task, TRUNKLINE_TOKEN=token)
    assert locked_out.returncode == 4
    assert token not in locked_out.stderr
    assert "it was in a log" in trunkline.call("tokens", "list").stdout


@pytest.mark.requirement("HH-06")
@pytest.mark.requirement("HH-07")
def test_waiting_ends_as_the_task_does_with_its_result_and_the_agent_answers_meanwhile(
    hub: GatewayClient, trunkline: CommandLine, echo: str
) -> None:
    waiting = trunkline.start("tasks", "submit", echo, "answer Ann", "--wait", "60")
    read_line(waiting, "token")
    assert trunkline.call("messages", "send", echo, "ask", "--text", "what time is it?").returncode == 0
    answer = wait_until(lambda: trunkline.json("messages", "drain")["messages"], 40, "the agent's answer")
    assert [(m["sender"], m["type"]) for m in answer] == [(echo, "answer")]
    assert answer[0]["payload"]["text"] == "echo was asked: what time is it?"
    assert trunkline.call("messages", "send", echo, "finish").returncode == 0
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, err) == (0, "")
    assert out.splitlines() == ["state  completed", "result answered 1"]
    wait_until(lambda: recycled(hub), 40, "the end of what was launched")


@pytest.mark.requirement("HH-04")
def test_waiting_for_a_task_that_fails_or_takes_too_long_or_until_ctrl_c(
    hub: GatewayClient, trunkline: CommandLine, echo: str, sent: Any
) -> None:
    submit = ("tasks", "submit", echo, "x", "--request-id", "r-1")
    late = trunkline.call(*submit, "--wait", "0.2", "--json")
    told = json.loads(late.stdout)
    task = told["task"]["id"]
    assert (late.returncode, told["task"]["status"]) == (1, "running")
    assert "runs on" in late.stderr
    waiting = trunkline.start(*submit, "--wait", "60")
    read_line(waiting, "token")
    sent(waiting, signal.SIGINT)
    _, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    assert f"task {task} runs on; nothing was cancelled" in err
    assert f"trunkline tasks cancel {task}" in err
    assert hub.get(path_of("tasks", task))["status"] == "running"
    again = trunkline.start(*submit, "--wait", "60")
    read_line(again, "token")
    hub.post(path_of("tasks", task, "fail"), {"error": f"it is {HOSTILE}"})
    out, err = again.communicate(timeout=30)
    assert (again.returncode, out) == (4, "")
    assert f"task {task} is failed: it is red bidi \\u202e" in err


@pytest.mark.requirement("HH-10")
def test_waiting_outlives_a_gateway_that_is_killed(
    gateway: ProgramProcess, next_gateway: Any, hub: GatewayClient, trunkline: CommandLine, echo: str
) -> None:
    waiting = trunkline.start("tasks", "submit", echo, "x", "--wait", "100", "--show-token")
    task = read_line(waiting, "task").split()[1]
    read_line(waiting, "token")
    gateway.stop(signal.SIGKILL)
    assert waiting.stderr is not None
    assert f"task {task} is still waited for" in waiting.stderr.readline()
    next_gateway()
    hub.post(path_of("tasks", task, "complete"), {"result": "all green"})
    out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, out.splitlines()) == (0, ["state  completed", "result all green"])
    wait_until(lambda: recycled(hub), 40, "the end of what was launched")


@pytest.mark.requirement("HH-12")
def test_without_a_gateway_the_exit_code_is_5_and_what_may_have_happened_can_be_told_again(
    trunkline: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.plumbing.gateway_client.gateway_client._RETRY_WAITS_S", ())
    commands = {
        ("agents", "list"): False,
        ("tokens", "list"): False,
        ("tasks", "submit", "echo", "x"): True,
        ("messages", "send", "echo", "ask"): True,
        ("messages", "drain"): True,
    }
    for arguments, can_be_sent_again in commands.items():
        done = trunkline.call(*arguments)
        assert (done.returncode, done.stdout) == (5, "")
        assert "trunkline up" in done.stderr
        assert ("--request-id" in done.stderr) is can_be_sent_again
