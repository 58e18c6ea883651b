"""The calls of an agent as plans: all that `Agent` and `AsyncAgent` have in common."""

from __future__ import annotations

import logging
import os
from typing import Any, Final, Unpack

from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import UsageError
from trunkline_agent.hub import message_plans
from trunkline_agent.hub.held_messages import Extension, Held, HeldMessages
from trunkline_agent.hub.hub_requests import send_key
from trunkline_agent.hub.hub_values import Published, ReceivedMessage, Sent
from trunkline_agent.hub.operation_values import SentFields
from trunkline_agent.hub.plans import Plan, Retries
from trunkline_agent.wire.ids import is_name

HUB: Final = "hub"
STATUS_TYPE: Final = "status"
LEASE_S: Final = 30
# A handler that takes longer hangs, and another consumer shall try.
LONGEST_S: Final = 3600.0
PATIENCE_S: Final = 30.0
# A block that raised, or an agent that ends, gives its messages back, and must not take long for it.
PARTING: Final = Retries(patience_s=2.0)
NOT_ACKNOWLEDGED: Final = "the agent ended before it acknowledged the message"
LOG: Final = logging.getLogger("trunkline_agent")


class AgentCalls:
    """The plans of one agent's calls.

    Attributes:
        name: The agent's name. Empty: only the hub knows it, by the token.
        access: Its access to the hub.
        ca_certs: The authority that the hub's TLS must have.
        retries: When its requests are sent again.

    Raises:
        UsageError: The credentials are another agent's, or have no access to the hub.
    """

    def __init__(
        self,
        name: str | None,
        credentials: Credentials | str | os.PathLike[str] | None,
        patience_s: float,
    ) -> None:
        if credentials is None:
            credentials = Credentials.from_environment()
        elif not isinstance(credentials, Credentials):
            credentials = Credentials.load(credentials)
        if name and not is_name(name):
            raise UsageError(f"{name!r} is not a name of an agent")
        if name and credentials.name and name != credentials.name:
            raise UsageError(f"the credentials are those of {credentials.name!r}, not of {name!r}")
        self.name = name or credentials.name
        self.access: HubAccess = credentials.hub_access()
        self.ca_certs = credentials.ca_certs
        self.retries = Retries(patience_s)

    def send(
        self,
        recipient: str,
        type: str,  # noqa: A002
        payload: Any,
        key: str | None,
        **fields: Unpack[SentFields],
    ) -> Plan[Sent]:
        """Send a message."""
        body = message_plans.envelope(type, payload, recipient=recipient, **fields)
        return message_plans.send(body, send_key("message", body, key), self.retries)

    def ask(
        self,
        recipient: str,
        type: str,  # noqa: A002
        payload: Any,
        timeout_s: float,
        key: str | None,
        **fields: Unpack[SentFields],
    ) -> Plan[Any]:
        """Send a message and wait for the reply."""
        body = message_plans.envelope(type, payload, recipient=recipient, **fields)
        taken = yield from message_plans.ask(body, send_key("question", body, key), timeout_s, self.retries)
        return taken.messages[0]

    def reply(
        self,
        message: ReceivedMessage,
        payload: Any,
        type: str,  # noqa: A002
        key: str | None,
        **fields: Unpack[SentFields],
    ) -> Plan[Sent]:
        """Send an answer to the sender of a message, in its conversation."""
        place: SentFields = {"in_reply_to": message.id, "thread": message.thread}
        if given := place.keys() & fields.keys():
            raise TypeError(f"an answer has its {min(given)!r} from the message")
        body = message_plans.envelope(type, payload, recipient=message.sender, **(place | fields))
        return message_plans.reply(message.handling, body, key, self.retries)

    def publish(
        self,
        topic: str,
        type: str,  # noqa: A002
        payload: Any,
        key: str | None,
        **fields: Unpack[SentFields],
    ) -> Plan[Published]:
        """Publish a message to a topic."""
        body = message_plans.envelope(type, payload, **fields)
        return message_plans.publish(topic, body, send_key(f"topic/{topic}", body, key), self.retries)

    def status(self, state: str, text: str | None) -> Plan[Sent]:
        """Report to the hub what the agent does."""
        payload = {"status": state} if text is None else {"status": state, "text": text}
        return self.send(HUB, STATUS_TYPE, payload, None)


def retries_of(extension: Extension) -> Retries:
    """Return the patience with the extension of leases: what it cannot do soon, the next one does."""
    return retries_of_lease(extension.lease_s)


def retries_of_lease(lease_s: int) -> Retries:
    """Return the patience with a request of the background for leases of this duration."""
    return Retries(patience_s=min(5.0, lease_s / 6))


def overdue_by_lease(held: HeldMessages, now: float) -> dict[str, list[Held]]:
    """Return the messages whose handling has taken too long, by their leases, and log a warning of each."""
    found: dict[str, list[Held]] = {}
    for one in held.overdue(now):
        LOG.warning("message %s is given back: %s", one.message_id, one.why_overdue)
        found.setdefault(one.lease_id, []).append(one)
    return found


def give_up(lease_id: str, held: list[Held]) -> Plan[None]:
    """Give messages back whose handling has taken too long, so that they are handed out again."""
    message_ids = [one.message_id for one in held]
    return message_plans.give_back(
        lease_id, message_ids, held[0].why_overdue, retries_of_lease(held[0].lease_s)
    )


def reason_of(error: BaseException) -> str:
    """Return why a message is given back. The text of an error may have a secret, its type has none."""
    return type(error).__name__
