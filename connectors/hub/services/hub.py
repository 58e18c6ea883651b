"""The object `Hub`, through which the gateway's handlers share live view, appender, indexes and services."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import structlog

from connectors.hub.blobs.blob_keeper import BlobKeeper
from connectors.hub.blobs.blob_store import BlobStore
from connectors.hub.launcher.launch_spec import read_launchers
from connectors.hub.launcher.local_processes import LocalProcessLauncher
from connectors.hub.live.live_view import LiveView
from connectors.hub.live.log_clock import LogClock
from connectors.hub.live.row_lists import RowIndex, RowLists
from connectors.hub.reactor.derived_records import TopicsBySubscriber
from connectors.hub.reactor.own_records import OwnAnswers
from connectors.hub.reactor.timers import timers_of_kinds
from connectors.hub.services.audit_log import AuditLog
from connectors.hub.services.conversations import Conversations
from connectors.hub.services.listeners import Listeners
from connectors.hub.services.log_appender import LogAppender
from connectors.hub.services.mailbox_waits import MailboxWaits
from connectors.hub.services.mailboxes import MailboxIndex, newest_final
from connectors.hub.services.picking import BrokerOverlays, FreshView, PendingJobs, Picker
from connectors.hub.services.principal_limits import LiveJobs, NameFacts, PrincipalLimits, PublishPauses
from connectors.hub.services.start_records import (
    AgentRegistrar,
    OrganismKeeper,
    append_lacking_mac_rules,
    append_noted_switch,
)
from connectors.hub.services.table_metrics import (
    BridgeWatch,
    MachineMetrics,
    StateMetrics,
    TableMetrics,
)
from connectors.hub.services.task_keeper import TaskKeeper
from connectors.hub.serving.answers import DOOR, RefusalRecorder
from connectors.hub.serving.identities import Identities
from connectors.hub.serving.metrics import Metrics, RequestLines
from connectors.hub.serving.shares import ByteBudget
from connectors.hub.serving.streaming_answer import StreamPlaces
from connectors.hub.serving.turns import FairTurns, RefusalPace, UnderWay
from connectors.hub.webhooks.webhook_client import WebhookClient, WebhookHealth
from connectors.plumbing.machine.background_service import BackgroundService
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.control.organism import ListenerRow
from schemas.streams.job.job_registry import JobRow
from schemas.streams.mailboxes.message import DEFAULT_REALM, MessageRow
from schemas.streams.principal.principals import HUB
from schemas.streams.task.task_registry import TokenRevocation, TokenRow
from trunkline_agent.errors import TrunklineError

log = structlog.stdlib.get_logger(__name__)

_PRUNED: Final = 10_000
# A test of a webhook lasts as long as the address likes, up to the time limit of a call.
_TESTS_AT_ONCE: Final = 8


class Hub:
    """The parts of one gateway: live view, log appender, indexes and background services.

    `open` and `close` start and stop the parts in order. Route modules take the parts that they use from here.
    One process has one hub.
    """

    def __init__(
        self,
        settings: Settings,
        keyring: Keyring,
        operator_token: str,
        live_view: LiveView,
        services: Sequence[BackgroundService] = (),
    ) -> None:
        self.settings = settings
        self.keyring = keyring
        self.live_view = live_view
        self.boot_id = uuid.uuid4().hex[:12]
        self.log_clock = LogClock(settings.kafka.partitions)
        self.identities = Identities(operator_token, self.log_clock.now_s)
        self.pending = PendingJobs(lambda job_id: live_view.get(JobRow, job_id))
        self.overlays = BrokerOverlays(live_view.entries, keyring)
        self.lists = RowLists(live_view)
        self.mailboxes = MailboxIndex()
        self.live_jobs, self.topics = LiveJobs(), TopicsBySubscriber()
        self.names = NameFacts(live_view.get)
        self.limits = PrincipalLimits(live_view, self.names, self.mailboxes, self.live_jobs, self.topics)
        self.publish_pauses = PublishPauses()
        # How often messages to an agent over MQTT were published again, as the bridge has reported it last.
        self.unconfirmed_inboxes: dict[str, int] = {}
        self.mailbox_waits = MailboxWaits()
        self.listeners = Listeners(live_view.entries, self._waiting_rows)
        self.conversations = Conversations(keyring)
        self.audit = AuditLog(settings.gateway.audit_messages)
        bridges = BridgeWatch(settings)
        self.answer_memory = ByteBudget(settings.gateway.answer_memory_bytes)
        state = StateMetrics(
            live_view,
            self.lists,
            self.mailboxes,
            self.mailbox_waits,
            self.answer_memory,
            self.log_clock,
            lambda: len(self.unconfirmed_inboxes),
            settings.gateway.long_lease_s,
        )
        tables, machine = TableMetrics(settings, live_view), MachineMetrics(settings)
        self.metrics = Metrics((state, tables, machine, bridges))
        self.request_lines = RequestLines()
        self.webhook_client = WebhookClient(settings.webhooks)
        self.webhook_health = WebhookHealth()
        self.webhook_tests = asyncio.Semaphore(_TESTS_AT_ONCE)
        self.appender = LogAppender(settings, live_view, self.log_clock)
        self.own_answers = OwnAnswers()
        self.turns, self.pace, self.under_way = FairTurns(), RefusalPace(), UnderWay()
        self.refusals = RefusalRecorder(self.appender.append_unattended)
        self.fresh = FreshView(live_view, settings.gateway.settle_timeout_s)
        self.picker = Picker(
            live_view, self.pending, self.appender, self.fresh, settings.gateway.settle_timeout_s
        )
        rules = read_launchers(PROJECT_ROOT / settings.gateway.launchers_file)
        launcher = LocalProcessLauncher(settings, rules)
        self.agents = AgentRegistrar(settings, live_view, self.appender)
        self.tasks = TaskKeeper(
            settings, keyring, live_view, self.lists, self.mailboxes, self.appender, launcher
        )
        self.organism = OrganismKeeper(settings, live_view, self.appender)
        append = self.appender.append_unattended
        self.blob_store = BlobStore(settings.blobs_root, settings.state_path / "uploads")
        self.blobs = BlobKeeper(live_view, append, self.blob_store, self.log_clock)
        timers: list[BackgroundService] = [*timers_of_kinds(live_view, append, self.log_clock), self.blobs]
        self.background_services = (*services, bridges, self.agents, self.tasks, self.organism, *timers)
        self._pruned: dict[str, None] = {}
        self.stopping = asyncio.Event()

    def new_stream_places(self, door: str) -> StreamPlaces:
        """Return new places for the streams of one kind at a door, with the limits of the settings."""
        limits, on_unread = self.settings.gateway, partial(self.metrics.dropped, door)
        return StreamPlaces(
            self.answer_memory, limits.streams, unread_s=limits.stream_unread_s, on_unread=on_unread
        )

    def open(self) -> None:
        """Open the live view, load the indexes from it, open the appender and start the background services.

        Blocks until the live view has settled all records of the log. Raises TrunklineError if the live view or
        the appender cannot be opened. Then call `close`.
        """
        indexes = self._indexes()
        for index in indexes:
            self.live_view.on_change(index.changed, index.follows)
        for service in self.background_services:
            self.live_view.on_change(service.on_change, service.follows)
        for part in (self.audit, self.metrics, self.listeners, self.log_clock):
            self.live_view.on_settled(part.settled)
        self.organism.read_ahead()
        self.live_view.open()
        rows: dict[type[Row], list[Any]] = {
            MessageRow: [*self.live_view.live(MessageRow), *newest_final(self.live_view)]
        }
        for index in indexes:
            if isinstance(index, RowIndex):
                for followed in index.follows:
                    rows.setdefault(followed, self.live_view.live(followed))
                index.load([row for followed in index.follows for row in rows[followed]])
        self.listeners.load(self.live_view.live(ListenerRow))
        self.lists.load()
        self.appender.open()
        append_noted_switch(self.settings, self.live_view, self.appender)
        append_lacking_mac_rules(self.settings, self.live_view, self.appender)
        # Reading a long ledger takes time, and no request needs to wait for it.
        threading.Thread(target=self._load_audit, name="audit-log", daemon=True).start()
        for service in self.background_services:
            service.open()

    def _indexes(self) -> tuple[Any, ...]:
        """Return the indexes of the live view. Each has the rows that it follows, and is told of their changes.

        The waits come after the index of mailboxes, which must have a message before a taker looks for it.
        """
        return (
            *(self.identities, self.pending, self.mailboxes, self.listeners, self.conversations, self.names),
            *(self.overlays, self.live_jobs, self.lists, self.mailbox_waits, self.topics),
        )

    def begin_stop(self) -> None:
        """Set `stopping` and end all waits for messages, because the gateway stops. For the event loop."""
        self.stopping.set()
        self.mailbox_waits.wake_all()

    def _load_audit(self) -> None:
        try:
            self.audit.load(self.settings)
        except TrunklineError as error:
            log.warning("audit_log_not_loaded", why=str(error))
        except Exception:
            log.exception("audit_log_not_loaded")

    def close(self) -> None:
        """Stop the background services, the appender and the live view, in this order.

        Blocks until their threads end or their timeouts pass. For instance, the appender waits up to 5 s for
        Kafka to acknowledge its records.
        """
        for service in self.background_services:
            service.close()
        self.appender.close()
        self.live_view.close()

    def prune_token(self, row: TokenRow) -> None:
        """Append the revocation of a task's token that has expired, without waiting for the record's verdict.

        It is called with the token's row when a request presents such a token. Later calls for the token do
        nothing. The record's id follows from the token, so the log has one revocation although several gateways
        append it. While Kafka is unreachable, the record is dropped with a line in the program's log.
        """
        if row.token_id in self._pruned:
            return
        self._pruned[row.token_id] = None
        if len(self._pruned) > _PRUNED:
            del self._pruned[next(iter(self._pruned))]
        body = TokenRevocation(
            task_id=row.task_id, token_id=row.token_id, request_id=f"expired-{row.token_id}", reason="expired"
        )
        self.appender.append_unattended(body.record(door=DOOR, principal=HUB))

    def _waiting_rows(self, name: str) -> list[MessageRow]:
        """Return the messages that wait in a mailbox or are leased from it."""
        waiting = self.mailboxes.waiting((DEFAULT_REALM, name))
        found = (self.live_view.get(MessageRow, f"{DEFAULT_REALM}/{name}/{one}") for one in waiting)
        return [row for row in found if row is not None]

    def job_row(self, job_id: str) -> JobRow | None:
        """Return the row of a job from the live view, or None for an unknown job id."""
        return self.live_view.get(JobRow, job_id)

    async def tell_registered(self, job_id: str) -> None:
        """Let each background service prepare for a new MQTT user, before the user's registration is answered.

        `job_id` is the user's name: the job's id, or another name for a rotated secret or an agent. If this
        gateway keeps the accounts of the MQTT broker, the method waits up to a second until the broker accepts
        the user. After a longer time it returns, too; the broker may then still refuse the user for a moment.
        """
        for service in self.background_services:
            await asyncio.to_thread(service.registered, job_id)

    def pause_publishing(self, owner: str, seconds: int) -> None:
        """Let an account at the MQTT broker publish nothing for so many seconds, if this gateway keeps it.

        `owner` is a job's id, or the MQTT user name of an agent. Returns at once.
        """
        for service in self.background_services:
            service.pause(owner, seconds)
