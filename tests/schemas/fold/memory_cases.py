"""Records of requests for the tests of memories, without a fold."""

from __future__ import annotations

from typing import Any

from schemas.fold.entries import Entries
from schemas.fold.stream_kind import FoldInput
from schemas.wire.record import read_envelope
from tests.schemas.job_records import KEYRING, document_record


def request(ce_id: str, body: dict[str, Any], entries: Entries) -> FoldInput:
    """Return the input of a fold for a request."""
    record = document_record({}, ce_id=ce_id)
    return FoldInput(record, read_envelope(record), "s", body, entries, KEYRING, plain=True, masked=False)
