"""One running part of the stack: start it, see whether it is ready, end it, bring it back when it died."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from connectors.local_stack import child_process
from connectors.local_stack.log_files import last_lines
from connectors.local_stack.part_plan import PartPlan
from schemas.errors import TrunklineError
from schemas.settings import ENV_PREFIX, PROJECT_ROOT, Settings, settings_environment

STOPPED, STARTING, READY, WAITING = "stopped", "starting", "ready", "waiting"
# The caller's own: a viewer's token would keep the bridge from the verdicts, a job's secret is for nobody else.
_NOT_FOR_PARTS = {
    child_process.MARK,
    "TRUNKLINE_TOKEN",
    "TRUNKLINE_JOB_SECRET",
    "HTTP_PORT",
    "AGENT_MCP_PORT",
    "AGENT_KEYS_PATH",
}
_POLL_S = 0.05
_BACKOFF_MAX_S = 30.0
# A part that ran this long was well: the next death is a new story and gets the shortest wait again.
_STEADY_AFTER_S = 60.0


class PartFailed(TrunklineError):
    """A part did not become ready. The message names its log and quotes the end of it."""


def child_environment(settings: Settings) -> dict[str, str]:
    """Our environment, with exactly these settings and no other source of them."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((ENV_PREFIX, "MQTT_")) and name not in _NOT_FOR_PARTS
    }
    extra = os.pathsep + kept["PYTHONPATH"] if kept.get("PYTHONPATH") else ""
    return {
        **kept,
        # An empty settings file: the variables say all that differs from the defaults.
        "TRUNKLINE_CONF": os.devnull,
        "PYTHONPATH": str(PROJECT_ROOT) + extra,
        "PYTHONUNBUFFERED": "1",
        **settings_environment(settings),
    }


class Part:
    """The handle of one part. Not thread-safe: one thread starts, checks and stops it."""

    def __init__(self, plan: PartPlan, settings: Settings) -> None:
        self.plan = plan
        self.name = plan.name
        self.log_path: Path = settings.data_path / "logs" / f"{plan.name}.log"
        self.state = STOPPED
        self.restarts = 0
        self.ready_after_s: float | None = None
        self._mark = child_process.mark_of(settings.data_path, plan.name)
        self._environment: Mapping[str, str] = {**child_environment(settings), **plan.environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._launched_at = 0.0
        self._backoff_s = 1.0
        self._retry_at = 0.0

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def launch(self) -> None:
        """Start the process and return at once."""
        if self.pid is not None:
            return
        self.state = STARTING
        self.ready_after_s = None
        self.plan.cwd.mkdir(parents=True, exist_ok=True)
        self.plan.prepare()
        self._launched_at = time.monotonic()
        self._process = child_process.start_child(
            self.plan.command(),
            cwd=self.plan.cwd,
            environment={**self._environment, **self.plan.credentials()},
            mark=self._mark,
            log=self.log_path,
            niceness=self.plan.niceness,
        )

    def check_ready(self) -> bool:
        """Look once; raise PartFailed when it has ended or its time is over."""
        if self.state == READY:
            return True
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise self._failed(f"ended with exit code {code} before it was ready")
        if self.plan.is_ready():
            self.state = READY
            self.ready_after_s = time.monotonic() - self._launched_at
            return True
        if time.monotonic() - self._launched_at > self.plan.ready_within_s:
            raise self._failed(f"was not ready within {self.plan.ready_within_s:.0f} s")
        return False

    def _failed(self, what: str) -> PartFailed:
        quoted = "\n".join(f"    {line}" for line in last_lines(self.log_path, 12))
        return PartFailed(
            f"{self.name} {what}. Its log is {self.log_path}, which ends:\n{quoted or '    (empty)'}"
        )

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Start it and wait until it is ready."""
        self.launch()
        while not self.check_ready():
            if should_stop():
                return
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End it in order, then whatever is left of it."""
        if self._process is not None:
            child_process.stop_child(self._process, self._mark, self.plan.stop_within_s, self.plan.terminate)
            self._process = None
        self.state = STOPPED

    def kill(self) -> None:
        """SIGKILL for it and all that it started, as a fault."""
        if self._process is not None:
            child_process.end_child(self._process, self._mark)

    def restart(self) -> None:
        """Stop it, start it, wait until it is ready."""
        self.stop()
        self.start()
        self.restarts += 1

    def look_after(self) -> bool:
        """Bring it back when it has died, after growing waits. Never waits itself; True if anything changed."""
        now = time.monotonic()
        if self.state == WAITING:
            if now < self._retry_at:
                return False
            return self._bring_back()
        if self.state == STOPPED:
            return False
        if self.pid is None:
            return self._wait_before_retry(now)
        if self.state == STARTING:
            try:
                return self.check_ready()
            except PartFailed as error:
                print(error, flush=True)
                self.kill()
                return self._wait_before_retry(now)
        return False

    def _bring_back(self) -> bool:
        self.restarts += 1
        try:
            self.launch()
        except (TrunklineError, OSError) as error:
            print(f"{self.name} cannot be started: {error}", flush=True)
            return self._wait_before_retry(time.monotonic())
        return True

    def _wait_before_retry(self, now: float) -> bool:
        # What the dead one has started must not meet its successor.
        child_process.kill_marked(self._mark)
        if now - self._launched_at > _STEADY_AFTER_S:
            self._backoff_s = 1.0
        self.state = WAITING
        self._retry_at = now + self._backoff_s
        print(f"{self.name} has ended; it is started again in {self._backoff_s:.0f} s", flush=True)
        self._backoff_s = min(self._backoff_s * 2, _BACKOFF_MAX_S)
        return True

    def as_json(self) -> dict[str, Any]:
        """What the state file says about it."""
        pid = self.pid
        created = None
        if pid is not None:
            try:
                created = psutil.Process(pid).create_time()
            except psutil.Error:
                pid = None
        return {
            "state": self.state,
            "pid": pid,
            "created": created,
            "restarts": self.restarts,
            "ready_after_s": self.ready_after_s,
            "summary": self.plan.summary,
            "log": str(self.log_path),
        }
