"""The errors of the library and of the commands, each with a reason code, advice and an exit code.

Every error can be pickled with its attributes. No text of an error contains a secret.
"""

from __future__ import annotations

from typing import Any


class TrunklineError(Exception):
    """The base class of the errors of Trunkline.

    Raised itself, it means that something outside the program failed and retrying did not help.

    Args:
        args: The message, which says what happened, with which value. `str` of the error adds the advice.
        reason: A code for programs: of `trunkline_agent.wire.verdicts`, of the gateway, or of this library.
            None: that of the class.
        advice: The next step for people. None: that of the class.
    """

    exit_code = 1
    reason: str = "failed"
    advice: str = ""

    def __init__(self, *args: object, reason: str | None = None, advice: str | None = None) -> None:
        super().__init__(*args)
        if reason is not None:
            self.reason = reason
        if advice is not None:
            self.advice = advice

    def __str__(self) -> str:
        """Return the message, and the advice after a semicolon."""
        message = super().__str__()
        return f"{message}; {self.advice}" if self.advice and message else message or self.advice

    def __reduce__(self) -> tuple[Any, ...]:
        # That of Exception calls the class with `args`, which a subclass with a constructor of its own refuses.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[Any], args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    """Return an error as it was pickled, without a call of its constructor."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class UsageError(TrunklineError):
    """The caller gave arguments, settings or credentials that cannot work."""

    exit_code = 2
    reason = "usage"


class NotFound(TrunklineError):
    """The requested thing does not exist."""

    exit_code = 3
    reason = "not_found"


class Refused(TrunklineError):
    """The request was refused by a verdict, by a policy or for lack of a right."""

    exit_code = 4
    reason = "refused"


class EventRejected(Refused):
    """Trunkline rejected an event of a job, for the reason in `.reason`. Sending it again will not help.

    Attributes:
        receipt: The receipt with the verdict. None: there is none.
    """

    reason = "event_rejected"

    def __init__(
        self, *args: object, receipt: Any = None, reason: str | None = None, advice: str | None = None
    ) -> None:
        super().__init__(*args, reason=reason, advice=advice)
        self.receipt = receipt


class MessageRejected(Refused):
    """Trunkline rejected a message, for the reason in `.reason`.

    Attributes:
        receipt: The receipt with the verdict, of a message that was sent over MQTT. None: there is none.
    """

    reason = "message_rejected"

    def __init__(
        self, *args: object, receipt: Any = None, reason: str | None = None, advice: str | None = None
    ) -> None:
        super().__init__(*args, reason=reason, advice=advice)
        self.receipt = receipt


class RateLimited(Refused):
    """The caller sends more than its limits allow, or the mailbox of the recipient is full.

    Attributes:
        retry_after_s: The number of seconds after which the same request may succeed.
    """

    reason = "rate_limited"

    def __init__(
        self,
        *args: object,
        retry_after_s: float = 0.0,
        reason: str | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(*args, reason=reason, advice=advice)
        self.retry_after_s = retry_after_s


class LeaseLost(Refused):
    """The lease of a message has ended, and the message was handed out again or has ended.

    Its work may be done a second time.
    """

    reason = "lease_lost"
    advice = "extend the lease more often or take a longer one, and make the work repeatable"


class BackboneUnreachable(TrunklineError):
    """Kafka, MQTT or the gateway did not answer in time."""

    exit_code = 5
    reason = "unreachable"


class NoReply(BackboneUnreachable):
    """No reply to a message came in time. The message is stored, and a later reply comes into the mailbox.

    Attributes:
        message_id: The id of the message that was sent, which a later reply has in `in_reply_to`.
    """

    reason = "no_reply"

    def __init__(
        self,
        *args: object,
        message_id: str | None = None,
        reason: str | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(*args, reason=reason, advice=advice)
        self.message_id = message_id


class ReceiptMissing(BackboneUnreachable):
    """No receipt came in time. The event or message stays in the outbox, to be sent again."""

    reason = "receipt_missing"


class OutboxBusy(TrunklineError):
    """Another process uses the outbox of this job or agent."""

    reason = "outbox_busy"
    advice = "end the other process, or use another folder"
