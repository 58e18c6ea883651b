"""Order and filter of `get_my_messages` against a small model (AM-04, AM-05), over the real fold."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.doors.mcp_tools.agents.tool_arguments import GetMyMessages, MarkRead, SendToAgent
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim, MailboxClearing, MailboxLease, MessageExpiry
from schemas.streams.mailboxes.message import PRIORITIES, Message
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller
from trunkline_agent.mcp.signing import new_key_pair

pytestmark = [pytest.mark.requirement("AM-04"), pytest.mark.requirement("AM-05")]

ME = "ann"
SENDERS = ("ann", "bo", "cy")
PUBLIC_KEY = new_key_pair()[1]
YEAR_S = 365 * 86400


@dataclass
class Known:
    """The model's state of a message."""

    message_id: str
    sender: str
    priority: str
    content: str
    posted_us: int
    is_over: bool = False
    read: bool = False
    gone: bool = False
    leased: bool = False

    @property
    def shown(self) -> bool:
        """True if its recipient is to see it."""
        return not self.gone and (self.read or not self.is_over)

    def as_json(self) -> dict[str, Any]:
        """As the tool shows it."""
        return {
            "id": self.message_id,
            "from": self.sender,
            "to": ME,
            "content": self.content,
            "timestamp": self.posted_us // 1000,
            "read": self.read,
            "priority": self.priority,
        }


@dataclass
class Mailbox:
    """The model beside the tools."""

    hub: FoldedHub = field(default_factory=FoldedHub)
    known: list[Known] = field(default_factory=list)
    requests: int = 0

    def __post_init__(self) -> None:
        for name in SENDERS:
            self.hub.join(name, PUBLIC_KEY)
        self.hub.now_us = int(time.time() * 1e6) - 10_000_000

    def request_id(self) -> str:
        """One that was not used."""
        self.requests += 1
        return f"r{self.requests}"

    async def send(self, sender: str, priority: str, expires: str, step_us: int) -> None:
        """A message comes, by the tool, or by another door where it is to expire."""
        self.hub.now_us += step_us
        content = f"message {len(self.known)}"
        if expires == "never":
            asked = SendToAgent(targetAgentId=ME, message=content, priority=priority)  # type: ignore[call-arg]
            message_id = (await self.hub.tools.send_to_agent(sender, asked))["messageId"]
        else:
            message_id = f"by-hub-{len(self.known)}"
            moment = time.time() + (YEAR_S if expires == "later" else -YEAR_S)
            said = {
                "message_id": message_id,
                "from": sender,
                "to": ME,
                "kind": "message",
                "priority": priority,
                "body": content,
                "expires_at": datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            self.hub.add(Message.model_validate(said).record(door="http", principal=sender))
        # Of two at one moment of the log the first is the older one.
        at = max(self.hub.now_us, self.known[-1].posted_us + 1 if self.known else 0)
        self.known.append(Known(message_id, sender, priority, content, at, is_over=expires == "past"))

    async def mark(self, shares: list[int]) -> None:
        """Some are marked, among them perhaps one that is not there."""
        chosen = [self.known[share % len(self.known)] for share in shares] if self.known else []
        ids = list(dict.fromkeys([*(one.message_id for one in chosen), "nobodys"]))
        found = await self.hub.tools.mark_read(ME, MarkRead(messageIds=ids))  # type: ignore[call-arg]
        by_id = {one.message_id: one for one in self.known}
        there = [by_id[one] for one in ids if one in by_id and by_id[one].shown]
        free = [one for one in there if not one.read and not one.leased]
        assert found["marked"] == len(free)
        assert found["notMarked"] == [one.message_id for one in there if one.leased]
        assert found["unknown"] == [one for one in ids if one not in {known.message_id for known in there}]
        for one in free:
            one.read = True

    def clear(self) -> None:
        """The operator clears the mailbox: what waits is gone."""
        record = MailboxClearing(to=ME, request_id=self.request_id()).record(door="http", principal="operator")
        assert self.hub.add(record).verdict == "accepted"
        for one in self.known:
            if not one.read:
                one.gone, one.leased = True, False

    def expire(self) -> None:
        """Expired messages are reported as expired."""
        for one in self.known:
            if one.is_over and not one.read and not one.gone and not one.leased:
                record = MessageExpiry(to=ME, message_id=one.message_id).record(
                    door="reactor", principal="reactor"
                )
                assert self.hub.add(record).verdict == "accepted"
                one.gone = True

    def take(self, limit: int, *, lease: bool) -> None:
        """Another door hands some out: those taken count as read, those leased still wait."""
        waiting = [one for one in self.known if not (one.read or one.gone or one.leased)]
        in_order = sorted(
            waiting, key=lambda one: (PRIORITIES.index(one.priority), one.posted_us, one.message_id)
        )
        make = MailboxLease if lease else MailboxClaim
        said: dict[str, Any] = {"door": "http", "principal": ME}
        assert (
            self.hub.add(make(to=ME, request_id=self.request_id(), limit=limit).record(**said)).verdict
            == "accepted"
        )
        for one in in_order:
            if one.is_over:
                one.gone = True
            elif lease:
                one.leased = True
            else:
                one.read = True
            limit -= not one.is_over
            if not limit:
                return

    async def check(self, unread_only: bool, limit: int, since: int | None) -> None:
        """The tool says what the model says."""
        at = None if since is None or not self.known else self.known[since % len(self.known)].posted_us // 1000
        asked = GetMyMessages(unreadOnly=unread_only, limit=limit, since=at)  # type: ignore[call-arg]
        found = await self.hub.tools.get_my_messages(ME, asked)
        shown = [one for one in self.known if one.shown]
        wanted = [
            one
            for one in shown
            if not (unread_only and one.read) and (at is None or one.posted_us // 1000 >= at)
        ]
        # The oldest first as they came; the sort is stable.
        wanted.sort(key=lambda one: PRIORITIES.index(one.priority))
        assert found["messages"] == [one.as_json() for one in wanted[:limit]]
        assert found["more"] == max(0, len(wanted) - limit)
        assert found["statistics"] == {
            "total": len(shown),
            "unread": len([one for one in shown if not one.read]),
            "byAgent": dict(Counter(one.sender for one in shown)),
            "byPriority": {name: sum(one.priority == name for one in shown) for name in PRIORITIES},
        }


def sends() -> st.SearchStrategy[tuple[Any, ...]]:
    """A message of any sender, priority and life, at the same moment as the one before it or a little later."""
    return st.tuples(
        st.just("send"),
        st.sampled_from(SENDERS),
        st.sampled_from(PRIORITIES),
        st.sampled_from(["never", "never", "later", "past"]),
        st.sampled_from([0, 1, 400, 1000, 5000]),
    )


STEPS = st.lists(
    st.one_of(
        sends(),
        sends(),
        sends(),
        st.tuples(st.just("mark"), st.lists(st.integers(0, 50), max_size=4)),
        st.tuples(st.just("take"), st.integers(1, 4), st.booleans()),
        st.just(("clear",)),
        st.just(("expire",)),
        st.tuples(st.just("check"), st.booleans(), st.integers(1, 12), st.none() | st.integers(0, 50)),
    ),
    max_size=40,
)


@pytest.mark.long
@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_messages_are_those_of_the_model_in_its_order(steps: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        mailbox = Mailbox()
        for name, *rest in steps:
            if name == "take":
                mailbox.take(rest[0], lease=rest[1])
            elif name in ("clear", "expire"):
                getattr(mailbox, name)()
            else:
                await getattr(mailbox, name)(*rest)
        for unread_only in (False, True):
            await mailbox.check(unread_only, 1000, None)

    asyncio.run(run())


@pytest.mark.long
def test_a_large_mailbox_is_looked_at_in_the_same_way() -> None:
    async def run() -> None:
        mailbox = Mailbox()
        for number in range(1500):
            await mailbox.send(SENDERS[number % 3], PRIORITIES[number % 2], "never", number % 2)
        await mailbox.mark(list(range(0, 900, 3)))
        for unread_only, limit, since in ((False, 1000, None), (True, 700, 40), (True, 10, None)):
            await mailbox.check(unread_only, limit, since)

    asyncio.run(run())


def test_order_and_filter_over_the_wire(shared_gateway: McpGateway, new_agent: Callable[[str], Agent]) -> None:
    with (
        SignedCaller(new_agent("ann"), shared_gateway) as ann,
        SignedCaller(new_agent("bo"), shared_gateway) as bo,
        shared_gateway.client() as operator_client,
    ):
        order = ("low", "high", "normal", "high", "low", "normal")
        sent = [
            bo.call("send_to_agent", targetAgentId=ann.name, message=f"{number} {priority}", priority=priority)
            for number, priority in enumerate(order)
        ]

        def contents(**arguments: Any) -> list[str]:
            return [one["content"] for one in ann.messages(**arguments)]

        in_order = ["1 high", "3 high", "2 normal", "5 normal", "0 low", "4 low"]
        assert contents() == in_order
        assert contents(limit=2) == in_order[:2]
        ann.call("mark_read", messageIds=[sent[1]["messageId"], sent[4]["messageId"]])
        assert contents(unreadOnly=True) == ["3 high", "2 normal", "5 normal", "0 low"]
        late = [one for one in in_order if sent[int(one[0])]["timestamp"] >= sent[3]["timestamp"]]
        assert contents(since=sent[3]["timestamp"]) == late
        assert contents(since=sent[5]["timestamp"] + 60_000) == []
        assert ann.call("get_my_messages", limit=1)["statistics"] == {
            "total": 6,
            "unread": 4,
            "byAgent": {bo.name: 6},
            "byPriority": {"high": 2, "normal": 2, "low": 2},
        }
        assert operator_client.get(f"/api/hub/mailboxes/default/{ann.name}").status_code == 200
