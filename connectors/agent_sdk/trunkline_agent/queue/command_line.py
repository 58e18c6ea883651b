"""The command line of the file queue: `trunkline queue` and `zos-mq` (FQ-14)."""

from __future__ import annotations

import argparse
import os
import sys

from trunkline_agent.queue.message_queue import Queue
from trunkline_agent.queue.message_record import (
    BODY_LIMIT,
    FIELDS_IF_GIVEN,
    PRIORITIES,
    TOPICS,
    to_indented,
    to_line,
)
from trunkline_agent.queue.queue_errors import QueueError
from trunkline_agent.wire.message_fields import duration_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_PIECE_BYTES = 256 * 1024

_EPILOG = """\
examples:
  trunkline queue send --topic ask --to builder --sender ann --body "Is the build green?"
  git diff | trunkline queue send --topic broadcast
  trunkline queue poll --agent builder
  trunkline queue poll --agent builder --topic ask --topic answer
  trunkline queue tail -n 3 | jq -r .body
  trunkline queue send --topic answer --to ann --reply-to MSG_ID --expires-in 1h --body yes
  trunkline queue send --topic ask --to builder --priority high --deliver-after 10m --body "And now?"

A poll returns each message once: a printed message is taken. After an error of the output it comes again.
tail only reads.
Exit codes: 0 ok, 1 the queue has failed, 2 wrong usage, 130 interrupted.
Settings: TRUNKLINE_QUEUE_ROOT, _SESSION, _AGENT_ID, _BODY_THRESHOLD, _FSYNC, _DISABLED;
see docs/how-to/use_the_file_queue.md.
"""
_BODY_HELP = "the text; - or nothing: standard input, byte for byte, with its last newline"
_TTL_HELP = "after how long it expires, such as 90, 5m or 2h (default: never)"
_DELAY_HELP = "after how long agents get it (default: at once)"
_SESSION_HELP = "the session (default: $TRUNKLINE_QUEUE_SESSION or default)"


class UsageError(Exception):
    """The arguments are invalid. The message says why."""


def _formatter(prog: str) -> argparse.HelpFormatter:
    # Without a width, argparse imports a module to ask the terminal, which takes longer than all of our
    # imports.
    return argparse.RawDescriptionHelpFormatter(prog, width=100)


def parser() -> argparse.ArgumentParser:
    """Return a new parser of the arguments of `trunkline queue`."""
    main_parser = argparse.ArgumentParser(
        prog="trunkline queue",
        description="A mailbox on this machine: files that survive crashes and can be read with cat.",
        epilog=_EPILOG,
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    main_parser.add_argument("--root", metavar="DIR", help="the queue's folder")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="send|poll|tail|expire|status")

    def command(name: str, text: str) -> Callable[..., Any]:
        made = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:],
            allow_abbrev=False,
            formatter_class=_formatter,
        )
        made.add_argument("--session", metavar="NAME", help=_SESSION_HELP)
        return made.add_argument

    option = command("send", "send a message and print its id")
    option("--topic", required=True, choices=sorted(TOPICS), help="what kind of message it is")
    option("--body", metavar="TEXT", default="-", help=_BODY_HELP)
    option("--to", metavar="NAME", help="the recipient; without it, or all or broadcast: every agent")
    option("--expires-in", "--ttl-s", "--ttl", dest="ttl_s", metavar="TIME", type=_seconds, help=_TTL_HELP)
    option(
        "--sender",
        "--from",
        metavar="NAME",
        help="the sender (default: $TRUNKLINE_QUEUE_AGENT_ID or anonymous)",
    )
    option("--reply-to", metavar="MSG_ID", help="the message that this one answers")
    for one in FIELDS_IF_GIVEN:
        option(one.option, metavar=one.metavar, help=one.short)
    option(
        "--deliver-after",
        "--deliver-after-s",
        dest="deliver_after_s",
        metavar="TIME",
        type=_seconds,
        help=_DELAY_HELP,
    )
    option("--priority", choices=PRIORITIES, help="a poll returns higher ones first (default: normal)")
    option = command("poll", "take the new messages for an agent, one JSON object a line")
    option(
        "--agent",
        "--agent-id",
        dest="agent_id",
        metavar="NAME",
        help="the agent that polls, whose cursor moves (default: $TRUNKLINE_QUEUE_AGENT_ID)",
    )
    option(
        "--topic",
        action="append",
        choices=sorted(TOPICS),
        help="only messages of this topic; may be repeated; messages of other topics are skipped for good",
    )
    option = command("tail", "show the last messages, one JSON object a line, without taking them")
    option("-n", "--n", metavar="COUNT", type=_count, default=10, help="how many (default: 10)")
    option("--include-expired", action="store_true", help="also expired messages")
    command("expire", "remove expired messages from the files and print how many were removed")
    option = command("status", "show the state of the queue as JSON; without --session: of all sessions")
    option("--json", action="store_true", help="one line for programs, instead of indented JSON")
    return main_parser


def _seconds(text: str) -> float:
    value = duration_s(text)
    return int(value) if value.is_integer() else value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(text)
    return int(text)


_count.__name__ = "number of messages"  # argparse shows it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of `trunkline queue` and return its exit code.

    An error that a user can cause is printed on standard error and raises nothing. The exit codes are 0, 1 for
    a failure of the queue, 2 for invalid arguments, and 130 after Ctrl-C.

    Args:
        arguments: The arguments after the program's name; None for those of the process.
    """
    try:
        return _run(arguments)
    except SystemExit as end:  # argparse: help or usage
        return end.code if isinstance(end.code, int) else USAGE
    except BrokenPipeError:
        return OK  # the reader of our output has ended
    except KeyboardInterrupt:
        return INTERRUPTED
    except QueueError as error:
        return _say(error, USAGE if isinstance(error, ValueError) else FAILED)
    except (ValueError, UsageError) as error:
        return _say(error, USAGE)
    except (OSError, MemoryError) as error:
        return _say(error, FAILED)
    finally:
        _let_go()


def _run(arguments: Sequence[str] | None) -> int:
    given = parser().parse_args(arguments)
    if given.root == "":
        raise UsageError("--root is empty")
    queue = Queue(given.root)
    if given.command == "send":
        body = _body(given.body)
        about = (given.session, given.sender, given.reply_to, given.deliver_after_s, given.priority)
        fields = {one.name: getattr(given, one.name) for one in FIELDS_IF_GIVEN}
        sent = queue.send(given.topic, body, given.to, given.ttl_s, *about, **fields)
        _print(f"{sent}\n".encode())
    elif given.command == "poll":
        agent_id = queue.agent_id if given.agent_id is None else given.agent_id
        if agent_id is None:
            raise UsageError("poll needs --agent NAME or the variable TRUNKLINE_QUEUE_AGENT_ID")
        queue.poll(agent_id, given.topic, given.session, _print_messages)
    elif given.command == "tail":
        _print_messages(queue.tail(given.n, given.include_expired, given.session))
    elif given.command == "expire":
        _print(b"%d\n" % queue.expire(given.session))
    else:
        status = queue.status(given.session)
        _print(to_line(status) if given.json else to_indented(status))
    for error in filter(None, (queue.audit_error, queue.lines_error)):
        _say(error, OK)
    return OK


def _body(text: str) -> str:
    if text != "-":
        return text
    if sys.stdin is not None and sys.stdin.isatty():
        _say("reading the body from standard input; end it with Ctrl-D", OK)
    pieces: list[bytes] = []
    size = 0
    while size <= BODY_LIMIT and (piece := os.read(0, _PIECE_BYTES)):
        pieces.append(piece)
        size += len(piece)
    if size > BODY_LIMIT:
        raise UsageError(f"the body has more than {BODY_LIMIT} bytes")
    try:
        return b"".join(pieces).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError("the body on standard input is not UTF-8") from None


def _print_messages(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        _print(to_line(message))


def _print(data: bytes) -> None:
    # Not sys.stdout: it has the locale's encoding, and reports a closed pipe again at the end.
    while data:
        data = data[os.write(1, data) :]


def _say(what: object, code: int) -> int:
    try:
        text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(what))
        os.write(2, f"trunkline queue: {text}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        return code
    return code


def _let_go() -> None:
    # Help is written to sys.stdout, and the interpreter would report at its end that the pipe is closed.
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
