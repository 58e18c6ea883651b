"""The options that give a job a broker of its own (JE-13): `--broker HOST[:PORT]`, `--broker-file FILE`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from schemas.errors import UsageError

STANDARD_INPUT: Final = "-"
_PRIVATE: Final = 0o077
_PORT_LIMIT: Final = 65535
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?")


def add_broker_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; a job has one of them, or none."""
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument(
        "--broker", type=_address, metavar="HOST[:PORT]", help="MQTT broker of this job, instead of ours"
    )
    one_of.add_argument(
        "--broker-file",
        metavar="FILE",
        help="the same with user, password and TLS: a JSON object with host, port, tls, ca_certs, certfile, "
        "keyfile, username, password (- reads standard input)",
    )


def read_broker(args: argparse.Namespace) -> dict[str, Any] | None:
    """The overlay that the options give, None without them. Raises UsageError: no such file, no object, or
    a password where others can read it.
    """
    if args.broker_file is None:
        found: dict[str, Any] | None = args.broker
        return found
    return _from_file(args.broker_file)


def _address(text: str) -> dict[str, Any]:
    found = _ADDRESS.fullmatch(text)
    port = None if found is None or found["port"] is None else int(found["port"])
    if found is None or (port is not None and not 1 <= port <= _PORT_LIMIT):
        # The text is not repeated: somebody may have written a password into it.
        raise argparse.ArgumentTypeError(
            "expected HOST, HOST:PORT or [IPv6]:PORT; user, password and TLS go into --broker-file"
        )
    host = found["v6"] or found["name"]
    return {"host": host} if port is None else {"host": host, "port": port}


def _from_file(name: str) -> dict[str, Any]:
    try:
        if name == STANDARD_INPUT:
            found = json.load(sys.stdin)
        else:
            path = Path(name)
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict) and "password" in found and path.stat().st_mode & _PRIVATE:
                raise UsageError(
                    f"--broker-file: {path} holds a password and is readable by others; chmod 600 {path}"
                )
    except (OSError, ValueError) as error:
        raise UsageError(f"--broker-file: cannot read {name}: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise UsageError("--broker-file: expected a JSON object with host, port, tls, …")
    return found
