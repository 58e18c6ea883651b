"""One part of the local stack, such as Kafka: starts, checks and stops its process, and starts it again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from connectors.plumbing.machine import state_file
from connectors.plumbing.machine.state_file import READY, STARTING, STOPPED, UNRESPONSIVE, WAITING
from connectors.programs.local_stack import child_process, memory
from connectors.programs.local_stack.child_process import AnswerProbe, StartProgress, set_idle, set_niceness
from connectors.programs.local_stack.data_files import last_lines
from connectors.programs.local_stack.part_plan import NotYet, PartPlan
from schemas.settings.settings import ENV_PREFIX, PROJECT_ROOT, Settings, settings_environment
from trunkline_agent.errors import TrunklineError

# Variables of the caller alone. With a viewer's token the bridge could not read verdicts; a job's secret is for
# that job only.
_NOT_FOR_PARTS = {
    child_process.MARK,
    "TRUNKLINE_TOKEN",
    "TRUNKLINE_JOB_SECRET",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "HTTP_PORT",
    "AGENT_MCP_PORT",
    "AGENT_KEYS_PATH",
}
_POLL_S = 0.05
_BACKOFF_MAX_S = 30.0
# A part that has run this long was well: after its next failure it gets the shortest wait again.
_STEADY_AFTER_S = 60.0
_FIRST_READY_AGAIN_S = 5.0
# The state file has a fixed size.
_FAILURE_CHARACTERS = 500


class PartFailed(TrunklineError):
    """A part's process has ended without a request, or its start made no progress.

    The message names the part's log and quotes its end. `failure` is the reason alone.
    """

    def __init__(self, message: str, failure: str) -> None:
        super().__init__(message)
        self.failure = failure


class NotSetUp(PartFailed):
    """A part's process runs, but the step after its first start has failed.

    The step is repeated while the process runs.
    """


def child_environment(settings: Settings) -> dict[str, str]:
    """Return the environment for a process of the stack, which has exactly these settings.

    It is this process's environment with `settings` as variables. Other variables with settings are left out,
    and so are the caller's own token and job secret.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((ENV_PREFIX, "MQTT_")) and name not in _NOT_FOR_PARTS
    }
    extra = os.pathsep + kept["PYTHONPATH"] if kept.get("PYTHONPATH") else ""
    return {
        **kept,
        # An empty settings file: the variables contain all settings that differ from the defaults.
        "TRUNKLINE_CONF": os.devnull,
        "PYTHONPATH": str(PROJECT_ROOT) + extra,
        "PYTHONUNBUFFERED": "1",
        **settings_environment(settings),
    }


class Part:
    """One part of the stack, such as Kafka or the gateway: a program that runs as a child process.

    Not thread-safe: one thread starts, checks and stops it. The kernel kills the process when the thread that
    started it ends.

    Args:
        plan: How to start the program, and how to see that it is ready.
        settings: The settings for the program.
        output: The open file that gets the output of the process. None: the part's log file.

    Attributes:
        plan: The plan.
        name: The part's name, such as `gateway`.
        group: The name in ALL_PARTS. Several processes of the XML pump have one group.
        log_path: The file to which the process writes its output.
        state: One of the constants STOPPED, STARTING, READY, WAITING (for its next start) and UNRESPONSIVE.
        restarts: How often the part was started again after its end.
        failures: The number of failures in a row. It is reset when the part is ready.
        error: The last failure. None: there was none since the part was ready.
        ready_after_s: How long the last start took. None: it is not ready yet.
        memory_kills: How often the part ended because the kernel killed it, or a process of it, for memory.
    """

    def __init__(self, plan: PartPlan, settings: Settings, output: IO[bytes] | None = None) -> None:
        self.plan = plan
        self.name = plan.name
        self.group = plan.group or plan.name
        self.log_path: Path = settings.data_path / "logs" / f"{plan.name}.log"
        self._output = output
        self.state = STOPPED
        self.restarts = 0
        self.memory_kills = 0
        self.failures = 0
        self.error: Exception | None = None
        self.ready_after_s: float | None = None
        self._mark = child_process.mark_of(settings.data_path, plan.name)
        self._environment: Mapping[str, str] = {**child_environment(settings), **plan.environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._progress: StartProgress | None = None
        self._probe: AnswerProbe | None = None
        self._is_set_up = self._is_ended_by_us = False
        self._set_up_at = 0.0
        self._launched_at = 0.0
        self._backoff_s = 1.0
        self._retry_at = 0.0

    @property
    def pid(self) -> int | None:
        """The id of the part's process. None: the process does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def is_ready(self) -> bool:
        """True if the part is ready, as of the last check. It may have ended since."""
        return self.state == READY

    def launch(self) -> None:
        """Start the part's process and return without waiting until it is ready. Do nothing if it runs.

        Raises:
            TrunklineError: The preparation failed, for example because the port is taken.
        """
        if self.pid is not None:
            return
        self.ready_after_s = None
        self._is_ended_by_us = False
        self._launched_at = time.monotonic()
        self.plan.cwd.mkdir(parents=True, exist_ok=True)
        self.plan.prepare()
        self._process = child_process.start_child(
            self.plan.command(),
            cwd=self.plan.cwd,
            environment={**self._environment, **self.plan.credentials()},
            mark=self._mark,
            log=self.log_path if self._output is None else self._output,
        )
        self._progress = StartProgress(self._process.pid, self.log_path)
        self.state = STARTING

    def check_ready(self) -> bool:
        """Check once whether the part is or was ready since its start, without waiting, and return the answer.

        When the process answers for the first time, this also runs the plan's `on_first_ready`, which may take
        seconds.

        Raises:
            PartFailed: the process has ended before it was ready, or its start makes no progress.
            NotSetUp: `on_first_ready` has failed. A later call repeats it.
        """
        if self.state in (READY, UNRESPONSIVE):
            return True
        if self._process is None or self._process.poll() is not None:
            raise self._failed(self._how_it_ended(" before it was ready"))
        if self.plan.is_ready():
            if not self._is_set_up and time.monotonic() >= self._set_up_at:
                self._set_up()
            if self._is_set_up:
                self._become_ready()
            return self.is_ready
        if self._progress is not None and self._progress.stalled_for_s() > self.plan.stalled_after_s:
            raise self._failed(f"made no progress for {self.plan.stalled_after_s:.0f} s before it was ready")
        return False

    def _how_it_ended(self, when: str = "") -> str:
        code = None if self._process is None else self._process.returncode
        ended = f"ended with exit code {code}{when}"
        if self._is_ended_by_us or not code:
            return ended
        if memory.KILLS.are_recent():
            self.memory_kills += 1
            what = "it" if code == -signal.SIGKILL else "one of its processes"
            return f"{ended}, because the kernel killed {what} for memory ({memory.PAGE})"
        if code == -signal.SIGKILL:
            return f"{ended}: another program killed it, or the kernel, which does not say so, for memory"
        return ended

    def _set_up(self) -> None:
        try:
            self.plan.on_first_ready()
        except NotYet as error:
            self._set_up_at = time.monotonic() + _FIRST_READY_AGAIN_S
            if time.monotonic() - self._launched_at < self.plan.stalled_after_s:
                print(f"{self.name} runs, and waits: {error}", flush=True)
                return
            raise NotSetUp(f"{self.name} runs, but {error}", f"runs, but {error}") from error
        except TrunklineError as error:
            self._set_up_at = time.monotonic() + _FIRST_READY_AGAIN_S
            raise NotSetUp(f"{self.name} runs, but {error}", f"runs, but {error}") from error
        self._is_set_up = True

    def _become_ready(self) -> None:
        if self.plan.niceness and self._process is not None:
            # Not earlier: on a busy machine the part would never become ready.
            set_niceness(self._process.pid, self.plan.niceness)
        if self.plan.idle_threads and self._process is not None:
            set_idle(self._process.pid, self.plan.idle_threads)
        if self.plan.is_well is not None:
            self._probe = AnswerProbe(self.name, self.plan.is_well)
        self.state = READY
        self.error, self.failures = None, 0
        self.ready_after_s = time.monotonic() - self._launched_at

    def _failed(self, what: str) -> PartFailed:
        if self._output is not None:
            return PartFailed(f"{self.name} {what}", what)
        quoted = "\n".join(f"    {line}" for line in last_lines(self.log_path, 12))
        return PartFailed(
            f"{self.name} {what}. Its log is {self.log_path}, which ends:\n{quoted or '    (empty)'}", what
        )

    def start(self) -> None:
        """Start the part and wait until it is ready. A start that makes progress has no limit of time.

        Raises:
            PartFailed: the process has ended, or its start makes no progress.
            NotSetUp: the plan's `on_first_ready` has failed.
            TrunklineError: the preparation failed, for example because the port is taken.
        """
        self.launch()
        while not self.check_ready():
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the process to end, wait at most `stop_within_s` of the plan, and kill what is left of its tree.

        `look_after` does not start the part again. It is no error if the process does not run.
        """
        self._end_probe()
        if self._process is not None:
            child_process.stop_child(self._process, self._mark, self.plan.stop_within_s, self.plan.terminate)
            self._process = None
        self.state = STOPPED

    def kill(self) -> None:
        """Send SIGKILL to the process and all that it started, and wait for their end.

        `state` is not changed: to `look_after`, the part has failed, and it starts the part again.
        """
        self._end_probe()
        if self._process is not None:
            self._is_ended_by_us |= self._process.poll() is None
            child_process.end_child(self._process, self._mark)

    def schedule(self) -> None:
        """Let the next call of `look_after` start the part."""
        self.state = WAITING
        self._retry_at = 0.0

    def look_after(self, *, may_start: bool = True) -> bool:
        """Start the part when it is due, and check the running one. Call it a few times a second.

        A part whose process has ended is started again after growing pauses, of 1 to 30 seconds. Failures of
        the part are printed and stored in `error`; they are not raised. The call does not wait for the part.

        Args:
            may_start: whether the part may be started now.

        Returns:
            Whether the part's state has changed.
        """
        now = time.monotonic()
        if self.state == WAITING:
            return now >= self._retry_at and may_start and self._bring_back()
        if self.state == STOPPED:
            return False
        before = self.state
        try:
            self.check()
        except NotSetUp as error:
            print(error, flush=True)
            self._note(error)
            return True
        except PartFailed as error:
            if before == STARTING:
                print(error, flush=True)
            return self._wait_before_retry(error)
        return self.state != before

    def check(self) -> bool:
        """Check once how the part is, without waiting, note it, and return whether it is or was ready.

        Raises:
            PartFailed: The process has ended, or its start makes no progress.
            NotSetUp: The plan's `on_first_ready` has failed. A later call repeats it.
        """
        if self.state == STARTING:
            return self.check_ready()
        if self.pid is None:
            raise self._failed(self._how_it_ended())
        self._note_whether_it_answers()
        return True

    def _note_whether_it_answers(self) -> None:
        """Note and print a change.

        A part that does not answer is not restarted: it may be busy, and its state shows why it does not
        answer.
        """
        is_silent = self._probe is not None and self._probe.is_silent
        if is_silent == (self.state == UNRESPONSIVE):
            return
        self.state = UNRESPONSIVE if is_silent else READY
        change = "does not answer; it is left running" if is_silent else "answers again"
        print(f"{self.name} {change}", flush=True)

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.end()
            self._probe = None

    def _bring_back(self) -> bool:
        if self._process is not None:
            self.restarts += 1
        try:
            self.launch()
        except (TrunklineError, OSError, subprocess.SubprocessError) as error:
            return self._wait_before_retry(error)
        return True

    def _wait_before_retry(self, error: Exception) -> bool:
        # Processes that the dead part has started must not disturb its successor.
        self.kill()
        now = time.monotonic()
        if now - self._launched_at > _STEADY_AFTER_S:
            self._backoff_s = 1.0
        self.state = WAITING
        self._retry_at = now + self._backoff_s
        self._note(error)
        print(f"{self.name} {self.failure}; it is started again in {self._backoff_s:.0f} s", flush=True)
        self._backoff_s = min(self._backoff_s * 2, _BACKOFF_MAX_S)
        return True

    def _note(self, error: Exception) -> None:
        self.failures += 1
        self.error = error

    @property
    def failure(self) -> str | None:
        """The last failure as a text that follows the part's name, such as `ended with exit code 1`.

        None means that the part has not failed since it was ready.
        """
        if self.error is None:
            return None
        found = self.error.failure if isinstance(self.error, PartFailed) else f"cannot be started: {self.error}"
        return found[:_FAILURE_CHARACTERS]

    def as_json(self) -> dict[str, Any]:
        """Return the part's entry in the state file: state, process, restarts, last failure and log."""
        named: dict[str, Any] = {"pid": None, "created": None}
        if self.pid is not None:
            with suppress(psutil.Error):
                named = state_file.identity(self.pid)
        return {
            "state": self.state,
            "group": self.group,
            **named,
            "restarts": self.restarts,
            "memory_kills": self.memory_kills,
            "failures": self.failures,
            "failure": self.failure,
            "ready_after_s": self.ready_after_s,
            "summary": self.plan.summary,
            "log": str(self.log_path),
        }
