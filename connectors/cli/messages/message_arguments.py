"""Arguments that several commands about messages share: a payload, a mailbox, a wait, a priority and so on.

The option `--blob` of commands that send is one of them. The action that fetches a message's blob is here, too
(DL-25).
"""

from __future__ import annotations

import hashlib
import mimetypes
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from connectors.cli.shared.actions import Actions, Argument, argument
from connectors.cli.shared.arguments import STANDARD_INPUT, duration, name_of, read_given
from connectors.cli.shared.call import Call
from trunkline_agent.errors import BackboneUnreachable, UsageError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import is_name
from trunkline_agent.wire.message_fields import (
    CONVERSATION,
    DESCRIPTION,
    MessageField,
    duration_s,
    message_fields_of,
)
from trunkline_agent.wire.strict_json import MalformedJsonError, decode

if TYPE_CHECKING:
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient

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


BLOB: Final = argument(
    "--blob",
    "a file that the recipient can fetch, larger than a payload may be; - is standard input",
    metavar="FILE",
)
_DEFAULT_TYPE: Final = "application/octet-stream"
_READ_TIMEOUT_S: Final = 60.0
ACTIONS: Final = Actions()


def blob_of(call: Call) -> str | None:
    """Upload the file of the option `BLOB` of a call, and return its digest; None without the option.

    Raises UsageError if the file cannot be read or is longer than `limits.blob_bytes`, and as
    `GatewayClient.request`.
    """
    if call.blob is None:
        return None
    content = read_given(call.blob, "--blob", call.settings.limits.blob_bytes)
    kind = mimetypes.guess_type(call.blob)[0] or _DEFAULT_TYPE
    digest = hashlib.sha256(content).hexdigest()
    from connectors.plumbing.gateway_client.gateway_client import path_of

    with call.gateway() as gateway:
        gateway.request(
            "PUT",
            path_of("blobs"),
            wait_s=_READ_TIMEOUT_S,
            body=content,
            headers={"Content-Type": kind},
            query={"digest": digest},
        )
    return digest


@ACTIONS.add(
    mailbox_argument(),
    argument("message", "the message", type=name_of("a message")),
    argument(
        "--out",
        "the file to write; replaces an older one (default: standard output)",
        type=Path,
        metavar="FILE",
    ),
    example="trunkline messages blob operator 5b7e… --out report.pdf",
    takes_json=False,
)
def _blob(call: Call) -> int:
    """Fetch the blob of a message, also some time after the message was taken."""
    with call.gateway() as gateway:
        if call.out is None:
            _fetch(gateway, call, sys.stdout.buffer)
            return 0
        part = call.out.with_name(f"{call.out.name}.part")
        try:
            with part.open("wb") as file:
                size = _fetch(gateway, call, file)
            part.replace(call.out)
        except OSError as error:
            raise UsageError(f"--out: cannot write {str(call.out)!r}: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)
    print(f"{size} bytes are in {escaped(str(call.out))}")
    return 0


def _fetch(gateway: GatewayClient, call: Call, file: IO[bytes]) -> int:
    """Write the blob of the call's message to a file, and return its length in bytes.

    Raises BackboneUnreachable if the content does not come as a whole, and the error of the answer's status.
    """
    from connectors.plumbing.gateway_client.gateway_client import path_of
    from trunkline_agent.hub.plans import Request

    path = path_of("mailboxes", *mailbox_of(call.mailbox), "messages", call.message, "blob")
    size = 0
    try:
        for part in gateway.parts(Request("GET", path), _READ_TIMEOUT_S):
            file.write(part)
            size += len(part)
        file.flush()
    except BackboneUnreachable as error:
        raise BackboneUnreachable(
            f"the blob did not come as a whole ({escaped(str(error))}); try again"
        ) from None
    return size
