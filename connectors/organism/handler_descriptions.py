"""Describe handlers in a child process: users' code is imported there, never in the gateway (XP-01, XP-09).

    describe_handlers(["shop.pricing:price"])["shop.pricing:price"].root_tag

The child is `python -m connectors.xml_pump.describe`. Its time is limited, and it gets none of our secrets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from connectors.terminal.terminal_text import escaped
from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT

PAYLOAD_FIELDS: Final = ("root_tag", "namespace", "xsd", "example")
DESCRIBE_S: Final = 30.0
_END_S: Final = 5.0
_MODULE: Final = "connectors.xml_pump.describe"
_QUOTED_CHARACTERS: Final = 500
_NOT_FOR_USERS: Final = (ENV_PREFIX, "TRUNKLINE_TOKEN", "TRUNKLINE_AGENT_TOKEN", "MQTT_PASSWORD")


@dataclass(frozen=True)
class Described:
    """The payload of a handler. `fault` says why there is no description, and what to do."""

    root_tag: str = ""
    namespace: str = ""
    xsd: str = ""
    example: str = ""
    fault: str | None = None


def describe_handlers(names: Sequence[str], timeout_s: float = DESCRIBE_S) -> dict[str, Described]:
    """Return a description of each handler by its name, `module:attribute`. Never raises for users' code."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_FOR_USERS)}
    child = subprocess.Popen(  # noqa: S603  our own program
        [sys.executable, "-m", _MODULE, *names],
        cwd=PROJECT_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # processes that an import starts end with the child
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        fault = f"it was not imported within {timeout_s:g} s; a module must only define when it is imported"
        return _all(names, fault)
    finally:
        _end(child)
    try:
        answer = json.loads(out.rstrip().rpartition(b"\n")[2])
        return {name: _described(answer[name]) for name in names}
    except (ValueError, KeyError, TypeError):
        why = escaped(err.decode("utf-8", "replace").rstrip().rpartition("\n")[2])[:_QUOTED_CHARACTERS]
        return _all(names, f"it ended the process that imports it (exit code {child.returncode}): {why}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and its process group.

    A process that has left the group may still have the pipes open, so they are not read to their end.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)


def _described(answer: dict[str, Any]) -> Described:
    if "error" in answer:
        return Described(fault=escaped(str(answer["error"]))[:_QUOTED_CHARACTERS])
    return Described(*(str(answer[name]) for name in PAYLOAD_FIELDS))


def _all(names: Sequence[str], fault: str) -> dict[str, Described]:
    return {name: Described(fault=fault) for name in names}
