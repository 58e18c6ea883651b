"""Starts and stops the agents of tasks, and fails tasks whose agent has ended too early (HH-03 to HH-05).

**Delivers** one container for each running task, on one gateway: the first gateway in the container's stream
provisions it. For each ended task it stops the processes on this host. **Acknowledges when** each step is a
settled record (`container.changed`, `task.failed`), before the next step. **Loses when** never silently: the
check of another gateway, or of the next one on this host, finds the work that a killed gateway left. A launch
that Kafka interrupts goes on when Kafka is back.
"""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from connectors.hub.launcher.launch_spec import (
    AGENT_TOKEN_VARIABLE,
    Launcher,
    LaunchFailed,
    LaunchSpec,
    Started,
)
from connectors.hub.live.live_view import LiveView
from connectors.hub.live.row_lists import RowLists
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.log_appender import LogAppender
from connectors.hub.services.mailboxes import MailboxIndex, token_mailbox
from connectors.hub.serving.identities import AgentKeyFiles, task_token
from connectors.plumbing.machine.background_service import ThreadedService
from connectors.plumbing.machine.process_tree import host_name
from schemas.effects.job_effects import stopped_with_task
from schemas.effects.mailbox_effects import completes_a_task
from schemas.fold import stream_kind as states
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.agents.agent_registry import DEFINED, AgentJoined, AgentRow, ParticipantRow
from schemas.streams.container.containers import (
    CONFIGURING,
    MONITORING,
    OPEN,
    PROVISIONING,
    RECYCLED,
    RECYCLING,
    STARTING,
    ContainerChange,
    ContainerRow,
)
from schemas.streams.mailboxes.mailbox_bodies import MailboxClearing
from schemas.streams.mailboxes.message import MessageBodyRow
from schemas.streams.task.task_registry import (
    ERROR_LIMIT,
    TASK_TERMINAL,
    TaskFailure,
    TaskRow,
    TokenRow,
)
from trunkline_agent.credentials import (
    AGENT_ID_VARIABLE,
    AGENT_KEY_VARIABLE,
    CA_VARIABLE,
    HUB_URL_VARIABLE,
    MCP_URL_VARIABLE,
)
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

log = structlog.stdlib.get_logger(__name__)

DOOR: Final = "launcher"
BACKEND: Final = "local-process"
_AT_ONCE: Final = 4
# A launch that takes longer counts as abandoned by its gateway.
_LAUNCH_S: Final = 60.0
# The interval in which an interrupted launch is tried again.
_RETRY_S: Final = 1.0
_NAMESPACE: Final = uuid.UUID("0f0e6c0a-27d1-5b55-9f0d-6d6f2b0f9a11")


def container_of(task_id: str) -> str:
    """Return `task-<task id>`, the name of the container that a launcher starts for a task."""
    return f"task-{task_id}"


def _succeeded(step: SettledRecord) -> bool:
    """Return whether a step of a launch was accepted, now or before, and the container still exists."""
    ended = (RECYCLING, RECYCLED)
    return step.verdict in (ACCEPTED, DUPLICATE) and step.status_after not in ended


class TaskKeeper(ThreadedService):
    """The background service that starts a process for each running task's agent, and stops it at the end.

    A check that fails is logged, and repeated after at most `gateway.task_check_s` seconds.
    """

    follows = (TaskRow,)

    def __init__(
        self,
        settings: Settings,
        keyring: Keyring,
        live_view: LiveView,
        lists: RowLists,
        mailboxes: MailboxIndex,
        appender: LogAppender,
        launcher: Launcher,
    ) -> None:
        super().__init__("task-check")
        self._settings = settings
        self._keyring = keyring
        self._live_view = live_view
        self._lists = lists
        self._mailboxes = mailboxes
        self._appender = appender
        self._launcher = launcher
        self._keys = AgentKeyFiles(settings)
        self._host = host_name()
        self._name = f"gateway-{uuid.uuid4().hex[:12]}"
        self._is_open = False
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self._again: set[str] = set()
        # By task: this gateway's unfinished launches, and the started process, once there is one.
        self._launches: dict[str, Started | None] = {}
        self._hands = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="task-keeper")

    def open(self) -> None:
        """Start the thread that checks all tasks now and every `gateway.task_check_s` seconds. Returns at once.

        From now on `on_change` checks each task that changes, too.
        """
        self._is_open = True
        super().open()

    def close(self) -> None:
        """Stop the thread, and wait for the checks that are under way. The processes of agents keep running."""
        super().close()
        self._hands.shutdown(wait=True, cancel_futures=True)

    def on_change(self, change: AppliedChange) -> None:
        """Schedule a check of a task whose row in the live view has changed. Does not block.

        The live view calls this method on its own thread, for each changed row of any type. Rows of other types
        are ignored, and all rows before `open`.
        """
        if self._is_open and isinstance(change.row, TaskRow):
            self._look_soon(change.key)

    def check(self) -> None:
        """Schedule a check of each running task, and of each task whose container is not recycled yet.

        Returns at once. A check runs on a worker thread: it starts a missing agent, stops the agent of an ended
        task, or fails a task whose agent has ended.
        """
        for task in self._lists.tasks.newest([states.RUNNING]):
            self._look_soon(task.task_id)
        for container in self._lists.containers.newest([OPEN]):
            self._look_soon(container.task_id)

    def _run(self) -> None:
        while True:
            self.check()
            next_s = time.monotonic() + self._settings.gateway.task_check_s
            while (left_s := next_s - time.monotonic()) > 0:
                if self._closing.wait(min(left_s, _RETRY_S)):
                    return
                for task_id in list(self._launches):
                    self._look_soon(task_id)

    def _look_soon(self, task_id: str) -> None:
        with self._lock:
            if task_id in self._under_way:
                self._again.add(task_id)
                return
            self._under_way.add(task_id)
        try:
            self._hands.submit(self._look, task_id)
        except RuntimeError:  # closing
            with self._lock:
                self._under_way.discard(task_id)

    def _look(self, task_id: str) -> None:
        try:
            self._look_at(task_id)
        except TrunklineError as error:
            log.warning("task_check_waits", task_id=task_id, why=str(error))
        except Exception:
            log.exception("task_check_failed", task_id=task_id)
        with self._lock:
            self._under_way.discard(task_id)
            is_wanted = task_id in self._again
            self._again.discard(task_id)
        if is_wanted and not self._closing.is_set():
            self._look_soon(task_id)

    def _look_at(self, task_id: str) -> None:
        task = self._live_view.get(TaskRow, task_id)
        found = self._live_view.get(ContainerRow, container_of(task_id))
        if task is None:
            return
        if task.status in TASK_TERMINAL:
            self._launches.pop(task_id, None)
            if found is not None and found.state != RECYCLED and found.host in (None, self._host):
                self._recycle(task, found, None)
        elif task.status == states.RUNNING:
            if found is None or task_id in self._launches:
                self._launch(task)
            else:
                self._check_alive(task, found)

    def _check_alive(self, task: TaskRow, container: ContainerRow) -> None:
        if container.state in (RECYCLING, RECYCLED):
            self._fail(task, container.error or "the container of the task has ended")
        elif container.handle is None:
            if time.time() - container.changed_at / 1e6 > _LAUNCH_S:
                self._fail(task, "the gateway that launched the task's agent has ended")
        elif container.host == self._host and not self._launcher.alive(container.handle):
            # It may just have sent its result; then the process manager completes the task.
            self._live_view.catch_up(self._settings.gateway.settle_timeout_s)
            if not self._has_sent_its_result(task):
                self._fail(task, "the agent's process ended before the task")

    def _has_sent_its_result(self, task: TaskRow) -> bool:
        bodies = (self._live_view.get(MessageBodyRow, key) for key in self._mailboxes.of_task(task.task_id))
        return any(body is not None and completes_a_task(body.body) is not None for body in bodies)

    def _launch(self, task: TaskRow) -> None:
        """Start the task's agent, unless another gateway does, or continue an interrupted launch."""
        started = self._launches.setdefault(task.task_id, None)
        if started is None:
            started = self._launches[task.task_id] = self._start(task)
        if started is not None:
            if _succeeded(self._change(task, states.RUNNING, started)):
                self._change(task, MONITORING)
                # The task may have ended meanwhile.
                with self._lock:
                    self._again.add(task.task_id)
            else:
                # The task and its container were ended by a gateway that did not know of this process.
                self._launcher.stop(started.handle, self._settings.gateway.stop_grace_s)
                self._leave(task.task_id)
        self._launches.pop(task.task_id, None)

    def _start(self, task: TaskRow) -> Started | None:
        """Claim the container and start the agent. Returns None when that failed or another gateway has it."""
        agent = self._live_view.get(AgentRow, task.agent_name)
        defined = agent if agent is not None and agent.status == DEFINED else None
        image = task.image or (None if defined is None else defined.image)
        if image is None:
            self._fail(task, "the agent's definition was removed")
            return None
        if not _succeeded(self._change(task, PROVISIONING)):
            return None
        self._change(task, CONFIGURING)
        environment = {
            HUB_URL_VARIABLE: self._settings.gateway_url,
            AGENT_TOKEN_VARIABLE: task_token(self._keyring, task.task_id, task.token_id),
        }
        if self._settings.gateway.ca_certs is not None:
            environment[CA_VARIABLE] = str(self._settings.gateway.ca_certs.absolute())
        spec = LaunchSpec(
            container=container_of(task.task_id),
            task_id=task.task_id,
            agent_name=task.agent_name,
            image=image,
            description=task.description,
            environment=environment,
            hardened=task.image is None and defined is not None and defined.hardened,
        )
        if not _succeeded(self._change(task, STARTING)):
            return None
        try:
            if task.image is not None:
                environment |= self._join(task)
            started = self._launcher.start(spec)
        except LaunchFailed as error:
            why = spec.blanked(str(error))[:500]
            log.warning("launch_failed", task_id=task.task_id, why=why)
            self._change(task, RECYCLING, error=why)
            self._change(task, RECYCLED)
            self._fail(task, why)
            self._leave(task.task_id)
            return None
        log.info("launched", task_id=task.task_id, agent=task.agent_name, handle=started.handle)
        return started

    def _join(self, task: TaskRow) -> dict[str, str]:
        """Register the task's agent as a participant with a new key.

        Returns:
            The environment variables for the agent.

        Raises:
            LaunchFailed: The key cannot be written, or the name is in use.
        """
        try:
            path, public_key = self._keys.make(task.task_id)
        except OSError as error:
            raise LaunchFailed(f"cannot write the agent's key: {error.strerror}") from error
        token = None if task.token_id is None else self._live_view.get(TokenRow, task.token_id)
        body = AgentJoined(
            agent_name=task.agent_name,
            request_id=task.task_id,
            task=task.description,
            capabilities=[] if token is None else token.capabilities,
            public_key=public_key,
            task_id=task.task_id,
        )
        record = body.record(door=DOOR, principal=self._host)
        if self._appender.settle_in_thread(record).verdict not in (ACCEPTED, DUPLICATE):
            raise LaunchFailed("an agent of this name takes part already")
        return {
            AGENT_ID_VARIABLE: task.agent_name,
            AGENT_KEY_VARIABLE: str(path),
            MCP_URL_VARIABLE: self._settings.mcp_server_url,
        }

    def _leave(self, task_id: str) -> None:
        """Delete the key of the task's agent and record that the agent has stopped.

        The process manager records it, too, unless the agent joined after its task had ended.
        """
        self._keys.remove(task_id)
        task = self._live_view.get(TaskRow, task_id)
        if task is not None and task.image is not None:
            participant = self._live_view.get(ParticipantRow, task.agent_name)
            stopped = stopped_with_task(task, participant)
            if stopped is not None:
                self._appender.settle_in_thread(stopped)

    def _recycle(self, task: TaskRow, container: ContainerRow, error: str | None) -> None:
        if container.state != RECYCLING:
            self._change(task, RECYCLING, error=error)
        # A gateway that was killed during a launch has not recorded the handle.
        handle = container.handle or self._launcher.find(container.container)
        if handle is not None:
            self._launcher.stop(handle, self._settings.gateway.stop_grace_s)
        self._leave(task.task_id)
        if self._settings.gateway.mailbox_per_token and task.token_id is not None:
            # The token is revoked, so no client can drain its mailbox any more.
            mailbox = token_mailbox(task.agent_name, task.token_id)
            request_id = f"ended-{task.task_id}"
            clearing = MailboxClearing(to=mailbox, request_id=request_id).record(
                door=DOOR, principal=self._host
            )
            self._appender.settle_in_thread(clearing)
        self._change(task, RECYCLED)

    def _fail(self, task: TaskRow, why: str) -> None:
        # The id follows from the task alone, so several gateways fail it once.
        request_id = str(uuid.uuid5(_NAMESPACE, f"{task.task_id}/failed"))
        body = TaskFailure(task_id=task.task_id, request_id=request_id, error=why[:ERROR_LIMIT])
        self._appender.settle_in_thread(body.record(door=DOOR, principal=self._host))

    def _change(
        self, task: TaskRow, state: str, started: Started | None = None, error: str | None = None
    ) -> SettledRecord:
        body = ContainerChange.model_validate(
            {
                "container": container_of(task.task_id),
                "state": state,
                "task_id": task.task_id,
                "agent_name": task.agent_name,
                "backend": BACKEND,
                "launcher": self._name,
                "host": self._host,
                "handle": None if started is None else started.handle,
                "port": None if started is None else started.port,
                "error": error,
            }
        )
        return self._appender.settle_in_thread(body.record(door=DOOR, principal=self._host))
