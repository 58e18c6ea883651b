"""Find out which XML each handler accepts, in a child process that imports users' code (XP-01, XP-09).

    describe_handlers(["shop.pricing:price"])["shop.pricing:price"].root_tag

A gateway never imports users' code itself. The child is `python -m connectors.doors.xml_pump.describe`. Its
time is limited, and its environment has none of Trunkline's secrets.
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

from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT
from trunkline_agent.terminal_text import escaped

PAYLOAD_FIELDS: Final = ("root_tag", "namespace", "xsd", "example")
DESCRIBE_S: Final = 30.0
_END_S: Final = 5.0
_MODULE: Final = "connectors.doors.xml_pump.describe"
_QUOTED_CHARACTERS: Final = 500
_NOT_FOR_USERS: Final = (ENV_PREFIX, "TRUNKLINE_TOKEN", "TRUNKLINE_AGENT_TOKEN", "MQTT_PASSWORD")


@dataclass(frozen=True)
class Described:
    """The description of the XML payload that a handler accepts.

    Attributes:
        root_tag: The name of the payload's root element.
        namespace: The XML namespace of the root element.
        xsd: The XML schema of the payload.
        example: An example of the payload.
        fault: Why there is no description, and what to do about it; None if there is one. With a fault, the
            other fields are empty.
    """

    root_tag: str = ""
    namespace: str = ""
    xsd: str = ""
    example: str = ""
    fault: str | None = None


def describe_handlers(names: Sequence[str], timeout_s: float = DESCRIBE_S) -> dict[str, Described]:
    """Import handlers in a child process, and return the description of each by its name.

    Errors in users' code raise nothing: the description of the handler has a `fault` instead. The call blocks
    until the child ends or the time is over. Then it kills the processes that the import started.

    Args:
        names: The handlers, each as `module:attribute`.
        timeout_s: The longest time in seconds for all imports. After it, every handler gets a fault.
    """
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
