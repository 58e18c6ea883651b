"""A hub whose log is only in memory: the real fold and live state behind the tools of the agent MCP door."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from connectors.doors.mcp_tools.agents.blob_tools import BlobTools
from connectors.doors.mcp_tools.agents.door import tools_of
from connectors.hub.blobs.blob_keeper import BlobKeeper
from connectors.hub.blobs.blob_store import BlobStore
from connectors.hub.live.live_store import LiveRows
from connectors.hub.live.log_clock import LogClock
from connectors.hub.live.row_lists import RowLists
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.reactor.derived_records import TopicsBySubscriber
from connectors.hub.services.log_appender import LogAppender
from connectors.hub.services.mailbox_waits import MailboxWaits
from connectors.hub.services.mailboxes import MailboxIndex
from connectors.hub.services.principal_limits import LiveJobs, NameFacts, PrincipalLimits
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.shares import ByteBudget
from connectors.hub.serving.turns import FairTurns, RefusalPace, UnderWay
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.agents.agent_registry import AgentJoined
from schemas.streams.control.limits import LimitsSet
from schemas.wire.record import OutgoingRecord
from tests.connectors.hub.live.local_stores import empty_state
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.verdicts import POLICY

KEYRING = Keyring({"test": b"k" * 32}, "test")


class FoldedHub(LiveRows):
    """The part of a hub that the tools use. A record is settled at once; `now_us` is the log's clock.

    `blobs` is the folder of the blobs, which the first upload makes.
    """

    def __init__(self, blobs: Path = Path("no-blobs")) -> None:
        self.settings = Settings()
        self.mailboxes = MailboxIndex()
        self.mailboxes.load([])
        self.now_us = int(time.time() * 1e6)
        self.refused: list[tuple[str, ...]] = []
        self.live_view = self.appender = self.refusals = self.fresh = self
        self.live_jobs, self.topics = LiveJobs(), TopicsBySubscriber()
        self.names = NameFacts(self.get)
        self.limits = PrincipalLimits(
            cast("Any", self), self.names, self.mailboxes, self.live_jobs, self.topics
        )
        self.turns, self.pace, self.under_way = FairTurns(), RefusalPace(), UnderWay()
        self.answer_memory = ByteBudget(self.settings.gateway.answer_memory_bytes)
        self.mailbox_waits = MailboxWaits()
        self.stopping, self.log_clock = asyncio.Event(), LogClock()
        self._state = empty_state(KEYRING)
        self.blob_store = BlobStore(str(blobs), blobs)
        self.blobs = BlobKeeper(cast("Any", self), lambda _: None, self.blob_store)
        self.lists = RowLists(self)
        self._offsets = itertools.count()

    @property
    def tools(self) -> SimpleNamespace:
        """The coroutines of all tools, over this hub."""
        hub: Any = self
        return SimpleNamespace(**tools_of(hub)[1])

    @property
    def blob_tools(self) -> BlobTools:
        """The tools of blobs, over this hub."""
        hub: Any = self
        return BlobTools(hub)

    def check(self) -> None:
        """As of the appender: Kafka is never away."""

    async def catch_up(self) -> None:
        """As of the fresh view: every record is settled at once."""

    async def settle(self, outgoing: OutgoingRecord) -> SettledRecord:
        """As of the appender."""
        return self.add(outgoing)

    settle_all = LogAppender.settle_all
    settle_accepted = LogAppender.settle_accepted

    def record(self, reason: str, why: str, principal: str | None, route: str) -> None:
        """As of the refusals."""
        self.refused.append((reason, why, str(principal), route))

    def forbidden(self, why: str, principal: str, route: str) -> ApiError:
        """As of the refusals."""
        self.record(POLICY, why, principal, route)
        return ApiError(403, POLICY, why)

    def add(self, outgoing: OutgoingRecord) -> SettledRecord:
        """Settle a record now."""
        record = as_read(outgoing, next(self._offsets), self.now_us, partition=0)
        settled = self._state.apply(record, self._changed)
        assert settled is not None
        return settled

    def _changed(self, change: AppliedChange) -> None:
        self.names.changed(change)
        self.mailboxes.changed(change)
        self.mailbox_waits.changed(change)
        self.lists.changed(change)
        self.topics.changed(change)
        self.blobs.on_change(change)
        self.live_jobs.changed(change)

    def limit(self, name: str, **limits: int) -> None:
        """Set the limits of a principal, as the operator does."""
        body = LimitsSet(scope="name", name=name, request_id=f"limit-{next(self._offsets)}", **limits)
        assert self.add(body.record(door="http", principal="operator")).verdict == "accepted"

    def join(self, name: str, public_key: str) -> None:
        """Let an agent take part."""
        body = AgentJoined(
            agent_name=name, request_id=f"join-{name}", task="", capabilities=[], public_key=public_key
        )
        assert self.add(body.record(door="http", principal="operator")).verdict == "accepted"
