"""The operations of topics (DL-24): publish, subscribe, unsubscribe, list and show."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Final

from fastapi import Path, Request

from connectors.hub.engine.family import carried_out
from connectors.hub.engine.operation import Answer, Asked, Call, Operation, Unusual
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailboxes import own_mailboxes
from connectors.hub.serving.admission import OwnerOf
from connectors.hub.serving.answers import existing, refuse_rejected
from connectors.hub.serving.identities import caller_of
from connectors.hub.serving.models import NAMED
from connectors.hub.serving.policy import Action, Caller
from connectors.operations.blobs.blobs import reference_to
from connectors.operations.rules.hub_policy import evaluate_publication
from connectors.operations.rules.message_models import (
    NamesFilter,
    PublishedAnswer,
    PublishRequest,
    SubscribedAnswer,
    SubscriptionRequest,
    TopicsAnswer,
    TopicShownAnswer,
)
from connectors.operations.topics.topics import (
    Published,
    message_id_of,
    publication,
    published,
    published_at_once,
    status_of,
    subscription,
    subscriptions_page,
    topics_page,
)
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.topic.topic_registry import (
    SUBSCRIBED,
    Publication,
    Subscription,
    TopicMessageRow,
    TopicRow,
    Unsubscription,
)
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.moments import iso_moment

TOPICS: Final = "/api/hub/topics"
_TOPIC: Final = f"{TOPICS}/{{topic}}"
TopicPath = Annotated[str, Path(**NAMED, description="Name of the topic.")]
# The engine returns no longer lists, and reads no topic with more subscribers.
_AT_ONCE: Final = 100


class PublishMessage(Operation):
    """Publish a message to all subscribers of a topic. Each of them gets one copy in its mailbox.

    The recipients are those that are subscribed at the message's position in the log. The answer comes when
    the message is in the log, and the copies come into the mailboxes after that, usually within a second.
    A mailbox that is full gets none. If one may be full, the answer waits until all mailboxes have taken or
    refused their copies, and has the numbers. The row in `topic_messages` always has them.

    The answer is 404 for a topic to which nobody has ever subscribed. It is 409 when the idempotency key
    was used for another message to this topic, and 429 when too many messages of the topic are not
    delivered yet.
    """

    NAME = "publish_message"
    PATH = _TOPIC
    PARAMETERS: ClassVar = {"topic": TopicPath}
    ACTION = Action.TOPIC_PUBLISH
    ANSWER = PublishedAnswer
    BODY = PublishRequest

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the publication's record. A message with a blob is unusual."""
        decision = evaluate_publication(asked.body.type)
        if not decision.allowed:
            raise self.hub.refusals.forbidden(decision.reason, asked.caller.principal, self.route)
        if asked.body.blob is not None and asked.known is None:
            raise Unusual
        return (self._record(asked, asked.known),)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer | Awaitable[Answer]:
        """Tell the message's id and the numbers, after a wait for them if a mailbox may be full."""
        verdict = refuse_rejected(settled[0]).verdict
        found = published_at_once(self.hub, asked.known)
        return self._counted(asked, verdict) if found is None else Answer(self.document(asked, found), verdict)

    async def later(self, asked: Asked) -> Answer:
        """Publish a message with a blob."""
        key = f"{asked.path['topic']}/{_message_id(asked)}"
        is_new = self.hub.live_view.get(TopicMessageRow, key) is None
        asked.known = await reference_to(self.hub, asked.body.blob, is_new=is_new)
        return await carried_out(self, asked)

    async def _counted(self, asked: Asked, verdict: str) -> Answer:
        return Answer(self.document(asked, await published(self.hub, asked.known)), verdict)

    def document(self, asked: Asked, found: Published) -> dict[str, Any]:
        """Return the answer as its door spells it."""
        message, numbers = asked.known, {"recipients": found.recipients, "full": found.full}
        return {"message_id": message.message_id, "topic": message.topic, **numbers}

    def _record(self, asked: Asked, blob: BlobReference | None) -> OutgoingRecord:
        body = asked.body
        kind, text, content_type = body.content()
        asked.known = Publication.model_validate(
            {
                "topic": asked.path["topic"],
                "message_id": _message_id(asked),
                "from": asked.caller.principal,
                "from_verified": True,
                "from_task": asked.caller.task_id,
                "kind": kind,
                "body": text,
                "content_type": content_type,
                "blob": blob,
                **body.in_the_log(),
            }
        )
        return publication(self.hub, asked.known, self.route, **asked.origin)


def _message_id(asked: Asked) -> str:
    return message_id_of(asked.requester, asked.path["topic"], asked.key)


class _SubscriptionOperation(Operation):
    """An operation on the subscription of the caller's mailbox, or for the operator of any mailbox."""

    PARAMETERS: ClassVar = {"topic": TopicPath}
    ACTION = Action.TOPIC_SUBSCRIBE
    ANSWER = SubscribedAnswer
    BODY = SubscriptionRequest
    NEEDS_BODY = False

    @property
    def owner_of(self) -> OwnerOf:
        """Find the owner of the subscriber in the body, which is not validated yet."""

        async def owner(request: Request) -> str | None:
            body = await request.json() if await request.body() else {}
            return self._owner(caller_of(request), body.get("subscriber") if isinstance(body, dict) else None)

        return owner

    def owner(self, asked: Asked) -> str | None:
        """Return the owner of the subscriber's mailbox."""
        return self._owner(asked.caller, None if asked.body is None else asked.body.subscriber)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell the state of the subscription."""
        verdict, change = refuse_rejected(settled[0]).verdict, self._change(asked)
        status = status_of(self.hub, change["topic"], change["subscriber"])
        return Answer(self.document(change, status), verdict)

    def document(self, change: dict[str, str], status: str) -> dict[str, Any]:
        """Return the answer as its door spells it."""
        return {"topic": change["topic"], "subscriber": change["subscriber"], "status": status}

    def _change(self, asked: Asked) -> dict[str, str]:
        """Return the fields of the record's body."""
        name = None if asked.body is None else asked.body.subscriber
        subscriber = asked.caller.principal if name is None else name
        return {"topic": asked.path["topic"], "subscriber": subscriber, "request_id": str(asked.made)}

    def _owner(self, caller: Caller, name: Any) -> str | None:
        own = own_mailboxes(caller, self.hub.settings.gateway.mailbox_per_token)
        if name is None or (DEFAULT_REALM, name) in own:
            return caller.principal
        return name if isinstance(name, str) else None


class SubscribeMailbox(_SubscriptionOperation):
    """Subscribe the caller's mailbox to a topic. The first subscription makes the topic.

    The mailbox gets each message that is published after this request. To subscribe again changes nothing.
    The answer is 404 for an unknown mailbox, 429 when it has as many subscriptions as it may have (1,000
    unless the operator has set another limit), and 409 when the topic has 10,000 subscribers.
    """

    NAME = "subscribe_mailbox"
    PATH = f"{_TOPIC}/subscribe"
    COMMAND = "topics subscribe"
    CALL = Call("subscribe", None, takes=())

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the subscription, which counts among those of the mailbox from now on."""
        change = Subscription.model_validate(self._change(asked))
        asked.known = counted = ExitStack()
        return (counted.enter_context(subscription(self.hub, change, self.route, **asked.origin)),)

    def ended(self, asked: Asked) -> None:
        """End the count, because the log has the subscription, or will not have it."""
        asked.known.close()


class UnsubscribeMailbox(_SubscriptionOperation):
    """End the subscription of the caller's mailbox. The topic remains.

    The mailbox keeps what it has, and gets nothing that is published after this request. Without a
    subscription nothing changes. The answer is 404 for an unknown topic.
    """

    NAME = "unsubscribe_mailbox"
    PATH = f"{_TOPIC}/unsubscribe"
    COMMAND = "topics unsubscribe"
    CALL = Call("unsubscribe", None, takes=())

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the record that ends the subscription."""
        return (Unsubscription.model_validate(self._change(asked)).record(**asked.origin),)


class _TopicRead(Operation):
    """An operation that shows topics."""

    METHOD = "GET"
    ACTION = Action.TOPIC_READ
    QUERY = NamesFilter
    KEY = None

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return no record. A long list is unusual."""
        if asked.query.limit > _AT_ONCE:
            raise Unusual
        return ()

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Return what was asked for."""
        return Answer(self.shown(asked))

    async def later(self, asked: Asked) -> Answer:
        """Read a long list in a thread."""
        return Answer(await asyncio.to_thread(self.shown, asked))

    @abstractmethod
    def shown(self, asked: Asked) -> dict[str, Any]:
        """Return the document. Thread-safe."""


class ListTopics(_TopicRead):
    """List the topics by name, with the number of their subscribers and their newest message."""

    NAME = "list_topics"
    COMMAND = "topics list"
    PATH = TOPICS
    ANSWER = TopicsAnswer

    def shown(self, asked: Asked) -> dict[str, Any]:
        """Return a page of the list."""
        rows, total = topics_page(self.hub, asked.query.limit, asked.query.after)
        return {
            "topics": [topic_as_json(self.hub, row, asked.caller.principal) for row in rows],
            "total": total,
        }


class ShowTopic(_TopicRead):
    """Show a topic with its subscriptions by name. The answer is 404 for an unknown topic."""

    NAME = "show_topic"
    COMMAND = "topics show"
    PATH = _TOPIC
    PARAMETERS: ClassVar = {"topic": TopicPath}
    ANSWER = TopicShownAnswer

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return no record. A topic with many subscribers is unusual."""
        row = self.hub.live_view.get(TopicRow, asked.path["topic"])
        if row is not None and row.subscribers > _AT_ONCE:
            raise Unusual
        return super().plan(asked)

    def shown(self, asked: Asked) -> dict[str, Any]:
        """Return the topic with a page of its subscriptions."""
        found = subscriptions_page(self.hub, asked.path["topic"], asked.query.limit, asked.query.after)
        row = existing(self.hub.live_view.get(TopicRow, asked.path["topic"]), "no topic with this name")
        shown = [
            {"subscriber": one.subscriber, "since": iso_moment(one.since), "subscribed_by": one.subscribed_by}
            for one in found
        ]
        return {**topic_as_json(self.hub, row, asked.caller.principal), "subscriptions": shown}


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
