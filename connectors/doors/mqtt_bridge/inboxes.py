"""Delivery to agents over MQTT: the bridge publishes the messages of a mailbox on an inbox (JE-26, DL-30).

**Delivers** each message at least once, those of one agent in the order of the log, several of them and several
agents at once. A message contains its id, so that the agent can recognise a repeated one.
**Acknowledges when** the agent confirms the message on its outbox: the reactor then claims it in the log. The
broker's PUBACK counts for nothing. A message without a confirmation stays unread. It is published again after a
pause, when the broker or the bridge was away, and when the agent says that it is connected. While the inbox has
no subscriber, the bridge tries again after a pause, and when the agent publishes something.
**Loses when** never: a copy that the broker loses, drops or forgets with a session is still unread in the log.

The gateway's settled stream only tells when to look. The bridge then asks the gateway for the pending messages
of a mailbox: at the start, after a gap, at each new message, and after each failure. Only the active bridge
delivers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from operator import itemgetter
from typing import Any, Final

import structlog
from paho.mqtt.reasoncodes import ReasonCode

from connectors.doors.mqtt_bridge.inbox_pace import InboxTurns, InboxWindows
from connectors.plumbing.gateway_client.event_stream import (
    GAP,
    SETTLED,
    SNAPSHOT,
    EventStream,
    ServerEvent,
    log_lost,
)
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.mqtt_link.payloads import INBOX_FIELDS
from schemas.settings.settings import Settings
from schemas.streams.agents.mqtt_agents import REGISTERED
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_DUE
from schemas.streams.mailboxes.message import DEFAULT_REALM, LEASED, MESSAGE_POSTED
from schemas.streams.mailboxes.message_text import shown_text
from trunkline_agent.errors import TrunklineError
from trunkline_agent.mqtt.mqtt_connection import NO_SUBSCRIBER, MqttConnection
from trunkline_agent.wire.ids import MAILBOX
from trunkline_agent.wire.moments import has_come, moment_of
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import inbox_topic
from trunkline_agent.wire.verdicts import ACCEPTED, REJECTED

log = structlog.stdlib.get_logger(__name__)

# The types of the records that put a message into a mailbox.
_DELIVERS: Final = f"{MESSAGE_POSTED},{MESSAGE_DUE}"
_WORKERS: Final = 4
# The messages that are read at once. It is more than an agent may have unconfirmed.
_PAGE: Final = 100
_TICK_S: Final = 0.2
_AGENTS_S: Final = 1.0
_AGAIN_S: Final = 1.0
# A gateway that has started anew knows no report.
_REPORT_S: Final = 30.0
_REPORTED: Final = 1000
_END_S: Final = 5.0


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
        # Called between the broker's answers and the confirmation: tests kill the bridge there.
        self._step: Callable[[], None] = lambda: None
        self._connecting = threading.Lock()
        self._connection: MqttConnection | None = None
        self._turns = InboxTurns(settings.mqtt.inbox_retry_s)
        self._windows = InboxWindows(settings.mqtt.inbox_confirm_s)
        self._asked_agents_at = self._reported_at = -math.inf
        self._reported: dict[str, int] = {}
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

    def on_outbox_message(self, agent: str, confirms: Sequence[str] | None) -> bool:
        """Note a message on the outbox of `agent`, so that the agent is connected. Does not block.

        It ends the pause after failed deliveries. `confirms` are the ids of the messages that it confirms; None
        if it is no confirmation. If there are none, messages without a confirmation are published again.
        Returns whether one of the messages waits for this confirmation.
        """
        self._turns.wake(agent)
        if confirms is None:
            return False
        if not confirms:
            self._windows.again(agent)
            self._turns.due(agent)
        return self._windows.begin_confirmation(agent, confirms)

    def on_confirmation(self, agent: str, message_ids: Sequence[str], verdict: str | None) -> None:
        """Publish further messages, now that the log has an agent's confirmation. Returns at once.

        `verdict` is that of the claim of these messages. None: it is not settled yet.
        """
        if verdict == REJECTED:
            self._windows.refuse_confirmation(agent, message_ids)
        elif verdict is not None:
            self._windows.confirm(agent, message_ids)
        if self._windows.is_open(agent):
            self._turns.due(agent)

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
            EventStream(gateway, path_of("events"), wanted, give_up_s=math.inf, lost=log_lost) as stream,
        ):
            was_active, self._asked_agents_at = False, -math.inf
            while not self._stop.is_set():
                event = stream.next(_TICK_S)
                if event is not None:
                    self._take(event)
                is_active = self._is_active()
                if is_active and time.monotonic() - self._asked_agents_at >= _AGENTS_S:
                    self._ask_agents(gateway)
                if is_active and (not was_active or self._is_cut_off()):
                    # The broker may have lost what it had.
                    self._windows.all_again()
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
        rows = gateway.get_all(path_of("mqtt-agents"), "agents", itemgetter("agent_name"))["agents"]
        self._on_agents(rows)
        names = {row["agent_name"] for row in rows if row["status"] == REGISTERED}
        self._turns.serve(names)
        self._windows.keep(names)
        self._asked_agents_at = time.monotonic()
        self._report_unconfirmed(gateway)

    def _report_unconfirmed(self, gateway: GatewayClient) -> None:
        """Report the agents that do not confirm, if they are others than before, or may be unknown again."""
        found = self._windows.unconfirmed()
        is_old = bool(found) and self._asked_agents_at - self._reported_at >= _REPORT_S
        if found != self._reported or is_old:
            most = dict(sorted(found.items(), key=lambda one: -one[1])[:_REPORTED])
            gateway.post(path_of("mqtt-load"), {"unconfirmed": most})
            self._reported, self._reported_at = found, self._asked_agents_at

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
                    self._turns.give_back(agent, is_done=is_done, again_s=self._windows.due_in_s(agent))

    def _serve(self, gateway: GatewayClient, agent: str) -> bool:
        """Publish pending messages, as many as may be without a confirmation.

        Returns False when the caller has to try again later. So it has after a TrunklineError.
        """
        while not self._stop.is_set() and self._is_active() and self._windows.is_open(agent):
            path = path_of("mailboxes", DEFAULT_REALM, agent)
            page = gateway.get(path, {"pending": "true", "limit": _PAGE})["messages"]
            if any(row["status"] == LEASED for row in page):
                # A lease at another door holds a message of this page. The page waits, so as to keep its order.
                return False
            published, repeats = self._windows.begin(agent, [str(row["message_id"]) for row in page])
            if repeats:
                log.warning("inbox_unconfirmed", agent=agent, messages=len(page), repeats=repeats)
            now = time.time()
            fresh = [row for row in page if row["message_id"] not in published and not is_over(row, now)]
            count, is_all = self._publish(agent, fresh)
            if not is_all:
                return False
            if not count:
                return True
        return True

    def _publish(self, agent: str, rows: Sequence[Mapping[str, Any]]) -> tuple[int, bool]:
        """Publish messages in their order, as many as the window has room for.

        Returns their number, and whether the broker has taken all of them for a subscriber.
        """
        if not rows:
            return 0, True
        connection, topic = self._live_connection(), inbox_topic(self._settings.mqtt.agents_prefix, agent)
        answers: list[tuple[str, Future[ReasonCode]]] = []
        refused: list[str] = []
        try:
            for row in rows:
                message_id, payload = str(row["message_id"]), wire_message(row)
                copy_s = self._windows.add(agent, message_id, len(payload))
                if copy_s is None:
                    break
                left_s = min(copy_s, seconds_left(row, time.time()))
                answer = connection.publish(topic, payload, expiry_s=max(1, int(left_s)))
                answers.append((message_id, answer))
                if len(answers) == 1 and self._is_refused(agent, connection.wait_answer(answer)):
                    # Without a subscriber the next ones would not arrive either, or come before this one.
                    refused.append(message_id)
                    break
            refused += [
                one for one, answer in answers[1:] if self._is_refused(agent, connection.wait_answer(answer))
            ]
        except TrunklineError:
            self._windows.drop(agent, [one for one, _ in answers])
            raise
        self._windows.drop(agent, refused)
        if len(refused) < len(answers):
            self._step()
        return len(answers), not refused

    def _is_refused(self, agent: str, answer: ReasonCode) -> bool:
        if answer.is_failure:
            log.warning("inbox_refused", agent=agent, why=str(answer))
        return bool(answer.is_failure or answer.value == NO_SUBSCRIBER)

    def _is_cut_off(self) -> bool:
        """Return whether the connection was lost since the last call."""
        with self._connecting:
            connection = self._connection
            if connection is None or not connection.lost.is_set():
                return False
            self._connection = None
        connection.drop()
        return True

    def _live_connection(self) -> MqttConnection:
        """Return the connection for all inboxes, opened anew when it was lost. Raises BackboneUnreachable."""
        with self._connecting:
            if self._connection is not None and self._connection.lost.is_set():
                raise self._connection.unreachable(self._connection.why)  # `_follow` takes note of that
            if self._connection is None:
                mqtt = self._settings.mqtt
                connection = MqttConnection(mqtt, keepalive_s=mqtt.bridge_keepalive_s)
                connection.open()
                self._connection = connection
            return self._connection


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


def seconds_left(row: Mapping[str, Any], now_s: float) -> float:
    """Return how many seconds after the time `now_s` a message expires, at least 0; infinity if it never does.

    `row` and `now_s` are as for `is_over`.
    """
    if row["expires_at"] is None:
        return math.inf
    return max(0.0, moment_of(str(row["expires_at"])) / 1e6 - now_s)
