"""The search pair: two listeners of `<search>`, a fast one with few titles and a slow one with more."""

from __future__ import annotations

import asyncio

from connectors.doors.xml_pump.handlers import ListenerMessage, handles
from connectors.plumbing.xml_payloads.payload_types import to_xml
from connectors.tools.sample_organism.payloads import Found, Search

# The duration of a search in the archive.
ARCHIVE_S = 1.0
_INDEX = ("The log and its fold", "A mailbox for each agent", "Leases and who holds them")
_ARCHIVE = (*_INDEX, "How the log came to be", "What a mailbox costs", "Messages of ten years")


@handles(Search)
async def index(message: ListenerMessage) -> bytes:
    """Return, as XML `<found>`, the titles in the index with one of the words of a `<search>`. Does not wait.

    Without a matching title, the `<found>` has no titles.
    """
    return to_xml(Found("index", _with_words(_INDEX, message.payload.query)))


@handles(Search)
async def archive(message: ListenerMessage) -> bytes:
    """Return, as XML `<found>`, the titles in the archive with one of the words of a `<search>`, after 1 s.

    Without a matching title, the `<found>` has no titles.
    """
    await asyncio.sleep(ARCHIVE_S)
    return to_xml(Found("archive", _with_words(_ARCHIVE, message.payload.query)))


def _with_words(titles: tuple[str, ...], query: str) -> list[str]:
    words = query.casefold().split()
    return [title for title in titles if any(word in title.casefold() for word in words)]
