"""The functions behind the MCP tools of topics (DL-24).

**Delivers** a published message once to each subscriber. **Acknowledges when** the record of the call is in the
log and settled; the copies of a message follow. **Loses** nothing: a call that ended in an error can be
repeated with the same idempotency key.
"""

from __future__ import annotations

from typing import Any

from connectors.agent_mcp.planned_tools import KIND, TEXT, check_length
from connectors.agent_mcp.signed_requests import DOOR
from connectors.agent_mcp.tool_arguments import ListTopics, PublishMessage, Subscribe, Unsubscribe
from connectors.gateway.messages.blobs import reference_to
from connectors.gateway.messages.topics import (
    message_id_of,
    publication,
    published,
    status_of,
    subscription,
    topics_page,
)
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.idempotency import request_uuid
from schemas.streams.topic.topic_registry import (
    SUBSCRIBED,
    Publication,
    Subscription,
    TopicMessageRow,
    Unsubscription,
    subscription_record,
)


class TopicTools:
    """The functions of these tools: one method for each tool, with the tool's name; see `AgentTools`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def subscribe(self, agent: str, asked: Subscribe) -> dict[str, Any]:
        """Subscribe the agent's mailbox to a topic, which is made if it does not exist.

        Returns the `topic` and whether the agent is `subscribed` now. Raises ApiError if the topic has the
        largest number of subscribers (409) or the agent that of topics (429), and BackboneUnreachable if the
        record was not settled in time.
        """
        body = Subscription.model_validate(_change(agent, asked))
        with subscription(self._hub, body, "subscribe", door=DOOR, principal=agent) as record:
            await self._hub.appender.settle_accepted(record)
        return self._state(asked.topic, agent)

    async def unsubscribe(self, agent: str, asked: Unsubscribe) -> dict[str, Any]:
        """End the subscription of the agent's mailbox. Returns as `subscribe`.

        Raises ApiError (404) for an unknown topic, and BackboneUnreachable if the record was not settled in
        time.
        """
        body = Unsubscription.model_validate(_change(agent, asked))
        await self._hub.appender.settle_accepted(subscription_record(body, door=DOOR, principal=agent))
        return self._state(asked.topic, agent)

    async def publish_message(self, agent: str, asked: PublishMessage) -> dict[str, Any]:
        """Publish a message to the subscribers of a topic.

        Returns the `messageId`, the number of recipients, and that of full mailboxes (`full`), which get none,
        when the message is in the log. A second call with the same idempotency key, topic and arguments
        publishes nothing.

        Raises:
            ApiError: 404 for an unknown topic, 413 for a text over the limit, 409 for an idempotency key that
                was used for another message to the topic, and 429 if too many messages of the topic are not
                delivered yet.
            BackboneUnreachable: Kafka is unreachable, or the message was not settled in time.
        """
        check_length(self._hub, asked.message)
        message_id = message_id_of(f"{DOOR}/{agent}", asked.topic, asked.idempotency_key)
        is_new = self._hub.live_view.get(TopicMessageRow, f"{asked.topic}/{message_id}") is None
        blob = None if asked.blob is None else await reference_to(self._hub, asked.blob, is_new=is_new)
        body = Publication.model_validate(
            {
                "topic": asked.topic,
                "message_id": message_id,
                "from": agent,
                "from_verified": True,
                "kind": KIND,
                "body": asked.message,
                "content_type": TEXT,
                "thread": asked.thread,
                "blob": blob,
                **asked.in_the_log(),
            }
        )
        record = publication(self._hub, body, "publish_message", door=DOOR, principal=agent)
        await self._hub.appender.settle_accepted(record)
        found = await published(self._hub, body)
        return {"messageId": body.message_id, "recipientCount": found.recipients, "full": found.full}

    async def list_topics(self, agent: str, asked: ListTopics) -> dict[str, Any]:
        """Return topics by name, whether the agent is subscribed to each, and the number of all topics."""
        rows, total = topics_page(self._hub, asked.limit, asked.after)
        topics = [
            {
                "topic": row.topic,
                "subscribers": row.subscribers,
                "subscribed": status_of(self._hub, row.topic, agent) == SUBSCRIBED,
                "lastPublishedAt": None if row.last_published_at is None else row.last_published_at // 1000,
            }
            for row in rows
        ]
        return {"topics": topics, "total": total}

    def _state(self, topic: str, agent: str) -> dict[str, Any]:
        return {"topic": topic, "subscribed": status_of(self._hub, topic, agent) == SUBSCRIBED}


def _change(agent: str, asked: Subscribe | Unsubscribe) -> dict[str, str]:
    """Return the fields of the record's body."""
    request_id = str(request_uuid(f"{DOOR}/{agent}", asked.idempotency_key))
    return {"topic": asked.topic, "subscriber": agent, "request_id": request_id}
