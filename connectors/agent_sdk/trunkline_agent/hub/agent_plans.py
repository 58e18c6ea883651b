"""Plans of what an agent does beside messages: subscriptions, schedules, other agents, blobs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from trunkline_agent.errors import NotFound, TrunklineError, UsageError
from trunkline_agent.hub.derived_keys import send_key
from trunkline_agent.hub.hub_requests import encoded, get_json, path_of, post_json
from trunkline_agent.hub.hub_values import AgentInfo, BlobReference, Schedule, not_a_gateway
from trunkline_agent.hub.plans import Plan, Request, Retries, exchange

# Messages of agents are in this realm.
_REALM: Final = "default"
# A transfer may take so long beside the usual time of an answer.
_SLOWEST_BYTES_PER_S: Final = 200_000
_SCHEDULES_MOST: Final = 1000


def change_subscription(topic: str, is_subscribed: bool, retries: Retries) -> Plan[None]:
    """Begin or end the subscription of the caller's mailbox to a topic. Repeating it changes nothing."""
    action = "subscribe" if is_subscribed else "unsubscribe"
    yield from post_json(path_of("topics", topic, action), {}, retries=retries)


def set_schedule(name: str, body: dict[str, Any], key: str | None, retries: Retries) -> Plan[Schedule]:
    """Make a schedule, or replace the caller's one of this name."""
    wanted = {field: value for field, value in body.items() if value is not None}
    if (wanted.get("cron") is None) == (wanted.get("every_s") is None):
        raise UsageError("a schedule has either cron or every_s")
    path, found_key = path_of("schedules", name), send_key(f"schedule/{name}", encoded(wanted), key).text
    return Schedule.of((yield from post_json(path, wanted, retries=retries, key=found_key)))


def remove_schedule(name: str, retries: Retries) -> Plan[Schedule]:
    """Remove a schedule. Raises NotFound if there is none, and Refused if it is removed already."""
    return Schedule.of((yield from post_json(path_of("schedules", name, "remove"), {}, retries=retries)))


def list_schedules(retries: Retries) -> Plan[list[Schedule]]:
    """Return the active schedules that the caller set, sorted by name."""
    found: list[Schedule] = []
    while True:
        query = {"limit": _SCHEDULES_MOST, "after": found[-1].name if found else None}
        answer = yield from get_json(path_of("schedules"), query, retries=retries)
        listed = _list_in(answer, "schedules")
        found += [Schedule.of(one) for one in listed]
        if not listed or not (answer.get("left") or len(listed) == _SCHEDULES_MOST):
            return found


def discover(capability: str | None, status: str | None, retries: Retries) -> Plan[list[AgentInfo]]:
    """Return the agents that take part, sorted by name."""
    found: list[AgentInfo] = []
    while True:
        query = {"capability": capability, "status": status, "after": found[-1].name if found else None}
        answer = yield from get_json(path_of("participants"), query, retries=retries)
        listed = _list_in(answer, "participants")
        found += [AgentInfo.of(one) for one in listed]
        if not (listed and answer.get("left")):
            return found


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


def _list_in(found: Any, name: str) -> list[Any]:
    if not isinstance(found, dict) or not isinstance(found.get(name), list):
        raise not_a_gateway()
    return list(found[name])
