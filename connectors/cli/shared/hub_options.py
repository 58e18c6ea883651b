"""What the commands of the hub share: how an action is declared, `--limit` of a list, and `--request-id`, by
which a request that got no answer can be sent again as the same one.
"""

from __future__ import annotations

import argparse
import re
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from schemas.errors import BackboneUnreachable

LIST_LIMIT: Final = 50
# What a header of the gateway's takes.
_NAME: Final = re.compile(r"[\x21-\x7e]{1,255}").fullmatch


_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)


def add_action(commands: argparse._SubParsersAction[_Parser], name: str, text: str, example: str) -> _Parser:
    """Add an action with its help, one example, and `--json`."""
    found = commands.add_parser(
        name, help=text, description=text, epilog=f"example: {example}", allow_abbrev=False
    )
    found.add_argument("--json", action="store_true", help="print one JSON object")
    return found


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Add the option `--limit` of a list."""
    parser.add_argument(
        "--limit", type=int, default=LIST_LIMIT, metavar="N", help=f"at most (default: {LIST_LIMIT})"
    )


def add_request_id(parser: argparse.ArgumentParser, same: str) -> None:
    """Add the option; `same` says what the same name again is."""
    parser.add_argument("--request-id", type=_request_id, metavar="NAME", help=f"the same name again is {same}")


@contextmanager
def named_request(given: str | None, perhaps: str) -> Iterator[str]:
    """The request's name, one of its own without `given`. When it stays open whether the request was done,
    stderr says how to do the same again; `perhaps` says what has happened then.
    """
    name = given or str(uuid.uuid4())
    try:
        yield name
    except (BackboneUnreachable, KeyboardInterrupt):
        print(f"If {perhaps} nevertheless: the same again is --request-id {name}", file=sys.stderr, flush=True)
        raise


def _request_id(text: str) -> str:
    if _NAME(text) is None:
        raise argparse.ArgumentTypeError("expected 1 to 255 ASCII characters without spaces")
    return text
