"""Calls an address with each message of a mailbox or a topic.

  trunkline webhooks set ann https://agents.example.org/inbox       the messages of the mailbox ann
  trunkline webhooks set news-hook https://example.org/news --topic news       what is published to a topic
  trunkline webhooks test ann                       call it now with a test event
  trunkline webhooks list
  trunkline webhooks pause ann
  trunkline webhooks resume ann
  trunkline webhooks remove ann                     the messages stay in the mailbox

The address gets a signed CloudEvent by POST, and answers with a status of 200 to 299. Any other answer is a
failure, also a redirect: the call is repeated after a growing pause, and in the end the message is dead. 'set'
prints the secret that signs the calls, once. 'set' again gives a new address and a new secret. With --overlap,
calls are signed with the previous secret, too, for so long.

The owner of a mailbox may set its webhook, and the operator that of each mailbox. Only the operator may set one
with --topic. Its name must be free, because it gets a mailbox of its own.

Exit codes: 0; 1 the test call failed; 2 wrong arguments; 3 no such mailbox or webhook; 4 refused, with the
reason; 5 the gateway does not answer.
"""

from __future__ import annotations

from typing import Any, Final

from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import name_of, request_id
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.declared import Lines, Shown, add_declared
from trunkline_agent.errors import UsageError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import duration_s

_NAME: Final = argument("name", "the webhook, which has the name of its mailbox", type=name_of("a webhook"))
_FAILED: Final = 1
ACTIONS: Final = Actions()


def _overlap_s(text: str) -> int:
    seconds = duration_s(text)
    if not seconds.is_integer():
        raise UsageError(f"--overlap: expected whole seconds, found {text!r}")
    return int(seconds)


@ACTIONS.add(
    _NAME,
    argument("url", "the address to call, https"),
    argument("--topic", "the topic whose messages are called", type=name_of("a topic"), metavar="TOPIC"),
    argument("--overlap", "sign with the previous secret, too, e.g. 1d", type=_overlap_s, metavar="TIME"),
    request_id("the same request, and gets the same secret"),
    example="trunkline webhooks set ann https://agents.example.org/inbox",
)
def _set(call: Call) -> int:
    """Make a webhook or change it; print its new secret."""
    given = {"url": call.url, "topic": call.topic, "overlap_s": call.overlap}
    row = call.post_named("webhooks", call.name, possible_effect="the webhook was set", **given)
    text = f"webhook {escaped(row['webhook'])} calls {escaped(row['url'])}"
    return call.print_answer(row, text, f"secret: {row['secret']}", "It is shown this once. Keep it.")


_COLUMNS: Final[Columns] = {
    "WEBHOOK": "webhook",
    "STATE": lambda row: _state(row),
    "URL": "url",
    "TOPIC": "topic",
    "PENDING": "pending",
    "DEAD": "dead",
    "LAST SUCCESS (UTC)": lambda row: _short(row["last_success_at"]),
    "WHY": lambda row: escaped(str(row["why_paused"] or row["last_failure"] or "")),
}


@ACTIONS.add(_NAME, example="trunkline webhooks test ann")
def _test(call: Call) -> int:
    """Call the address now with a test event; exit code 1 if that fails."""
    found = call.post("webhooks", call.name, "test")
    how = "delivered" if found["delivered"] else f"failed: {escaped(str(found['why']))}"
    code = call.print_answer(found, f"{how}, {found['milliseconds']} ms")
    return code if found["delivered"] else _FAILED


def _changed(effect: str) -> Lines:
    def lines(row: Row) -> list[str]:
        waiting = f", {row['pending']} messages wait" if row["pending"] else ""
        return [f"webhook {escaped(row['webhook'])} {effect}{waiting}"]

    return lines


def _state(row: Row) -> str:
    if row["status"] == "active" and row["failures_in_a_row"]:
        return f"{row['failures_in_a_row']} failures"
    return escaped(str(row["status"]))


def _short(moment: Any) -> str | None:
    """Return a time without its fraction of a second; None for None."""
    return None if moment is None else escaped(str(moment)).partition(".")[0]


add_declared(
    ACTIONS,
    "webhooks",
    Shown("list", columns=_COLUMNS),
    Shown("show"),
    Shown("pause", answer=_changed("is paused")),
    Shown("resume", answer=_changed("is active")),
    Shown("remove", answer=_changed("is removed")),
)
