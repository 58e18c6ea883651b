"""The plan by which the local stack runs one part, such as Kafka, and the names of all parts in order."""

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
# All other parts read or write the log. They wait for Kafka if the stack runs it.
START_WITHOUT_KAFKA = (KAFKA, MOSQUITTO)
# A part that writes ends before the part that it writes to.
STOP_ORDER = (BRIDGE, FILES, XML_PUMP, GATEWAY, STREAMS, MOSQUITTO, KAFKA)


@dataclass(frozen=True)
class PartPlan:
    """The instructions to start, check and stop one part of the stack.

    Attributes:
        name: the part's name; its log is `<name>.log`.
        summary: a text for people, such as `Kafka on 127.0.0.1:9092`.
        command: returns the program and its arguments.
        is_ready: returns whether the running process is ready. It must return soon.
        stop_within_s: how long the process may take to end before it is killed, in seconds.
        cwd: the folder in which the process runs.
        stalled_after_s: a start has failed if it makes no progress for this many seconds.
        prepare: called before each start, for example to write the program's settings file.
        terminate: asks the process with this id to end.
        on_first_ready: called when the program is ready for the first time, and again after an error. The part
            is not ready before it has succeeded.
        environment: variables in addition to the settings.
        credentials: returns variables with secrets, at each start.
        group: the part of ALL_PARTS of which this is one more process. None: the part is its own group.
        niceness: how much the nice value is raised once the part is ready.
        idle_threads: what the names of threads begin with that then get only the time that no other wants.
        is_well: returns whether a ready part still answers. Called on its own thread; may take seconds. None:
            the part is not asked.
    """

    name: str
    summary: str
    command: Callable[[], list[str]]
    is_ready: Callable[[], bool]
    stop_within_s: float
    cwd: Path
    stalled_after_s: float = 60.0
    prepare: Callable[[], None] = lambda: None
    terminate: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGTERM)
    on_first_ready: Callable[[], None] = lambda: None
    environment: Mapping[str, str] = field(default_factory=dict)
    credentials: Callable[[], Mapping[str, str]] = dict
    group: str | None = None
    niceness: int = 0
    idle_threads: str = ""
    is_well: Callable[[], bool] | None = None
