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

ALL_PARTS = (KAFKA, MOSQUITTO, BRIDGE, FILES, GATEWAY, XML_PUMP, STREAMS)
# All others read or write the log, so they start when Kafka is ready, where the stack runs it.
START_WITHOUT_KAFKA = (KAFKA, MOSQUITTO)
# Nothing that still writes may lose what it writes to.
STOP_ORDER = (BRIDGE, FILES, XML_PUMP, GATEWAY, STREAMS, MOSQUITTO, KAFKA)


def _nothing() -> None:
    return None


def _terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


@dataclass(frozen=True)
class PartPlan:
    """How one part is started, when it is ready, and how long its end may take.

    `prepare` runs before each start. `on_first_ready` runs after the first start, until it has succeeded once;
    only then the part is ready. `stalled_after_s`: a start that makes no progress for this long has failed.
    `is_well`: asks the part that is ready whether it still answers; called on a thread of its own, and may take
    seconds. `terminate` asks the process with this id to end. `credentials` are variables with secrets, looked
    up at each start. `group`: the part of ALL_PARTS that this is one more of. `niceness`: how far the part
    leaves the processor to the others once it is ready.
    """

    name: str
    summary: str
    command: Callable[[], list[str]]
    is_ready: Callable[[], bool]
    stop_within_s: float
    cwd: Path
    stalled_after_s: float = 60.0
    prepare: Callable[[], None] = _nothing
    terminate: Callable[[int], None] = _terminate
    on_first_ready: Callable[[], None] = _nothing
    environment: Mapping[str, str] = field(default_factory=dict)
    credentials: Callable[[], Mapping[str, str]] = dict
    group: str | None = None
    niceness: int = 0
    is_well: Callable[[], bool] | None = None
