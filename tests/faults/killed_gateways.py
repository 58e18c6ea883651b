"""Two gateways on one log, killed with SIGKILL and started again while clients are at work."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from connectors.programs.local_stack import free_port
from schemas.settings.settings import GatewaySettings, Settings
from tests.broker_processes import ProgramProcess

READY_WITHIN_S = 120.0
# A request that waits as long as this has been sent.
SENT_S = 0.2


class Asking:
    """The gateway that a client waits for. One thread asks, any thread looks."""

    def __init__(self) -> None:
        self._now: tuple[str, float] | None = None

    @contextmanager
    def of(self, url: str) -> Iterator[None]:
        """Within it, an answer of the gateway at `url` is waited for."""
        self._now = (url, time.monotonic())
        try:
            yield
        finally:
            self._now = None

    def is_sent(self, urls: Iterable[str]) -> bool:
        """True if one of these gateways has a request, and has not answered."""
        now = self._now
        return now is not None and now[0] in urls and time.monotonic() - now[1] > SENT_S


class Gateways:
    """Two gateways on one log, killed and started again."""

    def __init__(self, settings: Settings, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        # A killed gateway stays a member of its group for seconds; the next test has another group.
        group = f"reactor-{settings.kafka.topic}"
        self.settings = [
            settings.model_copy(update={"gateway": GatewaySettings(port=free_port(), reactor_group=group)})
            for _ in range(2)
        ]
        self._running = [self._launch(number) for number in range(2)]
        try:
            self._wait_ready(range(2))
        except BaseException:
            self.stop()
            raise
        self.token = settings.operator_token_file.read_text().strip()

    def _launch(self, number: int) -> ProgramProcess:
        own = self._tmp_path / f"gateway-{number}-{time.monotonic_ns()}"
        own.mkdir()
        return ProgramProcess("connectors.programs.gateway_program", self.settings[number], own, "gateway")

    def _wait_ready(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._running[number].wait_ready(READY_WITHIN_S)

    def hold(self, *numbers: int) -> list[str]:
        """Let these stand still until they are killed: who asks them has no answer then. Returns their URLs."""
        for number in numbers:
            self._running[number].process.send_signal(signal.SIGSTOP)
        return [self.settings[number].gateway_url for number in numbers]

    def kill(self, *numbers: int) -> None:
        """kill -9 for all of these at once, and new ones on the same ports."""
        self.end(*numbers)
        self.start(*numbers)

    def end(self, *numbers: int) -> None:
        """kill -9 for all of these at once."""
        for number in numbers:
            self._running[number].process.kill()
        for number in numbers:
            self._running[number].process.wait(10)

    def start(self, *numbers: int) -> None:
        """Start new ones on the ports of those that were ended, and wait until they serve."""
        for number in numbers:
            self._running[number] = self._launch(number)
        self._wait_ready(numbers)

    def stop(self) -> None:
        """End both."""
        for gateway in self._running:
            gateway.kill()
