"""Options that several subcommands have, and the input that they name."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trunkline_agent.credentials import Credentials
from trunkline_agent.errors import UsageError
from trunkline_agent.private_files import read_private

STANDARD_INPUT: Final = "-"
_INPUT_MOST: Final = 16 * 1024 * 1024
_SECRET_MOST: Final = 4096
Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any, name: str, run: Run, text: str, description: str, *, takes_command: bool = False
) -> argparse.ArgumentParser:
    """Add a subcommand with the options `--credentials` and `--json`, and return its parser.

    Args:
        commands: The action that `add_subparsers` returned.
        name: The name of the subcommand.
        run: The function that runs it.
        text: Its help in one line.
        description: The help of its own `--help`, with examples.
        takes_command: Whether another program's command line may follow `--`.
    """
    found: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.set_defaults(run=run, takes_command=takes_command)
    found.add_argument("--credentials", metavar="FILE", help="the agent's credentials (mode 0600)")
    found.add_argument("--json", action="store_true", help="print JSON")
    return found


def credentials_of(given: argparse.Namespace) -> Credentials:
    """Return the credentials that the option or the environment names. Raises UsageError and NotFound."""
    if given.credentials is not None:
        return Credentials.load(given.credentials)
    return Credentials.from_environment()


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for argparse: a whole number of at least `least`."""

    def number(text: str) -> int:
        found = int(text) if text.isascii() and text.isdigit() else -1
        if found < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, found {text!r}")
        return found

    return number


def json_value(text: str, what: str) -> Any:
    """Return the value of a JSON text; `-` reads standard input. Raises UsageError."""
    try:
        return json.loads(read_text(text))
    except (ValueError, RecursionError):
        raise UsageError(
            f'{what}: expected JSON, such as \'{{"text": "hello"}}\'; --text takes a text'
        ) from None


def read_text(text: str) -> str:
    """Return a text, or that of standard input for `-`, without a line break at its end. Raises UsageError."""
    if text != STANDARD_INPUT:
        return text
    data = sys.stdin.buffer.read(_INPUT_MOST + 1)
    if len(data) > _INPUT_MOST:
        raise UsageError(f"standard input: more than {_INPUT_MOST} bytes")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise UsageError("standard input: not UTF-8") from None


def read_secret(path: str) -> str:
    """Return the secret in a file that only its owner may read. Raises UsageError."""
    place = Path(path)
    try:
        data = read_private(place, _SECRET_MOST)
    except OSError as error:
        raise UsageError(f"--secret-file: cannot read {place}: {error.strerror}") from None
    try:
        return data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise UsageError(f"--secret-file: {place} holds no secret of a job") from None


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value, ensure_ascii=False), flush=True)
