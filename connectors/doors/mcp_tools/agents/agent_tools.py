"""The functions behind the agent MCP server's tools that show agents and an agent's mailbox (AM-04, AM-05)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import orjson
from pydantic.alias_generators import to_camel

from connectors.doors.mcp_tools.agents.operation_tools import PlannedTool, StatusTool
from connectors.doors.mcp_tools.agents.signed_requests import DOOR, IS_EVENT
from connectors.doors.mcp_tools.agents.tool_arguments import DiscoverAgents, GetMyMessages
from connectors.hub.engine.operation import SMALL_BYTES, Answer, Asked, Unusual, reserve_bytes
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.operations.messages.shown_messages import answer_bytes_of
from connectors.operations.rules.read_marks import is_read, is_shown
from schemas.fold.stream_kind import STOPPED
from schemas.streams.agents.agent_registry import PRESENT, ParticipantRow
from schemas.streams.mailboxes.message import (
    DEFAULT_REALM,
    PRIORITIES,
    UNREAD,
    MessageBodyRow,
    MessageRow,
)
from schemas.streams.mailboxes.message_text import shown_text
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.message_fields import message_fields_of

_PLACE: Final = {priority: place for place, priority in enumerate(PRIORITIES)}
# Names and capabilities of an agent, roughly.
_AGENT_BYTES: Final = 512
_EVENT_BYTES: Final = 256 * 1024
# Of the 1 MiB that the official client reads of an event, without what is around the messages.
_EVENT_MOST: Final = 960 * 1024
# A mailbox of this size is read within a millisecond or two.
_AT_ONCE: Final = 1000
# So many messages or agents, without their texts, are a small answer.
_FEW: Final = 100


class AgentTools:
    """The functions of these tools: one method for each tool, with the tool's name.

    `agent` is the name of the agent that signed the call, and `asked` are the tool's arguments. Each method
    returns the tool's result as JSON, and raises ApiError with the reason of a refusal.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.planned: dict[str, PlannedTool] = {
            "discover_agents": ReadingTool(hub, lambda _, asked: self.few_agents(asked), self.discover_agents),
            "get_my_messages": ReadingTool(hub, self.few_messages, self.get_my_messages),
            "update_my_status": StatusTool(hub),
        }

    async def discover_agents(self, agent: str, asked: DiscoverAgents) -> dict[str, Any]:
        """Return the agents that have the wanted status and capability, sorted by name.

        Without a wanted status, all agents that have not stopped are returned; without a wanted capability,
        agents with any. `left` is the number of further agents, which do not fit into a result. `agent`, the
        caller, does not matter.
        """
        listed = self._hub.lists.participants_with
        found = await asyncio.to_thread(listed, asked.status, asked.capability)
        return _agents_as_json(found, asked, answer_bytes(self._hub))

    def few_agents(self, asked: DiscoverAgents) -> dict[str, Any]:
        """Return what `discover_agents` does, without a thread. Raises Unusual if not all of them are few."""
        lists = self._hub.lists
        if asked.status == STOPPED or lists.participants.count([PRESENT]) > _FEW:
            raise Unusual
        found = lists.participants_with(asked.status, asked.capability)
        answer = _agents_as_json(found, asked, min(SMALL_BYTES // 2, answer_bytes(self._hub)))
        if answer["left"]:
            raise Unusual
        return answer

    async def get_my_messages(self, agent: str, asked: GetMyMessages) -> dict[str, Any]:
        """Return the messages in the agent's own mailbox by priority, then age, and statistics of the mailbox.

        The messages stay in the mailbox and stay unread. `unread_only` and `since` of `asked` choose messages.
        `more` is the number of chosen messages that are left out, because of `asked.limit` or the length of the
        answer. The statistics count all messages of the mailbox.
        """
        return await self._mailbox(agent, asked)

    async def free_messages(self, agent: str, limit: int, since: int | None) -> dict[str, Any]:
        """Return what `get_my_messages` does, with only the unread messages that no reader has leased."""
        return await self._mailbox(agent, GetMyMessages(limit=limit, since=since), _is_free)

    async def _mailbox(
        self, agent: str, asked: GetMyMessages, is_chosen: Callable[[MessageRow], bool] | None = None
    ) -> dict[str, Any]:
        mailbox = (DEFAULT_REALM, agent)
        ids = self._hub.mailboxes.messages(mailbox)
        # The size of a mailbox is that of its pending messages.
        within, limit = None if is_chosen is None else mailbox, min(asked.limit, len(ids))
        # A result contains each content twice: as structured content, and in the text.
        size = 2 * answer_bytes_of(self._hub, within, limit, answer_bytes(self._hub))
        await reserve_bytes(self._hub, f"{DOOR}/{agent}", size)
        if len(ids) <= _AT_ONCE:
            return self._search(agent, asked, ids, is_chosen)
        # The event loop serves all agents, so a long search runs in a thread.
        return await asyncio.to_thread(self._search, agent, asked, ids, is_chosen)

    def _search(
        self,
        agent: str,
        asked: GetMyMessages,
        ids: list[str],
        is_chosen: Callable[[MessageRow], bool] | None,
    ) -> dict[str, Any]:
        rows, wanted = self._found(agent, asked, ids, is_chosen)
        shown = within_event(as_many_as_fit(self._hub, wanted[: asked.limit]))
        return {"messages": shown, "more": len(wanted) - len(shown), "statistics": statistics(rows)}

    def few_messages(self, agent: str, asked: GetMyMessages) -> dict[str, Any]:
        """Return what `get_my_messages` does, without a wait. Raises Unusual if the answer would be long."""
        ids = self._hub.mailboxes.messages((DEFAULT_REALM, agent))
        if len(ids) > _AT_ONCE:
            raise Unusual
        rows, wanted = self._found(agent, asked, ids)
        shown, left = [], min(SMALL_BYTES // 2, answer_bytes(self._hub))
        for row in wanted[: asked.limit]:
            shown.append(message_as_json(self._hub, row))
            left -= len(shown[-1]["content"].encode())
            if left < 0 or len(shown) > _FEW:
                raise Unusual
        return {"messages": shown, "more": len(wanted) - len(shown), "statistics": statistics(rows)}

    def _found(
        self,
        agent: str,
        asked: GetMyMessages,
        ids: list[str],
        is_chosen: Callable[[MessageRow], bool] | None = None,
    ) -> tuple[list[MessageRow], list[MessageRow]]:
        """Return the messages that the agent may see, and those that it asked for, in order."""
        get, mailbox = self._hub.live_view.get, f"{DEFAULT_REALM}/{agent}/"
        found = [get(MessageRow, mailbox + message_id) for message_id in ids]
        now_us = self._hub.log_clock.now_us()
        rows = [row for row in found if row is not None and is_shown(row, now_us)]
        wanted = [
            row
            for row in rows
            if not (asked.unread_only and is_read(row))
            and (is_chosen is None or is_chosen(row))
            and (asked.since is None or row.posted_at >= asked.since * 1000)
        ]
        wanted.sort(key=lambda row: (_PLACE[row.priority], row.posted_at, row.message_id))
        return rows, wanted


def _is_free(row: MessageRow) -> bool:
    return row.status == UNREAD


def answer_bytes(hub: Hub) -> int:
    """Return the largest sum of the contents in one result: half of an answer, which has each of them twice.

    For an answer at `/sse` it is 256 KiB at most. Then the official client reads its event.
    """
    most = hub.settings.limits.answer_bytes // 2
    return min(most, _EVENT_BYTES) if IS_EVENT.get() else most


class ReadingTool(PlannedTool):
    """A tool that changes nothing.

    Args:
        hub: The hub.
        read: Gets agent and arguments, and raises Unusual for a long answer.
        serve: Serves every call, in a coroutine.
    """

    def __init__(
        self,
        hub: Hub,
        read: Callable[[str, Any], dict[str, Any]],
        serve: Callable[[str, Any], Awaitable[dict[str, Any]]],
    ) -> None:
        super().__init__(hub)
        self._read = read
        self._serve = serve

    async def serve(self, agent: str, asked: Any) -> dict[str, Any]:
        """Return what the tool reads, however long."""
        return await self._serve(agent, asked)

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return no record, because reading changes nothing."""
        return ()

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Return what the tool reads."""
        return Answer(self._read(asked.caller.principal, asked.body))


def as_many_as_fit(hub: Hub, rows: Sequence[MessageRow]) -> list[dict[str, Any]]:
    """Return the first messages, at least one, that fit into one answer by the length of their content."""
    shown: list[dict[str, Any]] = []
    left = answer_bytes(hub)
    for row in rows:
        message = message_as_json(hub, row)
        content = message["content"]
        left -= len(content) if content.isascii() else len(content.encode())
        if shown and left < 0:
            break
        shown.append(message)
    return shown


def within_event(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave contents out with which the event of an answer would be longer than the official client reads.

    Such a message has `content` null, and `contentBytes`, its length in UTF-8. `read_blob` reads it. The answer
    of a call that is not answered by an event stays as it is.
    """
    if not IS_EVENT.get():
        return messages
    left, shown = _EVENT_MOST, []
    for message in messages:
        size = _event_bytes(message)
        if size > left:
            content_bytes = len(message["content"].encode())
            message = {**message, "content": None, "contentBytes": content_bytes}
            size = _event_bytes(message)
        left -= size
        shown.append(message)
    return shown


def _event_bytes(message: dict[str, Any]) -> int:
    """Return the bytes of a message in a result, which has it twice: as JSON, and as JSON in a text."""
    encoded = orjson.dumps(message)
    return len(encoded) + len(orjson.dumps(encoded.decode()))


def message_as_json(hub: Hub, row: MessageRow) -> dict[str, Any]:
    """Return a message of a mailbox as JSON.

    The fields are `id`, `from`, `to`, `content`, `timestamp` (milliseconds since 1970 UTC), `read` and
    `priority`, and those of `MESSAGE_FIELDS` in camel case, `topic` and `blob` if the message has them.
    `content` is the text of a text message, and any other body as stored. Without a stored body it is empty,
    and there is no `blob`.
    """
    body = hub.live_view.get(MessageBodyRow, f"{row.realm}/{row.recipient}/{row.message_id}")
    optional = {to_camel(name): value for name, value in message_fields_of(row).items()}
    if row.topic is not None:
        optional["topic"] = row.topic
    if row.blob is not None and body is not None:
        optional["blob"] = {"digest": row.blob, "bytes": body.blob_bytes, "contentType": body.blob_type}
    return {
        "id": row.message_id,
        "from": row.sender,
        "to": row.recipient,
        "content": "" if body is None else shown_text(body.body, body.content_type)[0],
        "timestamp": row.posted_at // 1000,
        "read": is_read(row),
        "priority": row.priority,
        **optional,
    }


def statistics(rows: Iterable[MessageRow]) -> dict[str, Any]:
    """Return the number of messages: `total`, `unread`, `byAgent` for each sender, and `byPriority`.

    `rows` are the messages of one mailbox that its owner may see.
    """
    rows = list(rows)
    by_priority = Counter(row.priority for row in rows)
    return {
        "total": len(rows),
        "unread": sum(not is_read(row) for row in rows),
        "byAgent": dict(sorted(Counter(row.sender for row in rows).items())),
        "byPriority": {priority: by_priority[priority] for priority in PRIORITIES},
    }


def _agents_as_json(found: Iterable[ParticipantRow], asked: DiscoverAgents, left: int) -> dict[str, Any]:
    """Return the first agents, at least one, that fit into `left` bytes, and the number of the others."""
    rows = [row for row in found if asked.after is None or row.agent_name > asked.after]
    shown: list[dict[str, Any]] = []
    for row in rows:
        left -= len(row.task.encode()) + _AGENT_BYTES
        if shown and left < 0:
            break
        shown.append(_agent_as_json(row))
    return {"agents": shown, "left": len(rows) - len(shown)}


def _agent_as_json(row: ParticipantRow) -> dict[str, Any]:
    return {
        "id": row.agent_name,
        "task": row.task,
        "status": row.status,
        "capabilities": row.capabilities,
        "startedAt": row.started_at // 1000,
    }
