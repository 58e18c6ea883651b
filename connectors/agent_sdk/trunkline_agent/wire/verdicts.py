"""Verdicts and reasons: the words that the fold, the ledger, the receipts and the HTTP answers share."""

from __future__ import annotations

from typing import Final, Literal

Verdict = Literal["accepted", "duplicate", "rejected"]

ACCEPTED: Final = "accepted"
DUPLICATE: Final = "duplicate"
REJECTED: Final = "rejected"

UNAUTHENTICATED_RECORD: Final = "unauthenticated_record"
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
MAILBOX_FULL: Final = "mailbox_full"
RATE_LIMITED: Final = "rate_limited"
LIMIT_REACHED: Final = "limit_reached"
FOLD_FAILED: Final = "fold_failed"

# In the order of the checks: the first that fails gives the reason. `malformed` is checked before and after
# `schema_version`, and listed once.
REASONS: Final[dict[str, str]] = {
    UNAUTHENTICATED_RECORD: "The record has no valid MAC, so no process of this installation appended it.",
    TOO_LARGE: "The body is longer than the limit of the doors, or of the log.",
    MALFORMED: "The body is not JSON of the expected form, or key and body name different streams.",
    SCHEMA_VERSION: "The body has a schema version that this backbone does not read.",
    UNKNOWN_STREAM: "There is no such job, task, session, agent or other thing.",
    BAD_SIGNATURE: "The signature is missing, or does not belong to the content and the secret.",
    SECRET_IN_EVENT: "The event contains the job's own secret.",
    SEQ_CONFLICT: "The same number or request id was used before, with other content.",
    TOO_LATE: "The number is so old that nothing tells whether it was settled before.",
    AFTER_TERMINAL: "The job, task, session or other thing has ended.",
    ILLEGAL_TRANSITION: "The life cycle does not allow this step in the present state.",
    UNAUTHORIZED: "The caller has no valid credentials, or its role does not allow the request.",
    POLICY: "The hub's policy forbids the request.",
    UNKNOWN_RECIPIENT: "No mailbox has this name.",
    MAILBOX_FULL: "As many messages or bytes wait in the mailbox as it may have.",
    RATE_LIMITED: "The principal sends more than its limits allow.",
    LIMIT_REACHED: "The principal has as many live jobs, or its mailbox as many subscriptions, as it may have.",
    FOLD_FAILED: "The fold's own code failed. The record counts for nothing, and its stream goes on.",
}
"""Every reason for a rejection, with its meaning."""

# These depend on more than one stream, so the gateway decides them on its live view. It appends each refusal
# to the stream `refused/<door>`, where the fold records it.
DOOR_REASONS: Final = (UNAUTHORIZED, POLICY, UNKNOWN_RECIPIENT, MAILBOX_FULL, RATE_LIMITED, LIMIT_REACHED)
