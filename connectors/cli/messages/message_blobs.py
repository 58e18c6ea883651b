"""The option `--blob` of commands that send, and the action that fetches the blob of a message (DL-25)."""

from __future__ import annotations

import hashlib
import mimetypes
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from connectors.cli.messages.message_arguments import mailbox_argument, mailbox_of
from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import name_of
from connectors.cli.shared.call import Call
from connectors.cli.shared.files import read_given
from trunkline_agent.errors import BackboneUnreachable, UsageError
from trunkline_agent.terminal_text import escaped

if TYPE_CHECKING:
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient

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
