"""Verdicts and reasons: the words that the fold, the ledger, the receipts and the answers share."""

from __future__ import annotations

from typing import Final, Literal

Verdict = Literal["accepted", "duplicate", "rejected"]

ACCEPTED: Final = "accepted"
DUPLICATE: Final = "duplicate"
REJECTED: Final = "rejected"

TOO_LARGE: Final = "too_large"
MALFORMED: Final = "malformed"
SCHEMA_VERSION: Final = "schema_version"
UNKNOWN_STREAM: Final = "unknown_stream"
BAD_SIGNATURE: Final = "bad_signature"
SECRET_IN_EVENT: Final = "secret_in_event"  # noqa: S105  a reason, not a secret
SEQ_CONFLICT: Final = "seq_conflict"
TOO_LATE: Final = "too_late"
AFTER_TERMINAL: Final = "after_terminal"
ILLEGAL_TRANSITION: Final = "illegal_transition"
UNAUTHORIZED: Final = "unauthorized"
POLICY: Final = "policy"
UNKNOWN_RECIPIENT: Final = "unknown_recipient"
FOLD_FAILED: Final = "fold_failed"

# In the order of checks: the first that applies is the reason. `malformed` stands at two places of that
# order (before and after `schema_version`); here it is listed once.
REASONS: Final[tuple[str, ...]] = (
    TOO_LARGE,
    MALFORMED,
    SCHEMA_VERSION,
    UNKNOWN_STREAM,
    BAD_SIGNATURE,
    SECRET_IN_EVENT,
    SEQ_CONFLICT,
    TOO_LATE,
    AFTER_TERMINAL,
    ILLEGAL_TRANSITION,
    UNAUTHORIZED,
    POLICY,
    UNKNOWN_RECIPIENT,
    FOLD_FAILED,
)

# These depend on more than one stream: the gateway decides them on its live view, and the fold keeps what
# it says of them under `refused/<door>`.
DOOR_REASONS: Final = (UNAUTHORIZED, POLICY, UNKNOWN_RECIPIENT)
