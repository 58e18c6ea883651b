"""Delivery to agents over MQTT: the bridge publishes the messages of an agent's mailbox on its inbox (JE-26).

**Delivers** each message at least once, those of one agent in the order of the log, one at a time, and several
agents at once. A message contains its id, so that the agent can recognise a repeated one.
**Acknowledges when** the broker has the message for a subscriber: then the bridge claims it by its id. While
the inbox has no subscriber the message stays unread. The bridge tries again after a pause, and when the agent
publishes something.
**Loses when** the broker loses what it has acknowledged.

The gateway's settled stream only tells when to look. The bridge then asks the gateway for the pending messages
of a mailbox: at the start, after a gap, at each new message, and after each failure. Only the active bridge
delivers.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from connectors.gateway_client.event_stream import GAP, SETTLED, SNAPSHOT, EventStream, ServerEvent
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.log.publisher import RecordRefused
from connectors.log.renewing_publisher import RenewingPublisher
from connectors.mqtt_bridge.bridge_records import DOOR
from connectors.mqtt_bridge.inbox_turns import InboxTurns
from connectors.mqtt_link.inbox_payload import INBOX_FIELDS
from schemas.keys.record_macs import MQTT_BRIDGE
from schemas.settings.settings import Settings
from schemas.streams.agents.mqtt_agents import REGISTERED
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_DUE
from schemas.streams.mailboxes.mailbox_requests import claim_of_record
from schemas.streams.mailboxes.message import DEFAULT_REALM, LEASED, MESSAGE_POSTED
from schemas.streams.mailboxes.message_text import shown_text
from schemas.wire.record import OutgoingRecord
from trunkline_agent.errors import TrunklineError
from trunkline_agent.mqtt.mqtt_connection import NO_SUBSCRIBER, MqttConnection
from trunkline_agent.wire.ids import MAILBOX
from trunkline_agent.wire.moments import has_come
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import inbox_topic
from trunkline_agent.wire.verdicts import ACCEPTED

log = structlog.stdlib.get_logger(__name__)

# The types of the records that put a message into a mailbox.
_DELIVERS: Final = f"{MESSAGE_POSTED},{MESSAGE_DUE}"
_WORKERS: Final = 4
# So many messages are published before one record claims them. A bridge that is killed publishes them again.
_PAGE: Final = 20
_TICK_S: Final = 0.2
_AGENTS_S: Final = 1.0
_AGAIN_S: Final = 1.0
_REMEMBERED: Final = 20_000
_ACK_GRACE_S: Final = 5.0
_END_S: Final = 5.0
_NAMESPACE: Final = uuid.UUID("0d9a5b5e-94c3-4f0b-8f5e-7b3a6f1c2e41")


class AgentInboxes:
    """The delivery of mailbox messages to agents over MQTT, on threads of its own.

    The threads run from `start` until the event `stop` is set. Call `join` then. They deliver only while
    `is_active()` returns True, that is, while this bridge is the active one at the broker. They retry while the
    gateway or the broker does not answer. `on_agents` is called each second with the gateway's list of agents.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event,
        is_active: Callable[[], bool],
        on_agents: Callable[[Sequence[Mapping[str, Any]]], None] = lambda agents: None,
    ) -> None:
        self._settings = settings
        self._on_agents = on_agents
        self._stop = stop
        self._is_active = is_active
        # Called between the broker's answer and the claim: tests kill the bridge there.
        self._step: Callable[[], None] = lambda: None
        self._connecting = threading.Lock()
        self._connection: MqttConnection | None = None
        self._turns = InboxTurns(settings.mqtt.inbox_retry_s)
        self._lock = threading.Lock()
        self._handed: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._unclaimed: dict[str, list[str]] = {}
        self._publisher = RenewingPublisher(settings, signer=MQTT_BRIDGE, close_s=_ACK_GRACE_S)
        self._asked_agents_at = -math.inf
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"inboxes-{number}", daemon=True)
            for number, work in enumerate([self._follow, *[self._work] * _WORKERS])
        ]

    def start(self) -> None:
        """Start the threads: one that follows the gateway's stream, and four that deliver messages.

        Returns at once.
        """
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait at most 5 s for the threads to end, and close the connections. Call it after `stop` was set."""
        self._turns.close()
        deadline = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._connection is not None:
            self._connection.drop()
        self._publisher.close()

    def on_outbox_message(self, agent: str) -> None:
        """End the pause after failed deliveries to `agent`: a message on its outbox shows that it is connected.

        `agent` is the name in the outbox topic. An agent without a pause is ignored. Returns at once: the
        delivery threads do the work.
        """
        self._turns.wake(agent)

    def _run(self, work: Callable[[], None]) -> None:
        logged = ""
        while not self._stop.is_set():
            try:
                work()
            except TrunklineError as error:
                if logged != str(error):
                    logged = str(error)
                    log.warning("inboxes_wait", why=logged)
            except Exception:
                log.exception("inboxes_failed")
            self._stop.wait(_AGAIN_S)

    # The thread that follows the gateway's stream.

    def _follow(self) -> None:
        wanted = {"kind": MAILBOX, "type": _DELIVERS, "verdict": ACCEPTED}
        with (
            GatewayClient(self._settings) as gateway,
            EventStream(gateway, path_of("events"), wanted, give_up_s=math.inf, lost=_log_gateway) as stream,
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
        self._on_agents(rows)
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
        """Deliver the pending messages.

        Returns False when the caller has to try again later. So it has after a TrunklineError.
        """
        self._claim(agent, [])
        after: dict[str, str] = {}
        while not self._stop.is_set() and self._is_active():
            path = path_of("mailboxes", DEFAULT_REALM, agent)
            page = gateway.get(path, {"pending": "true", "limit": _PAGE, **after})["messages"]
            if not page:
                return True
            if any(row["status"] == LEASED for row in page):
                # A lease at another door holds a message of this page. The page waits, so as to keep its order.
                return False
            if not self._deliver(agent, page):
                return False
            after = {"after": page[-1]["message_id"]}
        return True

    def _deliver(self, agent: str, page: list[Mapping[str, Any]]) -> bool:
        """Publish a page, one message after the other, and claim the messages that the broker has taken."""
        topic, taken, is_all = inbox_topic(self._settings.mqtt.agents_prefix, agent), [], True
        try:
            for row in page:
                message_id = str(row["message_id"])
                if self._is_handed(agent, message_id) or is_over(row, time.time()):
                    continue
                answer = self._live_connection().publish_and_wait(topic, wire_message(row))
                if answer.is_failure or answer.value == NO_SUBSCRIBER:
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
        """Claim these messages and those that could not be claimed before.

        Raises BackboneUnreachable; they are then claimed at the next call.
        """
        # Only the thread that serves an agent uses the agent's entry.
        wanted = [*self._unclaimed.get(agent, ()), *message_ids]
        if not wanted:
            return
        self._unclaimed[agent] = wanted
        record = claim_of(agent, wanted)
        try:
            self._publisher.live().append(record).result(self._settings.kafka.delivery_timeout_s + _ACK_GRACE_S)
        except RecordRefused as error:
            log.error("claim_refused", agent=agent, why=str(error))
        self._unclaimed.pop(agent, None)

    def _live_connection(self) -> MqttConnection:
        """Return the connection for all inboxes, opened anew when it was lost. Raises BackboneUnreachable."""
        with self._connecting:
            if self._connection is None or self._connection.lost.is_set():
                if self._connection is not None:
                    self._connection.drop()
                mqtt = self._settings.mqtt
                self._connection = MqttConnection(mqtt, keepalive_s=mqtt.bridge_keepalive_s)
                self._connection.open()
            return self._connection

    def _is_handed(self, agent: str, message_id: str) -> bool:
        with self._lock:
            return (agent, message_id) in self._handed

    def _note_handed(self, agent: str, message_id: str) -> None:
        with self._lock:
            self._handed[agent, message_id] = None
            if len(self._handed) > _REMEMBERED:
                self._handed.popitem(last=False)


def wire_message(row: Mapping[str, Any]) -> bytes:
    """Return the JSON payload that is published on an agent's inbox for one message.

    `row` is the message, an object of the gateway's JSON answer that lists a mailbox. The payload has the
    message's fields, and its sender as `from`. Raises KeyError when a field is missing.
    """
    fields = {name: row[name] for name in INBOX_FIELDS}
    if row["body"] is not None:
        fields["body"], fields["content_type"] = shown_text(row["body"], row["content_type"])
    return canonical({"schema_version": 1, "from": row["sender"], **fields})


def is_over(row: Mapping[str, Any], now_s: float) -> bool:
    """Return whether a message has expired at the time `now_s`, in seconds since 1970.

    `row` is the message, an object of the gateway's JSON answer that lists a mailbox. A message whose
    `expires_at` is None never expires.
    """
    return row["expires_at"] is not None and has_come(str(row["expires_at"]), int(now_s * 1e6))


def claim_of(agent: str, message_ids: Sequence[str]) -> OutgoingRecord:
    """Return the record that claims messages of an agent's mailbox: it gives them to the agent for good.

    The same arguments give the same record in any bridge, so a repeated claim changes nothing.
    """
    request_id = str(uuid.uuid5(_NAMESPACE, "/".join((agent, *message_ids))))
    return claim_of_record(DEFAULT_REALM, agent, request_id, message_ids, door=DOOR, principal=agent)


def _log_gateway(why: str | None) -> None:
    if why is None:
        log.info("gateway_back")
    else:
        log.warning("gateway_away", why=why)
