"""The options `--broker` and `--broker-file`, which give a job an MQTT broker of its own (JE-13)."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from connectors.cli.shared.actions import argument, one_of
from connectors.cli.shared.call import Call
from connectors.cli.shared.files import STANDARD_INPUT
from schemas.errors import UsageError

_PRIVATE: Final = 0o077
_PORT_LIMIT: Final = 65535
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?")


def read_broker(call: Call) -> dict[str, Any] | None:
    """Return the broker that the options name, None without them.

    Raises UsageError when the file cannot be read, is no JSON object, or holds a password that others can read.
    """
    if call.broker_file is None:
        found: dict[str, Any] | None = call.broker
        return found
    return _from_file(call.broker_file)


def _address(text: str) -> dict[str, Any]:
    found = _ADDRESS.fullmatch(text)
    port = None if found is None or found["port"] is None else int(found["port"])
    if found is None or (port is not None and not 1 <= port <= _PORT_LIMIT):
        # The error does not repeat the text, which may hold a password.
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


BROKER: Final = one_of(
    argument("--broker", "an MQTT broker for this job alone", type=_address, metavar="HOST[:PORT]"),
    argument(
        "--broker-file",
        "the same with user, password and TLS: a JSON object with host, port, tls, ca_certs, certfile, "
        "keyfile, username, password (- reads standard input)",
        metavar="FILE",
    ),
)
