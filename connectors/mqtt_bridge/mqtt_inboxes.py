"""The bridge's way to the agents: what lies in the mailbox of an agent over MQTT is published on its inbox
(JE-26).

**Delivers** each message at least once, those of an agent in the order of the log, one at a time; many agents
side by side. A message has its id in it, so that one that comes twice is known.
**Acknowledges when** the broker has it for a subscriber: then the message is claimed by its id. While nobody
listens it stays unread, and is tried again after a while, and when something comes from that agent.
**Loses when** the broker loses what it has acknowledged.

The gateway's settled stream is the news, what is pending in a mailbox is the truth: asked for at the start,
after a gap, with each news, and after each failure. Only the active bridge delivers.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from connectors.gateway_client.event_stream import GAP, SETTLED, SNAPSHOT, EventStream, ServerEvent
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.log.publisher import Publisher, RecordRefused
from connectors.mqtt_bridge.inbox_connection import NOBODY_LISTENS, InboxConnection
from connectors.mqtt_bridge.inbox_messages import claim_of, is_over, wire_message
from connectors.mqtt_bridge.inbox_turns import InboxTurns
from connectors.mqtt_link.agent_topics import agent_of, inbox_topic
from schemas.errors import TrunklineError
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings
from schemas.streams.agents.mqtt_agents import REGISTERED
from schemas.wire.ids import MAILBOX
from schemas.wire.message import DEFAULT_REALM, LEASED
from schemas.wire.record import MESSAGE_POSTED
from schemas.wire.verdicts import ACCEPTED

log = structlog.stdlib.get_logger(__name__)

_WORKERS: Final = 4
# So many are published before they are claimed by one record; a bridge that is killed publishes them again.
_PAGE: Final = 20
_TICK_S: Final = 0.2
_AGENTS_S: Final = 1.0
_AGAIN_S: Final = 1.0
_REMEMBERED: Final = 20_000
_ACK_GRACE_S: Final = 5.0
_END_S: Final = 5.0


class AgentInboxes:
    """Runs on threads of its own from `start` until `stop` is set; `join` it then. `is_active` says whether
    this bridge is the one that works. `step` is called between the broker's answer and the claim: tests kill
    there.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event,
        is_active: Callable[[], bool],
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._stop = stop
        self._is_active = is_active
        self._step = step
        self._connection = InboxConnection(settings.mqtt)
        self._turns = InboxTurns(settings.mqtt.inbox_retry_s)
        self._lock = threading.Lock()
        self._handed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._unclaimed: dict[str, list[str]] = {}
        self._publisher: Publisher | None = None
        self._asked_agents_at = -math.inf
        self._threads = [
            threading.Thread(target=self._run, args=(self._follow,), name="inbox-news", daemon=True)
        ]
        self._threads += [
            threading.Thread(target=self._run, args=(self._work,), name=f"inboxes-{number}", daemon=True)
            for number in range(_WORKERS)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for the end, after `stop` is set."""
        self._turns.close()
        deadline = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._connection.close()
        if self._publisher is not None:
            self._publisher.close(_ACK_GRACE_S)

    def heard(self, topic: str) -> None:
        """Something came on this outbox: its agent is there. Quick, for the thread that reads."""
        agent = agent_of(self._settings.mqtt.agents_prefix, topic)
        if agent is not None:
            self._turns.wake(agent)

    def _run(self, work: Callable[[], None]) -> None:
        told = ""
        while not self._stop.is_set():
            try:
                work()
            except TrunklineError as error:
                if told != str(error):
                    told = str(error)
                    log.warning("inboxes_wait", why=told)
            except Exception:
                log.exception("inboxes_failed")
            self._stop.wait(_AGAIN_S)

    # The thread that hears the news.

    def _follow(self) -> None:
        wanted = {"kind": MAILBOX, "type": MESSAGE_POSTED, "verdict": ACCEPTED}
        with (
            GatewayClient(self._settings) as gateway,
            EventStream(gateway, path_of("events"), wanted, give_up_s=math.inf, lost=_tell) as stream,
        ):
            was_active, self._asked_agents_at = False, -math.inf
            while not self._stop.is_set():
                event = stream.next(_TICK_S)
                if event is not None:
                    self._take(event)
                is_active = self._is_active()
                if is_active and time.monotonic() - self._asked_agents_at >= _AGENTS_S:
                    self._ask_agents(gateway)
                if is_active and not was_active:
                    self._turns.all_are_due()
                was_active = is_active

    def _take(self, event: ServerEvent) -> None:
        if event.name in (GAP, SNAPSHOT):
            log.info("inboxes_follow", because=event.name)
            self._turns.all_are_due()
        elif event.name == SETTLED:
            realm, _, agent = str(event.data["stream"]).removeprefix(f"{MAILBOX}/").partition("/")
            if realm == DEFAULT_REALM:
                self._turns.due(agent)

    def _ask_agents(self, gateway: GatewayClient) -> None:
        rows = gateway.get(path_of("mqtt-agents"))["agents"]
        self._turns.serve({row["agent_name"] for row in rows if row["status"] == REGISTERED})
        self._asked_agents_at = time.monotonic()

    # The threads that deliver.

    def _work(self) -> None:
        with GatewayClient(self._settings) as gateway:
            while not self._stop.is_set():
                if not self._is_active():
                    self._stop.wait(_TICK_S)
                    continue
                agent = self._turns.take(_TICK_S)
                if agent is None:
                    continue
                is_done = False
                try:
                    is_done = self._serve(gateway, agent)
                finally:
                    self._turns.give_back(agent, is_done=is_done)

    def _serve(self, gateway: GatewayClient, agent: str) -> bool:
        """Deliver what is pending; False when it has to be tried again. Raises TrunklineError, which is too."""
        self._claim(agent, [])
        after: dict[str, str] = {}
        while not self._stop.is_set() and self._is_active():
            path = path_of("mailboxes", DEFAULT_REALM, agent)
            page = gateway.get(path, {"pending": "true", "limit": _PAGE, **after})["messages"]
            if not page:
                return True
            if any(row["status"] == LEASED for row in page):
                # An agent has one consuming door at a time, and this mailbox has another.
                return False
            if not self._deliver(agent, page):
                return False
            after = {"after": page[-1]["message_id"]}
        return True

    def _deliver(self, agent: str, page: list[Mapping[str, Any]]) -> bool:
        """Publish a page, one message after the other, and claim what the broker has taken."""
        topic, taken, is_all = inbox_topic(self._settings.mqtt.agents_prefix, agent), [], True
        try:
            for row in page:
                message_id = str(row["message_id"])
                if self._is_handed(agent, message_id) or is_over(row, time.time()):
                    continue
                answer = self._connection.publish(topic, wire_message(row))
                if answer.is_failure or answer.value == NOBODY_LISTENS:
                    if answer.is_failure:
                        log.warning("inbox_refused", agent=agent, why=str(answer))
                    is_all = False
                    break
                self._note_handed(agent, message_id)
                taken.append(message_id)
        finally:
            if taken:
                self._step()
                self._claim(agent, taken)
        return is_all

    def _claim(self, agent: str, message_ids: list[str]) -> None:
        """Claim these, and what could not be claimed before. Raises BackboneUnreachable: it is kept."""
        with self._lock:
            wanted = [*self._unclaimed.get(agent, ()), *message_ids]
            if not wanted:
                return
            self._unclaimed[agent] = wanted
        record = claim_of(agent, wanted)
        try:
            self._live_publisher().append(record).result(self._settings.kafka.delivery_timeout_s + _ACK_GRACE_S)
        except RecordRefused as error:
            log.error("claim_refused", agent=agent, why=str(error))
        with self._lock:
            self._unclaimed.pop(agent, None)

    def _live_publisher(self) -> Publisher:
        with self._lock:
            if self._publisher is not None and self._publisher.failed:
                publisher, self._publisher = self._publisher, None
                publisher.close(_ACK_GRACE_S)
            if self._publisher is None:
                check_topic(self._settings)
                self._publisher = Publisher(self._settings)
            return self._publisher

    def _is_handed(self, agent: str, message_id: str) -> bool:
        with self._lock:
            return (agent, message_id) in self._handed

    def _note_handed(self, agent: str, message_id: str) -> None:
        with self._lock:
            self._handed[agent, message_id] = None
            if len(self._handed) > _REMEMBERED:
                self._handed.popitem(last=False)


def _tell(why: str | None) -> None:
    if why is None:
        log.info("gateway_back")
    else:
        log.warning("gateway_away", why=why)
