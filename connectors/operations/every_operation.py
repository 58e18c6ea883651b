"""All declared operations of the hub, for its doors and for the program that writes clients of them."""

from __future__ import annotations

from typing import Final

from connectors.hub.engine.operation import Operation
from connectors.operations.agents.agent_operations import AGENTS, CONTAINERS, PARTICIPANTS
from connectors.operations.agents.mqtt_agent_operations import MQTT_AGENTS, OF_AGENTS
from connectors.operations.messages.lease_operations import AcknowledgeMessages, ExtendLease, GiveBackMessages
from connectors.operations.messages.message_operations import (
    OF_MESSAGES,
    MarkMessagesRead,
    SendMessage,
    TakeMessages,
)
from connectors.operations.principals.dead_messages import ReplayMessage
from connectors.operations.principals.limit_operations import LIMITS
from connectors.operations.principals.principal_operations import MAILBOXES, PRINCIPALS
from connectors.operations.schedules.schedule_operations import SCHEDULES
from connectors.operations.topics.broadcast_operations import AUDIT, BroadcastMessage
from connectors.operations.topics.topic_operations import (
    ListTopics,
    PublishMessage,
    ShowTopic,
    SubscribeMailbox,
    UnsubscribeMailbox,
)
from connectors.operations.webhooks.webhook_operations import WEBHOOKS
from connectors.operations.work.job_operations import BROKERS, JOBS
from connectors.operations.work.session_operations import SESSIONS
from connectors.operations.work.task_operations import TASKS, TOKENS

# The most used ones come first, because the careful path tries them in this order.
_CLASSES: Final[tuple[type[Operation], ...]] = (
    SendMessage,
    BroadcastMessage,
    TakeMessages,
    MarkMessagesRead,
    AcknowledgeMessages,
    GiveBackMessages,
    ExtendLease,
    ReplayMessage,
    PublishMessage,
    SubscribeMailbox,
    UnsubscribeMailbox,
    ListTopics,
    ShowTopic,
)
_FAMILIES: Final = (
    *(JOBS, AUDIT, BROKERS, SESSIONS, PRINCIPALS, MAILBOXES, LIMITS, OF_MESSAGES, SCHEDULES, WEBHOOKS),
    *(AGENTS, CONTAINERS, TASKS, TOKENS, PARTICIPANTS, OF_AGENTS, MQTT_AGENTS),
)
OPERATIONS: Final = (*_CLASSES, *(one for family in _FAMILIES for one in family.operations))
