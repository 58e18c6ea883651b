"""The fold of `principal/<name>`: added once, revoked once, for ever."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold.entries import Entries
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.view_rows import REGISTRY_PRINCIPALS, PrincipalRow
from schemas.streams.principal.principals import ACTIVE, REVOKED
from schemas.wire.record import PRINCIPAL_ADDED, Envelope, Record
from schemas.wire.verdicts import SEQ_CONFLICT, UNKNOWN_STREAM

_PRINCIPAL: Final = "principal"
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(PrincipalRow).decode


def settle_principal(
    record: Record, envelope: Envelope, name: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    """Settle one record of the principal's stream whose body passed the checks of its wire model."""
    raw = entries.get(_PRINCIPAL)
    if envelope.type == PRINCIPAL_ADDED:
        if raw is not None:
            known = _decode(raw)
            if (known.role, known.token_sha256) == (body["role"], body["token_sha256"]):
                return duplicate(known.status)
            return rejected(SEQ_CONFLICT, "a principal with this name exists already", known.status)
        row = PrincipalRow(
            principal=name,
            role=body["role"],
            status=ACTIVE,
            token_sha256=body["token_sha256"],
            added_by=f"{envelope.door}/{envelope.principal}",
            added_at=record.logged_at_us,
            revoked_at=None,
        )
    else:
        if raw is None:
            return rejected(UNKNOWN_STREAM, "no principal with this name")
        known = _decode(raw)
        if known.status == REVOKED:
            return duplicate(REVOKED)
        row = msgspec.structs.replace(known, status=REVOKED, revoked_at=record.logged_at_us)
    entries.put(_PRINCIPAL, _encode(row))
    return accepted(row.status, (Change(REGISTRY_PRINCIPALS, name, row),))
