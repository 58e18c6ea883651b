"""The clients of one seed: somebody who sends, and somebody who reads, at each door, each on a thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token
from schemas.settings.settings import Settings
from tests.faults.prove import load_messages as messages
from tests.faults.prove.client_faults import ClientFault, ClientFaults
from tests.faults.prove.delivery_doors import HubMailbox
from tests.faults.prove.delivery_load import DeliveryLoad
from tests.faults.prove.delivery_notes import Deliveries
from tests.faults.prove.hub_client import Clock, GaveUp, HubClient, shown, text_of
from tests.faults.prove.library_load import LARS, OLGA, UWE, LibraryLoad
from tests.faults.prove.load_jobs import BOSS, JobLoad, TaskLoad
from tests.faults.prove.mcp_client import McpClient, new_participant
from tests.faults.prove.oracle import Oracle
from tests.faults.prove.schedule import DUPLICATES, SKEW, Schedule
from tests.faults.prove.seed_parts import LISTENER, has_tasks
from trunkline_agent.queue import Queue

_JOBS: Final = 3
# For all clients together, which have no patience any more by then.
_JOIN_S: Final = 10.0


class Clients:
    """Registers them all when it is made, while all is well; `start` lets them begin.

    `failures`: answers that no door may give. `late`: what had no answer in all its time.
    """

    def __init__(
        self,
        settings: Settings,
        peer: Settings,
        schedule: Schedule,
        oracle: Oracle,
        deliveries: Deliveries,
        clock: Clock,
    ) -> None:
        self._settings, self._schedule, self._oracle, self._clock = settings, schedule, oracle, clock
        self.urls, self._both = [settings.gateway_url], [settings.gateway_url, peer.gateway_url]
        self.failures: list[str] = []
        self.late: list[str] = []
        self._hub: list[HubClient] = []
        self._threads: list[threading.Thread] = []
        self._operator = self._client(ensure_operator_token(settings))
        self._boss = boss = self._principal(BOSS, "delegator")
        for name in (messages.FRED, "fil", "fay"):
            self._principal(name)
        self._jobs = [JobLoad(settings, schedule, boss, oracle, clock, number) for number in range(_JOBS)]
        self._mcp = [self._mcp_agent(name) for name in ("mia", messages.MARA)]
        self._mcp[0].client.skew_s = next((skew for skew in schedule.skew_s if skew), 0.0)
        self._mqtt = [self._mqtt_agent(name) for name in ("mo", messages.MINA)]
        self._faulty = {name: self._token(name) for name in ("moe", messages.UTE)}
        # After one poll the queue knows the agent as a reader of files.
        Queue(queue_root(settings)).poll(messages.FRED)
        self._files = messages.FileSender(settings, messages.Words(schedule, "fil"), oracle, clock)
        self.deliveries = DeliveryLoad(
            self._both,
            [settings.mcp_server_url, peer.mcp_server_url],
            self._token,
            self._operator,
            deliveries,
            oracle,
            clock,
            schedule.seed,
        )
        self._log = deliveries
        self.library = self._library()
        # A gateway is ready before a process has described the listener's handler to it.
        while LISTENER not in text_of(self._operator.ask("GET", "/api/hub/listeners")):
            if not clock.has_patience():
                raise AssertionError("the listener did not come")
            time.sleep(0.1)

    def _client(self, token: str) -> HubClient:
        client = HubClient(self.urls, token, self._clock, self._schedule.seed * 100 + len(self._hub))
        self._hub.append(client)
        return client

    def _principal(self, name: str, role: str = "worker") -> HubClient:
        return self._client(self._token(name, role))

    def _token(self, name: str, role: str = "worker") -> str:
        answer = self._operator.ask("POST", "/api/hub/principals", json={"principal": name, "role": role})
        if answer.status != 201:
            raise AssertionError(f"{name} was not added: {shown(answer)}")
        return str(answer.json()["token"])

    def _mcp_agent(self, name: str) -> messages.McpAgent:
        words = messages.Words(self._schedule, name)
        key = new_participant(self._operator, name)
        urls = [self._settings.mcp_server_url]
        client = McpClient(urls, name, key, self._clock, self._schedule.seed)
        return messages.McpAgent(client, name, words, self._oracle, self._clock)

    def _mqtt_agent(self, name: str) -> messages.MqttSender:
        words = messages.Words(self._schedule, name)
        return messages.MqttSender(self._settings, name, self._operator, words, self._oracle, self._clock)

    def _library(self) -> LibraryLoad:
        folder, mqtt = self._settings.data_path.parent, self._settings.mqtt
        times = ("connect_timeout_s", "puback_timeout_s", "receipt_timeout_s", "publish_attempts")
        pauses = ("backoff_base_s", "backoff_max_s")
        fields = ("host", "port", "topic_prefix", *times, *pauses)
        self._principal(OLGA)
        return LibraryLoad(
            self._settings.gateway_url,
            self._principal(UWE),
            self._boss,
            self._boss.token,
            self._token(LARS),
            folder,
            folder / "points",
            self._oracle,
            self._clock,
            {name: getattr(mqtt, name) for name in fields},
        )

    def start(self) -> None:
        """Let all of them begin."""
        schedule, oracle, clock = self._schedule, self._oracle, self._clock
        senders = [
            messages.HubSender(self._principal(name), messages.Words(schedule, name), oracle, clock)
            for name in ("hugo", "hedy")
        ]
        xml = messages.XmlSender(self._principal("max"), messages.Words(schedule, "max"), oracle, clock)
        readers = (
            messages.HubReader(self._principal(messages.HANNA), messages.HANNA, oracle, clock),
            messages.FileReader(self._settings, oracle, clock),
        )
        tasks = [TaskLoad(self._boss, schedule, oracle, clock)] if has_tasks(schedule.seed) else []
        for one in (*self._jobs, *tasks, xml, *readers):
            self._run(type(one).__name__, one.run)
        sending = [
            self._run(type(one).__name__, one.run) for one in (*senders, self._files, *self._mcp, *self._mqtt)
        ]
        for name, run in self.library.runs():
            self._run(name, run)
        for name, run in self.deliveries.runs(lambda: not any(thread.is_alive() for thread in sending)):
            self._run(name, run)

    def faults(self) -> dict[str, ClientFault]:
        """Return the faults that clients make, by their names in the schedule."""
        ids = [agent.client_id for agent in self._mqtt]
        tokens = {messages.UTE: self._faulty[messages.UTE], messages.FOLA: self.deliveries.token(messages.FOLA)}
        return ClientFaults(
            self._settings,
            self._both,
            ids,
            tokens,
            lambda: HubMailbox(self._client(self._faulty["moe"]), "moe", self._log),
            self._operator,
            self._oracle,
            self._clock,
        ).by_name()

    def _run(self, name: str, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except GaveUp as error:
                self.late.append(f"no answer: {name}: {error}")
            except BaseException as error:  # told in the result, which would not see it in a thread
                self.failures.append(f"{name}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    @property
    def waiting(self) -> list[str]:
        """The names of the threads that still wait for an answer."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def leave(self) -> None:
        """Nobody reads any more."""
        for agent in self._mqtt:
            agent.close()

    def close(self) -> None:
        """End all of it."""
        self._clock.stopped.set()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for client in (*self._hub, *(agent.client for agent in self._mcp), self.deliveries):
            client.close()

    @property
    def answers_elsewhere(self) -> int:
        """How many requests another gateway than the first has answered."""
        return sum(client.answers_elsewhere for client in self._hub)

    def habits(self) -> Counter[str]:
        """How often they did what they should not."""
        found: Counter[str] = Counter()
        for job in self._jobs:
            found += job.done
        found[f"{SKEW}:clients"] += sum(agent.client.skewed for agent in self._mcp)
        repeats = sum(client.repeats for client in self._hub)
        found[f"{DUPLICATES}:delivery"] += self._files.duplicates + repeats
        return found
