"""The HTTP routes of topics (DL-24): publish, subscribe, unsubscribe, list and show."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request, Response

from connectors.gateway.messages.blobs import reference_to
from connectors.gateway.messages.topics import (
    message_id_of,
    publish,
    status_of,
    subscribe,
    subscriptions_page,
    topics_page,
    unsubscribe,
)
from connectors.gateway.rules.hub_policy import evaluate_publication
from connectors.gateway.rules.topic_models import (
    NamesFilter,
    PublishedAnswer,
    PublishRequest,
    SubscribedAnswer,
    SubscriptionRequest,
    TopicsAnswer,
    TopicShownAnswer,
)
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import own_mailboxes
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import existing, json_answer
from connectors.gateway.web.idempotency import Write, WriteRequest, caller_of
from connectors.gateway.web.models import NAME_PATTERN
from connectors.gateway.web.policy import Action
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.topic.topic_registry import SUBSCRIBED, Publication, TopicMessageRow, TopicRow
from schemas.wire.record import JSON_CONTENT
from trunkline_agent.wire.ids import NAME_LIMIT
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import canonical

TOPICS: Final = "/api/hub/topics"
_TOPIC: Final = f"{TOPICS}/{{topic}}"
TopicPath = Annotated[str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT, description="Name of the topic.")]


def add_topic_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that publish to topics, change subscriptions and show topics.

    Called once, when the gateway starts. The paths begin with `/api/hub/topics`. The routes read from `hub` and
    append records through it.
    """
    _add_publish_route(routes, hub)
    _add_subscription_routes(routes, hub)
    _add_reads(routes, hub)


def _add_publish_route(routes: Routes, hub: Hub) -> None:
    @routes.post(_TOPIC, Action.TOPIC_PUBLISH, PublishedAnswer)
    async def publish_message(write: WriteRequest, topic: TopicPath, body: PublishRequest) -> Response:
        """Publish a message to all subscribers of a topic. Each of them gets one copy in its mailbox.

        The recipients are those that are subscribed at the message's position in the log. The answer comes when
        the message is in the log, and the copies come into the mailboxes after that, usually within a second.
        A mailbox that is full gets none. If one may be full, the answer waits until all mailboxes have taken or
        refused their copies, and has the numbers. The row in `topic_messages` always has them.

        The answer is 404 for a topic to which nobody has ever subscribed. It is 409 when the idempotency key
        was used for another message to this topic, and 429 when too many messages of the topic are not
        delivered yet.
        """
        decision = evaluate_publication(body.type)
        if not decision.allowed:
            raise hub.refusals.forbidden(decision.reason, write.principal, f"POST {_TOPIC}")
        message_id = message_id_of(write.caller.requester, topic, write.key)
        is_new = hub.live_view.get(TopicMessageRow, f"{topic}/{message_id}") is None
        blob = None if body.blob is None else await reference_to(hub, body.blob, is_new=is_new)
        message = Publication.model_validate(
            {
                "topic": topic,
                "message_id": message_id,
                "from": write.principal,
                "from_verified": True,
                "from_task": write.caller.task_id,
                "kind": body.type,
                "body": canonical(body.payload).decode("utf-8"),
                "content_type": JSON_CONTENT,
                "in_reply_to": body.in_reply_to,
                "thread": body.thread,
                "blob": blob,
                **body.in_the_log(),
            }
        )
        found = await publish(hub, message, f"POST {_TOPIC}", **write.origin)
        numbers = {"recipients": found.recipients, "full": found.full}
        answer = {"message_id": message.message_id, "topic": topic, **numbers}
        return json_answer(answer, verdict=found.settled.verdict)


def _add_subscription_routes(routes: Routes, hub: Hub) -> None:
    """Add the routes that begin and end a subscription of the caller, or for the operator of any mailbox."""
    per_token = hub.settings.gateway.mailbox_per_token

    async def owner_of_subscriber(request: Request) -> str | None:
        caller = caller_of(request)
        body = await request.json() if await request.body() else {}
        name = body.get("subscriber") if isinstance(body, dict) else None
        if name is None or (DEFAULT_REALM, name) in own_mailboxes(caller, per_token):
            return caller.principal
        return name if isinstance(name, str) else None

    @routes.post(f"{_TOPIC}/subscribe", Action.TOPIC_SUBSCRIBE, SubscribedAnswer, owner_of_subscriber)
    async def subscribe_mailbox(
        write: WriteRequest, topic: TopicPath, body: SubscriptionRequest | None = None
    ) -> Response:
        """Subscribe the caller's mailbox to a topic. The first subscription makes the topic.

        The mailbox gets each message that is published after this request. To subscribe again changes nothing.
        The answer is 404 for an unknown mailbox, 429 when it has as many subscriptions as it may have (1,000
        unless the operator has set another limit), and 409 when the topic has 10,000 subscribers.
        """
        name, route = _subscriber(write, body), f"POST {_TOPIC}/subscribe"
        settled = await subscribe(hub, topic, name, write.request_id, route, **write.origin)
        return _state(hub, topic, name, settled.verdict)

    @routes.post(f"{_TOPIC}/unsubscribe", Action.TOPIC_SUBSCRIBE, SubscribedAnswer, owner_of_subscriber)
    async def unsubscribe_mailbox(
        write: WriteRequest, topic: TopicPath, body: SubscriptionRequest | None = None
    ) -> Response:
        """End the subscription of the caller's mailbox. The topic remains.

        The mailbox keeps what it has, and gets nothing that is published after this request. Without a
        subscription nothing changes. The answer is 404 for an unknown topic.
        """
        name = _subscriber(write, body)
        settled = await unsubscribe(hub, topic, name, write.request_id, **write.origin)
        return _state(hub, topic, name, settled.verdict)


def _add_reads(routes: Routes, hub: Hub) -> None:
    @routes.get(TOPICS, Action.TOPIC_READ, TopicsAnswer)
    async def list_topics(request: Request, wanted: Annotated[NamesFilter, Query()]) -> Response:
        """List the topics by name, with the number of their subscribers and their newest message."""
        rows, total = topics_page(hub, wanted.limit, wanted.after)
        caller = caller_of(request).principal
        return json_answer({"topics": [topic_as_json(hub, row, caller) for row in rows], "total": total})

    @routes.get(_TOPIC, Action.TOPIC_READ, TopicShownAnswer)
    async def show_topic(
        request: Request, topic: TopicPath, wanted: Annotated[NamesFilter, Query()]
    ) -> Response:
        """Show a topic with its subscriptions by name. The answer is 404 for an unknown topic."""
        found = await asyncio.to_thread(subscriptions_page, hub, topic, wanted.limit, wanted.after)
        row = existing(hub.live_view.get(TopicRow, topic), "no topic with this name")
        shown = [
            {
                "subscriber": one.subscriber,
                "since": iso_moment(one.since),
                "subscribed_by": one.subscribed_by,
            }
            for one in found
        ]
        caller = caller_of(request).principal
        return json_answer({**topic_as_json(hub, row, caller), "subscriptions": shown})


def topic_as_json(hub: Hub, row: TopicRow, caller: str) -> dict[str, Any]:
    """Return a topic as `TopicAnswer` describes it. `caller` is the principal that asks."""
    last = row.last_published_at
    return {
        "name": row.topic,
        "subscribers": row.subscribers,
        "subscribed": status_of(hub, row.topic, caller) == SUBSCRIBED,
        "created_at": iso_moment(row.created_at),
        "publications": row.publications,
        "last_message_id": row.last_message_id,
        "last_published_at": None if last is None else iso_moment(last),
    }


def _subscriber(write: Write, body: SubscriptionRequest | None) -> str:
    name = None if body is None else body.subscriber
    return write.principal if name is None else name


def _state(hub: Hub, topic: str, name: str, verdict: str) -> Response:
    answer = {"topic": topic, "subscriber": name, "status": status_of(hub, topic, name)}
    return json_answer(answer, verdict=verdict)
