"""Plans of what an agent does beside messages: plain operations, schedules, blobs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from trunkline_agent.errors import NotFound, TrunklineError, UsageError
from trunkline_agent.hub.hub_requests import encoded, get_json, path_of, post_json, send_key
from trunkline_agent.hub.hub_values import BlobReference, HubValue, ReadAnswer
from trunkline_agent.hub.plans import Plan, Request, Retries, exchange

# Messages of agents are in this realm.
_REALM: Final = "default"
# A transfer may take so long beside the usual time of an answer.
_SLOWEST_BYTES_PER_S: Final = 200_000
_V = TypeVar("_V", bound=HubValue)


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
    """Make a schedule, or replace the caller's one of this name. Return it as the hub shows it."""
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
