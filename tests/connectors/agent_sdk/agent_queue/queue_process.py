"""A file queue in a process of its own, that kills itself where a test wants it to, or stops for a while.

`python -m tests.connectors.agent_sdk.agent_queue.queue_process ROOT OPERATION KILL_AT NTH [ARGUMENT]`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from trunkline_agent.queue import Queue

PROJECT_ROOT = Path(__file__).resolve().parents[4]
WRITES = {
    "half_a_line": "messages.jsonl",
    "half_a_copy": ".messages.jsonl.new",
    "half_a_cursor": ".cursor.new",
    "half_a_side_file": ".txt",
    "half_a_delayed_message": ".json.new",
}
STOP_AT = "stop_at_"


def queue_process(*arguments: object) -> subprocess.Popen[str]:
    """Start this program."""
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "tests.connectors.agent_sdk.agent_queue.queue_process",
            *map(str, arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def killed(root: Path, operation: str, kill_at: str, nth: int = 1) -> str:
    """Run an operation until it kills itself at the nth time of a step; what it had printed."""
    process = queue_process(root, operation, kill_at, nth)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, (operation, kill_at, process.returncode)
    return said


@contextmanager
def stopped(root: Path, operation: str, stop_at: str) -> Iterator[subprocess.Popen[str]]:
    """An operation that has stopped itself at a step; a SIGCONT lets it go on. It ends with the context."""
    process = queue_process(root, operation, STOP_AT + stop_at, 1)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), (operation, stop_at, status)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def _kill_in_a_write(part: str) -> None:
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name.endswith(part):
            write(fd, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, data)

    os.write = half


def _kill_before_a_replace(name: str) -> None:
    replace = os.replace

    def never(old: str, new: str, **folders: int) -> None:
        if new.endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(old, new, **folders)

    os.replace = never


def _main(root: str, operation: str, kill_at: str, nth: str, *rest: str) -> None:
    seen = 0
    sent = signal.SIGSTOP if kill_at.startswith(STOP_AT) else signal.SIGKILL
    kill_at = kill_at.removeprefix(STOP_AT)

    def step(name: str) -> None:
        nonlocal seen
        seen += name == kill_at
        if name == kill_at and seen == int(nth):
            os.kill(os.getpid(), sent)

    if kill_at in WRITES:
        _kill_in_a_write(WRITES[kill_at])
    elif kill_at.startswith("before_replacing_"):
        _kill_before_a_replace(kill_at.removeprefix("before_replacing_"))
    queue = Queue(root, step=step)
    if operation == "send":
        print(queue.send("ask", "killed" * 1000), flush=True)
    elif operation == "send small":
        print(queue.send("ask", "killed"), flush=True)
    elif operation == "send later":
        print(queue.send("ask", "killed" * 1000, deliver_after_s=0.001), flush=True)
    elif operation == "poll":
        print(*(message["msg_id"] for message in queue.poll("ann")), flush=True)
    elif operation == "expire":
        print(queue.expire(), flush=True)
    elif operation == "send many":
        me, count = rest
        for number in range(int(count)):
            body = f"{me} {number} " + "x" * (number * 37 % 5000)
            send = partial(send_gone, queue) if number % 5 == 4 else queue.send
            print(send("ask", body, sender=me))


if __name__ == "__main__":
    _main(*sys.argv[1:])
