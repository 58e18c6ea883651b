"""Publishes messages to topics, and subscribes mailboxes to them.

  trunkline topics subscribe news                   your own mailbox; the first subscription makes the topic
  trunkline topics subscribe news --as echo         another mailbox (operator)
  trunkline topics publish news note --text "soup is ready"
  trunkline topics publish news note @menu.json --priority high --expires-in 2h
  trunkline topics unsubscribe news                 nothing that is published from now on
  trunkline topics list                             topics, their subscribers and newest messages
  trunkline topics show news                        who is subscribed

Each subscriber gets one copy of a message in its mailbox, and reads it like any other: over HTTP ('messages'),
MCP or MQTT. The subscribers are those at the message's position in the log. 'publish' ends when the message is
in the log; the copies come into the mailboxes after that, usually within a second.

The token names the sender and the mailbox that is subscribed: the operator's, unless TRUNKLINE_TOKEN holds
another token. The topic of the log in a Kafka of your own is made by 'trunkline log create'.

Exit codes: 0; 2 wrong arguments; 3 no such topic or mailbox, nothing found; 4 refused, with the reason; 5 the
gateway does not answer.
"""

from __future__ import annotations

from typing import Final

from connectors.cli.messages.message_arguments import (
    BLOB,
    CONVERSED,
    PAYLOAD,
    SENT,
    blob_of,
    payload_of,
    sent_fields,
)
from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import name_of, request_id
from connectors.cli.shared.call import Call, Columns
from connectors.cli.shared.declared import Shown, add_declared
from connectors.cli.shared.text_output import age_of
from trunkline_agent.terminal_text import escaped

_TOPIC: Final = argument("topic", "the topic", type=name_of("a topic"))
_WHOSE: Final = "the mailbox (operator; default: your own)"
_AS: Final = {
    "subscriber": argument("--as", _WHOSE, type=name_of("a mailbox"), dest="subscriber", metavar="NAME")
}
_TOPICS: Final[Columns] = {
    "TOPIC": "name",
    "SUBSCRIBERS": "subscribers",
    "YOU": lambda row: "subscribed" if row["subscribed"] else "",
    "MESSAGES": "publications",
    "NEWEST": lambda row: "" if row["last_published_at"] is None else age_of(row["last_published_at"]),
    "MESSAGE": "last_message_id",
}
_SUBSCRIPTIONS: Final[Columns] = {
    "SUBSCRIBER": "subscriber",
    "AGE": lambda row: age_of(row["since"]),
    "SUBSCRIBED BY": "subscribed_by",
}
ACTIONS: Final = Actions()


@ACTIONS.add(
    _TOPIC,
    *PAYLOAD,
    *CONVERSED,
    *SENT,
    BLOB,
    request_id("the same message, not a second one"),
    example='trunkline topics publish news note --text "soup is ready" --expires-in 2h',
    late="payload",
)
def _publish(call: Call) -> int:
    """Publish a message to all present subscribers of a topic."""
    answer = call.post_named(
        "topics",
        call.topic,
        possible_effect="the message was published",
        type=call.type,
        payload=payload_of(call),
        blob=blob_of(call),
        **sent_fields(call),
    )
    to = f"{answer['recipients']} subscribers of {escaped(call.topic)}"
    return call.print_answer(answer, f"message {escaped(answer['message_id'])} is on its way to {to}")


add_declared(
    ACTIONS,
    "topics",
    Shown("subscribe", answer="{subscriber} is subscribed to {topic}", arguments=_AS),
    Shown("unsubscribe", answer="{subscriber} is not subscribed to {topic}", arguments=_AS),
    Shown("list", columns=_TOPICS),
    Shown("show", columns=_SUBSCRIPTIONS, adapted=lambda found: {**found, "total": found["subscribers"]}),
)
