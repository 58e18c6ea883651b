"""`trunkline-agent` at a real gateway, as a user types its subcommands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import HubStack
from tests.forked_programs import forked_command
from tests.programs import start_program
from trunkline_agent.agent import Agent
from trunkline_agent.command import run_command
from trunkline_agent.command.child_program import Limits
from trunkline_agent.command.main import main
from trunkline_agent.command.stop_signals import StopSignals
from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import BackboneUnreachable

Call = Callable[..., tuple[int, str, str]]
Join = Callable[[], tuple[str, str]]


@pytest.fixture
def join(hub: HubStack, tmp_path: Path) -> Join:
    """Makes an agent; returns its name and the path of its credentials."""

    def made() -> tuple[str, str]:
        name, token = hub.principal("worker")
        file = tmp_path / f"{name}.json"
        Credentials(name, HubAccess(hub.gateways[0].url, token)).save(file)
        return name, str(file)

    return made


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command line in this process; returns its exit code and what it printed."""

    def run(*arguments: str, stdin: str = "", **environment: str) -> tuple[int, str, str]:
        reading, writing = os.pipe()
        os.write(writing, stdin.encode())
        os.close(writing)
        with monkeypatch.context() as patch, os.fdopen(reading) as source:
            patch.setattr(sys, "stdin", source)
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                code = main(arguments)
            except SystemExit as ended:
                code = int(str(ended.code))
        return (code, *capfd.readouterr())

    return run


def pending(hub: HubStack, name: str) -> list[dict[str, object]]:
    """The messages in a mailbox that wait or are leased."""
    found = hub.operator.get(f"/api/hub/mailboxes/default/{name}", params={"pending": True}).json()
    return list(found["messages"])


@pytest.mark.requirement("AG-87")
def test_a_message_is_sent_printed_and_acknowledged(hub: HubStack, join: Join, call: Call) -> None:
    (ann, at_ann), (bo, at_bo) = join(), join()
    code, sent, complaint = call("send", bo, "ask", '{"n": 1}', "--credentials", at_ann)
    assert (code, complaint) == (0, "")
    again = [
        call("send", bo, "ask", "--text", "-", "--key", "k", stdin="two\x1b[1m\n", TRUNKLINE_CREDENTIALS=at_ann)
    ]
    again.append(
        call("send", bo, "ask", "--text", "two\x1b[1m", "--key", "k", "--credentials", at_ann, "--json")
    )
    assert again[0][1].strip() == json.loads(again[1][1])["message_id"] != sent.strip()
    looked = call("receive", "--no-ack", "--credentials", at_bo)
    assert looked[1] == f'{ann}  ask  {{"n": 1}}\n{ann}  ask  two\\x1b[1m\n'
    code, printed, _ = call("receive", "--count", "1", "--json", "--credentials", at_bo)
    message = json.loads(printed)
    assert (code, message["id"], message["from"], message["payload"]) == (0, sent.strip(), ann, {"n": 1})
    assert call("receive", "--credentials", at_bo)[0] == 0
    assert call("receive", "--credentials", at_bo) == (
        3,
        "",
        "trunkline-agent: no message was there\n",
    )
    assert pending(hub, bo) == []


@pytest.mark.requirement("AG-87")
def test_an_asked_agent_that_is_a_program_answers(hub: HubStack, join: Join, call: Call) -> None:
    (_, at_ann), (bo, at_bo) = join(), join()
    done: list[subprocess.CompletedProcess[str]] = []

    def answer() -> None:
        command = ["run", "--input", "body", "--count", "1", "--credentials", at_bo, "--", "tr", "a-z", "A-Z"]
        program = [sys.executable, "-m", "trunkline_agent.command", *command]
        done.append(subprocess.run(program, capture_output=True, text=True, timeout=60, check=False))

    thread = threading.Thread(target=answer)
    thread.start()
    found = call("ask", bo, "ask", "--text", "hello", "--timeout", "50", "--credentials", at_ann)
    thread.join()
    assert found == (0, "HELLO\n", "")
    assert (done[0].returncode, done[0].stdout, done[0].stderr) == (0, "", "")
    assert pending(hub, bo) == []
    code, _, complaint = call("ask", bo, "ask", "--timeout", "0.5", "--json", "--credentials", at_ann)
    assert (code, json.loads(complaint)["error"]["reason"]) == (5, "no_reply")


@pytest.mark.requirement("AG-88")
def test_the_exit_code_of_a_program_acknowledges_its_message_or_gives_it_back(
    hub: HubStack, join: Join, call: Call, tmp_path: Path
) -> None:
    (_, at_ann), (bo, at_bo) = join(), join()
    call("send", bo, "ask", '{"n": 1}', "--thread", "t", "--credentials", at_ann)
    seen = tmp_path / "seen"
    script = f'cat >>{seen}; env >{tmp_path}/env; test "$TRUNKLINE_MESSAGE_THREAD" = t && exit 3'
    run = ("run", "--wait", "0", "--count", "1", "--credentials", at_bo, "--json")
    secrets = {"TRUNKLINE_AGENT_TOKEN": "secret", "MQTT_PASSWORD": "secret"}
    code, shown, _ = call(*run, "--", "sh", "-c", script, **secrets)
    assert (code, json.loads(shown)["fault"]) == (0, "exit code 3")
    assert "secret" not in (tmp_path / "env").read_text()
    (waiting,) = pending(hub, bo)
    assert (waiting["attempts"], waiting["last_reason"]) == (1, "exit code 3")
    slow = json.loads(call(*run, "--timeout", "0.2", "--", "sleep", "9")[1])
    loud = json.loads(call(*run, "--output-limit", "9", "--", "seq", "99")[1])
    assert (slow["fault"], loud["fault"]) == ("not done within 0.2 s", "more than 9 bytes of output")
    # The output of a program is JSON only if it says so, and no reply is sent for none.
    assert json.loads(call(*run, "--reply", "json", "--", "echo", "{")[1])["fault"] == "its output is no JSON"
    assert json.loads(call(*run, "--reply", "json", "--", "echo", "[1]")[1])["fault"] is None
    assert pending(hub, bo) == []
    given = json.loads(seen.read_text())
    assert (given["payload"], given["thread"], given["attempt"]) == ({"n": 1}, "t", 1)
    with Agent(None, at_ann) as agent:
        (reply,) = list(agent.messages(wait_s=0))
        assert (reply.payload, reply.in_reply_to) == ([1], given["id"])
    call("send", bo, "ask", "--credentials", at_ann)
    assert call(*run, "--", "true")[0] == 0
    assert call("receive", "--credentials", at_ann)[0] == 3


@pytest.mark.requirement("AG-89")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_program_first_and_its_message_is_given_back(
    hub: HubStack, join: Join, call: Call, tmp_path: Path, number: int, code: int
) -> None:
    (_, at_ann), (bo, at_bo) = join(), join()
    call("send", bo, "ask", "--credentials", at_ann)
    began, tidied = tmp_path / "began", tmp_path / "tidied"
    script = f"trap 'touch {tidied}; exit 0' TERM; touch {began}; while :; do sleep 0.05; done"
    process = start_program(
        [*forked_command("trunkline_agent.command"), "run", "--credentials", at_bo, "--", "sh", "-c", script],
        env={"PATH": os.environ["PATH"]},
    )
    try:
        wait_until(began.exists, what="the program's begin")
        process.send_signal(number)
        _, complaint = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, tidied.exists()) == (code, True)
    assert "ended because of" in complaint
    (waiting,) = pending(hub, bo)
    assert (waiting["status"], waiting["attempts"]) == ("unread", 1)
    # While it waits for a message, a signal ends it at once.
    call("receive", "--credentials", at_bo)
    process = start_program(
        [*forked_command("trunkline_agent.command"), "receive", "--wait", "60", "--credentials", at_bo],
        env={"PATH": os.environ["PATH"]},
    )
    call("send", bo, "ask", "--text", "now", "--credentials", at_ann)
    assert process.stdout is not None
    assert "now" in process.stdout.readline()
    process.send_signal(number)
    assert process.wait(10) == code
    process.communicate()


@pytest.mark.requirement("AG-85")
def test_wrong_usage_is_told_with_an_exit_code_and_secrets_are_no_arguments(
    join: Join, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, at_ann = join()
    for name in ("TRUNKLINE_CREDENTIALS", "TRUNKLINE_HUB_URL", "TRUNKLINE_AGENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    to_nobody = call("send", "nobody-there", "ask", "--credentials", at_ann)
    assert (to_nobody[0], "nobody-there" in to_nobody[2] or "recipient" in to_nobody[2]) == (3, True)
    for wrong, code, text in (
        (("receive",), 2, "TRUNKLINE_CREDENTIALS"),
        (("receive", "--credentials", str(tmp_path / "none")), 3, "agents join"),
        (("send", "a", "b", "{", "--credentials", at_ann), 2, "--text"),
        (("send", "a", "b", "{}", "--text", "x", "--credentials", at_ann), 2, "not both"),
        (("run", "--credentials", at_ann), 2, "behind --"),
        (("run", "--credentials", at_ann, "--", "no-such-program"), 2, "no program"),
        (("run", "--over", "mqtt", "--credentials", at_ann, "--", "true"), 2, "belong to --job"),
        (("receive", "--credentials", at_ann, "--", "true"), 2, "only 'run'"),
        (("receive", "--wait", "soon"), 2, "expected a time such as"),
        ((), 2, "COMMAND"),
    ):
        found = call(*wrong)
        assert (found[0], found[1]) == (code, ""), found
        assert text in found[2]
    code, shown, _ = call("--help")
    assert (code, "examples:" in shown, "--token" in shown) == (0, True, False)


class TheJob(NamedTuple):
    """A registered job, and what a command for it needs."""

    id: str
    secret_file: Path
    options: tuple[str, ...]
    environment: dict[str, str]


@pytest.fixture
def job(hub: HubStack, tmp_path: Path) -> TheJob:
    """A job, and the credentials of the delegator that registered it."""
    name, token = hub.principal("delegator")
    answer = hub.client(token).post("/api/hub/jobs", json={"description": "count"})
    found = answer.raise_for_status().json()
    file, secret = tmp_path / f"{name}.json", tmp_path / "job.secret"
    Credentials(name, HubAccess(hub.gateways[0].url, token)).save(file)
    secret.touch(0o600)
    secret.write_text(found["secret"] + "\n")
    environment = {
        "TRUNKLINE_CREDENTIALS": str(file),
        "TRUNKLINE_JOB_ID": found["job_id"],
        "TRUNKLINE_JOB_SECRET": found["secret"],
    }
    return TheJob(found["job_id"], secret, ("--state-dir", str(tmp_path / "state")), environment)


def events(hub: HubStack, job_id: str) -> list[tuple[str, str]]:
    """The events of a job: type and text."""
    bodies = [one.body for one in hub.log() if one.stream == f"job/{job_id}"]
    return [(body["event"], body["detail"]) for body in bodies if "event" in body]


@pytest.mark.requirement("AG-86")
def test_events_are_published_with_a_secret_from_the_environment_or_a_file(
    hub: HubStack, job: TheJob, call: Call, tmp_path: Path
) -> None:
    code, shown, complaint = call("publish", "started", *job.options, **job.environment)
    assert (code, complaint) == (0, "")
    assert shown.split()[1] == "accepted"
    named = ("--job", job.id, "--secret-file", str(job.secret_file), *job.options)
    door = ("--credentials", job.environment["TRUNKLINE_CREDENTIALS"])
    code, shown, _ = call(
        "publish", "progress", "-", "--data", '{"n": 1}', "--json", *named, *door, stdin="half\n"
    )
    assert (code, json.loads(shown)["seq"], json.loads(shown)["verdict"]) == (0, 2, "accepted")
    assert call("publish", "permission-required", "write to disk", *named, *door)[0] == 0
    assert call("publish", "completed", *named, *door)[0] == 0
    assert call("publish", "progress", "late", *named, *door)[0] == 2
    assert events(hub, job.id) == [
        ("started", ""),
        ("progress", "half"),
        ("permission_required", "write to disk"),
        ("completed", ""),
    ]
    job.secret_file.chmod(0o644)
    code, _, complaint = call("publish", "progress", *named, *door)
    assert (code, "chmod 600" in complaint) == (2, True)
    assert call("publish", "progress", "--job", job.id, *door)[0] == 2
    assert call("publish", "progress", *job.options, "--over", "mqtt", **job.environment)[0] == 2


@pytest.mark.requirement("AG-90")
def test_a_program_that_is_a_job_reports_its_lines_and_its_end(hub: HubStack, job: TheJob, call: Call) -> None:
    secret = "sk-" + "ant-api03-" + "abcdefgh" * 3
    script = f"echo one; printf 'two\\r\\n\\n'; echo token={secret}; printf end"
    run = ("run", "--job", *job.options, "--", "sh", "-c")
    code, shown, _ = call(*run, script + "; exit 4", **job.environment)
    assert code == 4
    assert shown.splitlines()[:2] == ["one", "two"]
    found = events(hub, job.id)
    assert found[0] == ("started", "runs sh")
    assert found[1:3] == [("progress", "one"), ("progress", "two")]
    assert found[-2:] == [("progress", "end"), ("error", "exit code 4")]
    assert not any("sk-ant" in text for _, text in found)
    assert call(*run, "true", **job.environment)[0] == 2


@pytest.mark.requirement("AG-90")
def test_a_signal_ends_the_program_of_a_job_and_then_the_job(
    hub: HubStack, job: TheJob, tmp_path: Path
) -> None:
    command = [*forked_command("trunkline_agent.command"), "run", "--job", *job.options, "--"]
    process = start_program(
        [*command, "sh", "-c", "echo begun; exec sleep 60"],
        env={"PATH": os.environ["PATH"], **job.environment},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    process.communicate()
    assert events(hub, job.id)[-1] == ("error", "ended because of SIGTERM")


class HubThatWasAway:
    """An agent whose hub does not answer at first."""

    def __init__(self) -> None:
        self.answers: list[Exception | None] = [BackboneUnreachable("away"), BackboneUnreachable("away"), None]

    def receive(self, *, wait_s: float | None, longest_s: float | None) -> None:
        if error := self.answers.pop(0):
            raise error


@pytest.mark.requirement("AG-88")
def test_the_loop_outlives_a_hub_that_is_away_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_command, "_AWAY_S", 0.0)
    agent = HubThatWasAway()
    with StopSignals() as stop:
        assert run_command._next(agent, 0.0, None, stop) is None  # type: ignore[arg-type]
    assert (agent.answers, capsys.readouterr().err.count("away")) == ([], 1)


class JobWhoseHubWasAway:
    """A job whose events cannot be confirmed at first."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def progress(self, text: str) -> None:
        self.texts.append(text)
        if len(self.texts) < 3:
            raise BackboneUnreachable("away")


@pytest.mark.requirement("AG-90")
def test_a_hub_that_is_away_ends_no_program_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobWhoseHubWasAway()
    lines = run_command._Lines(job)  # type: ignore[arg-type]
    for piece in (b"o", b"ne\ntwo\n", b"three\n", b"x" * 20_000, b"end"):
        lines.take(piece)
    lines.end()
    assert job.texts == ["one", "two", "three", "x" * 500, "end"]
    assert capsys.readouterr().err.count("away") == 1


@pytest.mark.requirement("AG-99")
@pytest.mark.parametrize(
    ("given", "time_s", "longest_s"),
    [([], 3600.0, 3670.0), (["--timeout", "0"], None, None), (["--timeout", "5"], 5.0, 75.0)],
)
def test_a_run_for_a_message_has_an_hour_unless_another_time_is_given(
    monkeypatch: pytest.MonkeyPatch, given: list[str], time_s: float | None, longest_s: float | None
) -> None:
    seen: list[Limits] = []

    def run_for_messages(_: object, limits: Limits) -> int:
        seen.append(limits)
        return 0

    monkeypatch.setattr(run_command, "run_for_messages", run_for_messages)
    assert main(["run", *given, "--", "true"]) == 0
    assert [one.time_s for one in seen] == [time_s]
    assert run_command._longest_s(seen[0]) == longest_s
