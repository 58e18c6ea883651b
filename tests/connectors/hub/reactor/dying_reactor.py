"""A log of its own, and a process that reacts to it until it kills itself: for the tests of the reactor."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connectors.hub.live.live_view import LiveView
from connectors.hub.reactor.reactor import Reactor
from connectors.log.kafka_topic import ensure_topic
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import program_environment, with_kafka
from tests.jobs.topic_load import append_all


class DyingReactor:
    """A topic of its own with `records`, and a process that dies at the `number`th call of `step`."""

    def __init__(
        self, settings: Settings, records: Iterable[OutgoingRecord], step: str, number: int, folder: Path
    ) -> None:
        name = f"{step}{number}"
        topic = f"{settings.kafka.topic}.{name}"
        gateway = settings.gateway.model_copy(update={"reactor_group": topic})
        self.settings = with_kafka(settings, topic=topic).model_copy(update={"gateway": gateway})
        ensure_topic(self.settings)
        append_all(self.settings, records)
        environment = program_environment(self.settings) | {
            "TRUNKLINE_READY_FILE": str(folder / f"{name}.ready")
        }
        command = [sys.executable, "-m", "tests.connectors.hub.reactor.reacting_process", step, str(number)]
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=PROJECT_ROOT, env=environment, stdout=log, stderr=log)

    def wait(self) -> None:
        """Wait until it has killed itself."""
        try:
            assert self.process.wait(40) == -signal.SIGKILL, self.log.read_text()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10)


@contextmanager
def reacting(settings: Settings, view: LiveView, **options: Any) -> Iterator[Reactor]:
    """A reactor that runs inside the block."""
    reactor = Reactor(settings, view, **options)
    reactor.start()
    try:
        yield reactor
    finally:
        reactor.stop()
