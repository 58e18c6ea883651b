"""Arguments that several actions about messages share: a payload, a mailbox, a wait, a priority and so on."""

from __future__ import annotations

import os
from typing import Any, Final

from connectors.cli.shared.actions import Argument, argument
from connectors.cli.shared.arguments import duration, name_of
from connectors.cli.shared.call import Call
from connectors.cli.shared.files import STANDARD_INPUT, read_given
from trunkline_agent.errors import UsageError
from trunkline_agent.wire.durations import duration_s
from trunkline_agent.wire.ids import is_name
from trunkline_agent.wire.message_fields import CONVERSATION, DESCRIPTION, MessageField, message_fields_of
from trunkline_agent.wire.strict_json import MalformedJsonError, decode

_DEFAULT_REALM: Final = "default"
# Written out, because the module of messages is slow to import and help must be quick.
PRIORITIES: Final = ("low", "normal", "high")
_FILE_MARK: Final = "@"
PAYLOAD: Final = (
    argument("type", "the kind of message, e.g. ask"),
    argument("payload", "any JSON; - reads it from standard input, @FILE from a file", nargs="?"),
    argument("--text", 'instead of PAYLOAD: {"text": TEXT}'),
)
EXPIRES: Final = duration(
    "--expires-in",
    "the message ends if nobody takes it within so long, e.g. 10m; at most 366d",
    "--expires",
)
PRIORITY: Final = argument(
    "--priority", "low, normal (default) or high; high ones are handed out first", choices=PRIORITIES
)
WAIT: Final = duration("--wait", "wait up to so long for the first message, e.g. 30s; at most 5m")


def _field(one: MessageField) -> Argument:
    def checked(text: str) -> str:
        if why := one.fault(text, is_name):
            raise UsageError(f"{one.option}: {why}, found {text!r}")
        return text

    return argument(one.option, one.short, type=checked, metavar=one.metavar)


CONVERSED: Final = tuple(map(_field, CONVERSATION))
SENT: Final = (
    *map(_field, DESCRIPTION),
    PRIORITY,
    EXPIRES,
    duration(
        "--deliver-after", "the message is in the mailbox after so long, e.g. 1h; at most 366d", "--after"
    ),
)


def payload_of(call: Call) -> Any:
    """Return the payload of a message from the arguments `PAYLOAD` of a call; None if neither is given.

    Raises UsageError if it is no JSON or cannot be read, and if both are given.
    """
    if call.text is not None:
        if call.payload is not None:
            raise UsageError("give PAYLOAD or --text, not both")
        return {"text": call.text}
    given: str | None = call.payload
    if given is None:
        return None
    if given == STANDARD_INPUT or given.startswith(_FILE_MARK):
        raw = read_given(given.removeprefix(_FILE_MARK), "PAYLOAD", call.settings.limits.payload_bytes)
    else:
        raw = os.fsencode(given)
    try:
        return decode(raw)[0]
    except MalformedJsonError as error:
        raise UsageError(f"PAYLOAD: {error}; plain text goes with --text") from None


def mailbox_of(text: str) -> tuple[str, str]:
    """Return realm and name of a mailbox that is written as NAME or REALM/NAME."""
    realm, slash, name = text.rpartition("/")
    return (realm if slash else _DEFAULT_REALM), name


def sent_fields(call: Call) -> dict[str, Any]:
    """Return the options `SENT` and `CONVERSED` of a call as fields of a message, without those not given."""
    given = {"priority": call.priority, "expires_in_s": call.expires_in, "deliver_after_s": call.deliver_after}
    return {name: value for name, value in given.items() if value is not None} | message_fields_of(call)


def _mailbox_text(text: str) -> str:
    realm, name = mailbox_of(text)
    name_of("a realm")(realm)
    name_of("a mailbox")(name)
    return text


def mailbox_argument(text: str = "", **options: Any) -> Argument:
    """Return the argument for a mailbox; `text` ends its help. For `options` see `argument`."""
    text = f"the mailbox; NAME alone is default/NAME{text}"
    return argument("mailbox", text, type=_mailbox_text, metavar="REALM/NAME", **options)


def lease_argument(text: str, **options: Any) -> Argument:
    """Return the option `--for`, the duration of a lease in seconds (`call.lease_s`); `text` is its help."""
    return argument("--for", text, type=_lease_s, dest="lease_s", metavar="TIME", **options)


def _lease_s(text: str) -> int:
    seconds = duration_s(text)
    if not seconds.is_integer() or seconds < 1:
        raise UsageError(f"--for: expected whole seconds, 1 or more, found {text!r}")
    return int(seconds)
