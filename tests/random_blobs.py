"""Random records of blobs, for the random log: uploads of few contents, and removals, which come too early."""

from __future__ import annotations

import hashlib
import random

from schemas.streams.blob import blob_registry as blobs
from schemas.wire.record import OutgoingRecord

DIGESTS = tuple(hashlib.sha256(bytes([number])).hexdigest() for number in range(5))
# No blob ends while the log is written, or gateways that follow the log would append records of their own.
_KEEP_S = (86_400, 31_536_000)


def blob_record(draw: random.Random) -> OutgoingRecord:
    """Return one record about one of few blobs."""
    digest = draw.choice(DIGESTS)
    at = {"digest": digest, "object": f"{digest}.{draw.randrange(3)}"}
    if draw.random() < 0.2:
        ce_id = f"removed-{draw.randrange(50)}"
        removed = blobs.BlobRemoved.model_validate(at)
        return removed.record(ce_id=ce_id, door="reactor", principal="reactor")
    upload = {
        "request_id": f"upload-{draw.randrange(300)}",
        "bytes": draw.choice([1, 1, 1, 2]),
        "content_type": draw.choice([None, "image/png", "text/html"]),
        "keep_s": draw.choice(_KEEP_S),
    }
    body = blobs.BlobStored.model_validate({**at, **upload})
    return body.record(door="http", principal=draw.choice(["ann", "bob"]))
