"""Plans of an agent's calls: all that `Agent` and `AsyncAgent` have in common.

Here are its plain operations, schedules and blobs. The plans of its messages are in `message_plans`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import NotFound, TrunklineError, UsageError
from trunkline_agent.hub import message_plans
from trunkline_agent.hub.held_messages import Extension, Held, HeldMessages
from trunkline_agent.hub.hub_requests import encoded, get_json, path_of, post_json, send_key
from trunkline_agent.hub.hub_values import BlobReference, HubValue, Published, ReadAnswer, ReceivedMessage, Sent
from trunkline_agent.hub.operation_values import SentFields
from trunkline_agent.hub.plans import Plan, Request, Retries, exchange
from trunkline_agent.wire.ids import is_name

# Messages of agents are in this realm.
_REALM: Final = "default"
# A transfer may take so long beside the usual time of an answer.
_SLOWEST_BYTES_PER_S: Final = 200_000
_V = TypeVar("_V", bound=HubValue)
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


def read(value: type[_V], path: str, query: Mapping[str, Any], retries: Retries) -> Plan[_V]:
    """Return what an operation reads, as a `value`. For `path` see `path_of`."""
    return value.of((yield from get_json(path, query, retries=retries)))


def change(value: type[_V], path: str, body: Mapping[str, Any], key: str | None, retries: Retries) -> Plan[_V]:
    """Carry out an operation that changes something, and return its answer as a `value`."""
    return value.of((yield from post_json(path, body, retries=retries, key=key)))


def list_rows(
    value: type[_V], path: str, rows: str, by: str, query: Mapping[str, Any], retries: Retries
) -> Plan[list[_V]]:
    """Return all rows of a list, whatever the number of requests.

    Args:
        value: The class of a row.
        path: The path, see `path_of`.
        rows: The field of an answer with the rows.
        by: The field of a row by which the list is sorted.
        query: The query of each request. It has a `limit` if the hub would return fewer rows without it.
        retries: When a request is sent again.
    """
    found: list[_V] = []
    last = None
    while True:
        answer = yield from get_json(path, {**query, "after": last}, retries=retries)
        with ReadAnswer():
            listed = list(answer[rows])
            found += [value.of(one) for one in listed]
            if not listed or not (answer.get("left") or len(listed) == query.get("limit")):
                return found
            last = listed[-1][by]


def set_schedule(name: str, body: dict[str, Any], key: str | None, retries: Retries) -> Plan[Any]:
    """Make a schedule, or replace the caller's one of this name. Return it as the hub shows it.

    Fields of `body` that are None are left out. `key` is that of `send_key`. Raises UsageError unless `body`
    has either `cron` or `every_s`.
    """
    wanted = {field: value for field, value in body.items() if value is not None}
    if (wanted.get("cron") is None) == (wanted.get("every_s") is None):
        raise UsageError("a schedule has either cron or every_s")
    path, found_key = path_of("schedules", name), send_key(f"schedule/{name}", encoded(wanted), key).text
    return (yield from post_json(path, wanted, retries=retries, key=found_key))


def upload(content: bytes, content_type: str | None, retries: Retries) -> Plan[BlobReference]:
    """Store a large content, and return the reference to it."""
    query = {"digest": hashlib.sha256(content).hexdigest()}
    headers = {"Content-Type": content_type or "application/octet-stream"}
    wait_s = len(content) / _SLOWEST_BYTES_PER_S
    # The digest is the content's name, so a second upload changes nothing.
    answer = yield from exchange(Request("PUT", path_of("blobs"), query, headers, content, wait_s), retries)
    return BlobReference.of(answer.json())


def download(recipient: str, message_id: str, reference: BlobReference | None, retries: Retries) -> Plan[bytes]:
    """Fetch the content that a message refers to, and check its digest.

    Raises:
        NotFound: The message refers to none, or it was removed.
        TrunklineError: The content is not that of the digest.
    """
    if reference is None:
        raise NotFound(f"message {message_id} refers to no blob")
    path = path_of("mailboxes", _REALM, recipient, "messages", message_id, "blob")
    wait_s = reference.bytes / _SLOWEST_BYTES_PER_S
    answer = yield from exchange(Request("GET", path, wait_s=wait_s), retries)
    if hashlib.sha256(answer.body).hexdigest() != reference.digest:
        raise TrunklineError(
            f"the blob of message {message_id} has another content than its digest {reference.digest} says",
            reason="damaged_blob",
            advice="fetch it again, or ask the sender to send it again",
        )
    return answer.body


def content_of(source: bytes | str | os.PathLike[str], content_type: str | None) -> tuple[bytes, str | None]:
    """Return the bytes to upload and their media type. `source` is the bytes, or the path of a file.

    Raises:
        NotFound: There is no such file.
        UsageError: The file cannot be read.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), content_type
    try:
        content = Path(source).read_bytes()
    except FileNotFoundError:
        raise NotFound(f"no file {os.fspath(source)}") from None
    except OSError as error:
        raise UsageError(f"file {os.fspath(source)}: {error.strerror}") from None
    import mimetypes  # reads the tables of the machine

    return content, content_type or mimetypes.guess_type(os.fspath(source))[0]


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
    return _retries_of_lease(extension.lease_s)


def _retries_of_lease(lease_s: int) -> Retries:
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
        lease_id, message_ids, held[0].why_overdue, _retries_of_lease(held[0].lease_s)
    )


def reason_of(error: BaseException) -> str:
    """Return why a message is given back. The text of an error may have a secret, its type has none."""
    return type(error).__name__
