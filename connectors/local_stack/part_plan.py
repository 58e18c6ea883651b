"""What the stack has to know about one part in order to run it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KAFKA, MOSQUITTO, BRIDGE, GATEWAY, STREAMS = "kafka", "mosquitto", "bridge", "gateway", "streams"
FILES = "files"
XML_PUMP = "xml_pump"

# Parts of one stage start together; the next stage starts when they are ready.
STAGES: tuple[tuple[str, ...], ...] = ((KAFKA, MOSQUITTO), (BRIDGE, FILES, GATEWAY, XML_PUMP, STREAMS))
ALL_PARTS = tuple(name for stage in STAGES for name in stage)
# Nothing that still writes may lose what it writes to.
STOP_ORDER = (BRIDGE, FILES, XML_PUMP, GATEWAY, STREAMS, MOSQUITTO, KAFKA)


def _nothing() -> None:
    return None


def _terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


@dataclass(frozen=True)
class PartPlan:
    """How one part is started, when it is ready, and how long its ends may take.

    `prepare` runs before each start, `on_first_ready` once, after the first start of the stack.
    `terminate` asks the process with this id to end. `credentials` are variables with secrets, looked up at
    each start. `group`: the part of ALL_PARTS that this is one more of. `niceness`: how far
    it leaves the processor to the others.
    """

    name: str
    summary: str
    command: Callable[[], list[str]]
    is_ready: Callable[[], bool]
    ready_within_s: float
    stop_within_s: float
    cwd: Path
    prepare: Callable[[], None] = _nothing
    terminate: Callable[[int], None] = _terminate
    on_first_ready: Callable[[], None] = _nothing
    environment: Mapping[str, str] = field(default_factory=dict)
    credentials: Callable[[], Mapping[str, str]] = dict
    group: str | None = None
    niceness: int = 0
