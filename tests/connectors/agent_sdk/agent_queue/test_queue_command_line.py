"""`trunkline queue` and `zos-mq`: options, exit codes, what it prints and what it imports (FQ-11, FQ-14)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.broker_processes import wait_until
from tests.connectors.agent_sdk.agent_queue.queue_process import PROJECT_ROOT
from trunkline_agent.queue.command_line import main

pytestmark = pytest.mark.long

TIMEOUT_S = 30
LIMIT = 3.0
PAIRS = 20


def run(*command: object, **options: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a program."""
    options = {"stdin": subprocess.DEVNULL, **options} if "input" not in options else options
    done = subprocess.run(
        [str(part) for part in command],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": TIMEOUT_S, **options},
    )
    return done.returncode, done.stdout or "", done.stderr or ""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The wrapper and the modules of the queue alone, in a folder with a space, with this interpreter."""
    folder = tmp_path / "a checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    shutil.copy(PROJECT_ROOT / "trunkline", folder / "trunkline")
    package = "connectors/agent_sdk/trunkline_agent"
    (folder / package / "wire").mkdir(parents=True)
    for module in ("__init__.py", "wire/__init__.py", "wire/message_fields.py"):
        shutil.copy(PROJECT_ROOT / package / module, folder / package / module)
    shutil.copytree(PROJECT_ROOT / package / "queue", folder / package / "queue")
    return folder


@pytest.mark.requirement("FQ-14")
def test_a_message_goes_the_whole_way_by_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(tmp_path / "q")]

    def said(*arguments: str) -> str:
        assert main([*root, *arguments]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        return out

    options = [
        "--to",
        "bo",
        "--sender",
        "ann",
        "--reply-to",
        "m1",
        "--thread",
        "t1",
        "--ttl-s",
        "60",
        "--session",
        "s",
    ]
    msg_id = said("send", "--topic", "ask", "--body", "é\x9b", *options).strip()
    other = said("send", "--topic", "status", "--body", "b" * 4000, "--session", "s", "--ttl-s", "0.5").strip()
    third = said("send", "--topic", "answer", "--body", "", "--session", "s", "--ttl-s", "0.001").strip()
    text = said("tail", "--session", "s", "-n", "5", "--include-expired")
    assert "\x9b" not in text and "é" in text
    tail = [json.loads(line) for line in text.splitlines()]
    assert [m["msg_id"] for m in tail] == [msg_id, other, third]
    assert (tail[0]["body"], tail[0]["ttl_s"], tail[1]["_body_source"]) == ("é\x9b", 60, "side-file")
    polled = said("poll", "--agent-id", "bo", "--session", "s", "--topic", "ask", "--topic", "answer")
    assert [json.loads(line) for line in polled.splitlines()] == tail[:1]
    assert (tail[0]["in_reply_to"], tail[0]["thread"], "thread" in tail[1]) == ("m1", "t1", False)
    assert said("poll", "--agent-id", "bo", "--session", "s") == ""
    assert said("expire", "--session", "s") in ("1\n", "2\n")
    assert json.loads(said("status", "--session", "s"))["sessions"]["s"]["cursors"]["bo"] > 0
    assert sorted(json.loads(said("status"))["sessions"]) == ["s"]


@pytest.mark.requirement("FQ-14")
def test_tail_shows_ten_by_default(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        assert main(["--root", str(tmp_path / "q"), "send", "--topic", "ask", "--body", str(number)]) == 0
    capfd.readouterr()
    assert main(["--root", str(tmp_path / "q"), "tail"]) == 0
    assert [json.loads(line)["body"] for line in capfd.readouterr().out.splitlines()] == list(
        map(str, range(2, 12))
    )


@pytest.mark.requirement("FQ-14")
@pytest.mark.parametrize("option", [[], ["--body", "-"]])
@pytest.mark.parametrize(
    ("given", "code"), [(b"two\nlines\n", 0), (b"", 0), (b"\xff", 2), (b"x" * (16 * 1024 * 1024 + 1), 2)]
)
def test_the_body_comes_from_standard_input(
    checkout: Path, tmp_path: Path, option: list[str], given: bytes, code: int
) -> None:
    queue = [checkout / "trunkline", "queue", "--root", tmp_path / "q"]
    ended, _, err = run(*queue, "send", "--topic", "ask", *option, input=given, text=False)
    assert (ended, "Traceback" in str(err)) == (code, False)
    _, out, _ = run(*queue, "tail")
    assert [json.loads(line)["body"] for line in out.splitlines()] == ([given.decode()] if code == 0 else [])


@pytest.mark.requirement("FQ-14")
@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["nothing"], ["send"], ["send", "--topic", "x"], ["send", "--topic", "ask", "--to", "a b"]),
        *(
            ["send", "--topic", "ask", "--ttl-s", text]
            for text in ("x", "-1", "nan", "inf", "9" * 5000, "0", "367d")
        ),
        *(["poll"], ["poll", "--agent-id", "../x"], ["poll", "--agent-id", "a", "--topic", "x"]),
        *(["tail", "-n", text] for text in ("-1", "x", "1.5", "9" * 5000)),
        *(
            ["tail", "--session", ""],
            ["expire", "extra"],
            ["status", "--session", "a/b"],
            ["--root", "", "status"],
        ),
        *(["send", "--topic", "ask", "--body", "\udcff"], ["send", "--top", "ask"], ["--root"]),
    ],
)
def test_wrong_usage_is_two_with_a_reason_and_no_traceback(
    arguments: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and "trunkline queue" in err and "Traceback" not in err
    assert not (tmp_path / "data" / "trunkline" / "queue" / "sessions" / "default" / "messages.jsonl").exists()


@pytest.mark.requirement("FQ-14")
@pytest.mark.requirement("FQ-09")
def test_what_the_queue_cannot_do_is_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = ["send", "--topic", "ask", "--body", "x"]
    (tmp_path / "file\x1b").write_text("")
    assert main(["--root", str(tmp_path / "file\x1b"), *send]) == 1
    assert "\x1b" not in capfd.readouterr().err
    monkeypatch.setenv("TRUNKLINE_QUEUE_FSYNC", "maybe")
    assert main(send) == 1
    monkeypatch.setenv("TRUNKLINE_QUEUE_FSYNC", "1")
    monkeypatch.setenv("ZOS_MQ_DISABLED", "1")
    capfd.readouterr()
    assert main(send) == 1
    assert "switched off" in capfd.readouterr().err
    assert [main(["poll", "--agent-id", "ann"]), main(["expire"]), main(["tail"]), main(["status"])] == [0] * 4


@pytest.mark.requirement("FQ-10")
def test_a_missing_audit_line_is_a_warning_and_no_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q" / "audit.jsonl").mkdir(parents=True)
    assert main(["--root", str(tmp_path / "q"), "send", "--topic", "ask", "--body", "x"]) == 0
    out, err = capfd.readouterr()
    assert len(out) == 33 and "audit.jsonl was not written" in err


@pytest.mark.requirement("FQ-14")
@pytest.mark.parametrize("option", ["--agent", "--agent-id"])
def test_poll_takes_either_option_for_the_agent_and_several_topics(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    root = ["--root", str(tmp_path / "q")]
    for topic in ("ask", "status", "answer"):
        assert main([*root, "send", "--topic", topic, "--body", topic]) == 0
    capfd.readouterr()
    assert main([*root, "poll", option, "bo", "--topic", "ask", "--topic", "answer"]) == 0
    out = capfd.readouterr().out
    assert [json.loads(line)["topic"] for line in out.splitlines()] == ["ask", "answer"]


@pytest.mark.requirement("FQ-14")
def test_status_is_indented_json_and_one_line_with_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(tmp_path / "q\x9b")]
    assert main([*root, "send", "--topic", "ask", "--body", "x"]) == 0
    capfd.readouterr()
    assert main([*root, "status"]) == 0
    indented = capfd.readouterr().out
    assert main([*root, "status", "--json"]) == 0
    line = capfd.readouterr().out
    assert indented.startswith('{\n  "root": ') and indented.endswith("\n}\n")
    assert line.count("\n") == 1 and ": " not in line
    assert json.loads(indented) == json.loads(line)
    assert "\x9b" not in indented + line


@pytest.mark.requirement("FQ-14")
def test_the_help_teaches_and_knows_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    assert "examples:" in text and "Exit codes: 0 ok" in text
    for command in ("send", "poll", "tail", "expire", "status"):
        assert command in text
        assert main([command, "--help"]) == 0
        assert "--session" in capfd.readouterr().out


@pytest.mark.requirement("FQ-14")
def test_the_examples_of_the_help_are_accepted(capfd: pytest.CaptureFixture[str]) -> None:
    from trunkline_agent.queue import command_line

    lines = [line.strip() for line in command_line._EPILOG.splitlines() if line.startswith("  ")]
    parser = command_line.parser()
    import shlex

    for line in lines:
        words = shlex.split(line)
        start = words.index("queue") + 1
        stop = words.index("|", start) if "|" in words[start:] else len(words)
        assert parser.parse_args(words[start:stop]).command in ("send", "poll", "tail")


@pytest.mark.requirement("FQ-14")
def test_control_c_ends_quietly_with_130(checkout: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [checkout / "trunkline", "queue", "--root", tmp_path / "q", "send", "--topic", "ask"],
        stdin=reading,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(reading)
    os.write(writing, b"x" * 10)
    # It has read what there is, and waits for more. (The shell that starts it reads from pipes, too.)
    wait_until(lambda: drained(writing))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    os.close(writing)
    assert (process.returncode, out, err) == (130, b"", b"")


def drained(writing: int) -> bool:
    """True if whoever has the other end of a pipe has read all of it."""
    import array
    import fcntl
    import termios

    size = array.array("i", [0])
    fcntl.ioctl(writing, termios.FIONREAD, size)
    return size[0] == 0


@pytest.mark.requirement("FQ-14")
@pytest.mark.parametrize("arguments", [["tail", "-n", "5"], ["--help"], ["status"]])
def test_a_reader_that_has_gone_is_no_error(checkout: Path, tmp_path: Path, arguments: list[str]) -> None:
    main(["--root", str(tmp_path / "q"), "send", "--topic", "ask", "--body", "x"])
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        ended = run(checkout / "trunkline", "queue", "--root", tmp_path / "q", *arguments, stdout=closed)
    assert ended == (0, "", "")


@pytest.mark.requirement("FQ-14")
def test_an_output_that_takes_nothing_is_an_error_without_a_traceback(checkout: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        code, _, err = run(checkout / "trunkline", "queue", "--root", tmp_path / "q", "status", stdout=full)
    assert code == 1 and "No space left" in err and "Traceback" not in err


@pytest.mark.requirement("FQ-11")
def test_the_older_command_name_is_a_link_that_works_from_anywhere(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "zos-mq").symlink_to(checkout / "trunkline")
    (tmp_path / "bin" / "trunk").symlink_to("zos-mq")
    (tmp_path / "here" / "connectors").mkdir(parents=True)
    (tmp_path / "here" / "json.py").write_text("raise SystemExit('not the json of Python')")
    there: dict[str, Any] = {"cwd": tmp_path / "here", "env": {**os.environ, "ZOS_MQ_ROOT": "mq"}}
    code, msg_id, err = run("../bin/zos-mq", "send", "--topic", "ask", "--body", "x", **there)
    assert (code, err) == (0, "")
    code, out, err = run("../bin/trunk", "queue", "tail", **there)
    assert (code, json.loads(out)["msg_id"], err) == (0, msg_id.strip(), "")
    assert (tmp_path / "here" / "mq" / "sessions").is_dir()
    code, out, _ = run(
        "zos-mq",
        "poll",
        "--agent-id",
        "ann",
        **there | {"env": {**there["env"], "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}},
    )
    assert (code, json.loads(out)["msg_id"]) == (0, msg_id.strip())


@pytest.mark.requirement("FQ-14")
def test_without_any_set_up_a_python_in_the_path_is_enough(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    (tmp_path / "bin").mkdir()
    base = Path(sys.executable).resolve()
    (tmp_path / "bin" / "python3").symlink_to(base)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    send = [checkout / "trunkline", "queue", "send", "--topic", "ask", "--body", "x"]
    code, out, err = run(*send, env=environment)
    assert (code, len(out), err) == (0, 33, "")
    assert (tmp_path / ".local/share/trunkline/queue/audit.jsonl").exists()
    assert not (checkout / ".venv").exists() and not (checkout / ".jars").exists()
    code, _, err = run(*send, env={**environment, "TRUNKLINE_PYTHON": "no-such-python"})
    assert code == 1 and "needs Python 3.11" in err and "no-such-python" in err


@pytest.mark.requirement("FQ-14")
def test_an_older_python_is_told_by_its_version(checkout: Path, tmp_path: Path) -> None:
    # No older one is here: the wrapper's own program runs with a version number that says so.
    (checkout / ".venv" / "bin" / "python").unlink()
    older = "import sys; sys.version_info = (3, 10); exec(sys.argv.pop(1))"
    program = f'exec {shlex.quote(sys.executable)} -I -S -c "{older}" "$@"'
    (checkout / ".venv" / "bin" / "python").write_text(f"#!/bin/sh\nshift 3\n{program}\n")
    (checkout / ".venv" / "bin" / "python").chmod(0o755)
    code, out, err = run(checkout / "trunkline", "queue", "status")
    assert (code, out) == (1, "")
    assert err.startswith("trunkline: the queue needs Python 3.11 or newer")


@pytest.mark.requirement("FQ-14")
def test_the_queue_imports_nothing_but_the_standard_library(checkout: Path, tmp_path: Path) -> None:
    program = """
import sys
sys.path.append(sys.argv[1])
from trunkline_agent.queue import Queue
from trunkline_agent.queue.command_line import main
queue = Queue(sys.argv[2], body_threshold=0)
queue.send("ask", "x", ttl_s=0.001)
queue.poll("ann"), queue.tail(include_expired=True), queue.status(), queue.expire(), queue.root
main(["--root", sys.argv[2], "expire"])
names = {name.partition(".")[0] for name in sys.modules}
print(sorted(names - sys.stdlib_module_names - {"__main__"}), file=sys.stderr)
print(sorted(n for n in sys.modules if n.startswith("trunkline") and ".queue" not in n), file=sys.stderr)
"""
    # The whole library is on the path: modules that the package itself imports would show.
    command = [sys.executable, "-I", "-S", "-c", program, PROJECT_ROOT / "connectors/agent_sdk", tmp_path / "q"]
    code, _, err = run(*command)
    names = ["trunkline_agent", "trunkline_agent.wire", "trunkline_agent.wire.message_fields"]
    assert (code, err) == (0, f"['trunkline_agent']\n{names}\n")


@pytest.mark.requirement("FQ-14")
def test_a_send_takes_at_most_three_times_the_start_of_an_interpreter(checkout: Path, tmp_path: Path) -> None:
    # The real environment, as a user has it; beside it a twin that starts the same Python for nothing.
    shutil.rmtree(checkout / ".venv")
    (checkout / ".venv").symlink_to(Path(sys.prefix))
    text = (checkout / "trunkline").read_text()
    start = text.index('  exec "$python" -I -S -c \'')
    stop = text.index('"$library" "$@"\n', start) + len('"$library" "$@"\n')
    (checkout / "nothing").write_text(text[:start] + '  exec "$python" -c pass\n' + text[stop:])
    (checkout / "nothing").chmod(0o755)
    arguments = ["queue", "--root", tmp_path / "q", "send", "--topic", "ask", "--body", "x"]

    def took(program: str) -> float:
        start_s = time.perf_counter()
        assert run(checkout / program, *arguments)[0] == 0
        return time.perf_counter() - start_s

    took("trunkline"), took("nothing")
    pairs = [(took("trunkline"), took("nothing")) for _ in range(PAIRS)]
    sends, starts = (statistics.median(column) for column in zip(*pairs, strict=True))
    assert sends <= LIMIT * starts
