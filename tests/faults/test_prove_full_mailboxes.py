"""The check of `./trunkline prove` on a mailbox with a limit: what is planted is found."""

from __future__ import annotations

import pytest

from tests.faults.prove.comparison import LOST, MISBEHAVED, Line, Mail
from tests.faults.prove.delivery_notes import Filled
from tests.faults.prove.full_mailboxes import PENDING_MOST, check_full_mailbox

pytestmark = pytest.mark.requirement("LM-07")
BOX = "mailbox/default/lina"


class Log:
    """A mailbox, its ledger and what the senders were answered, which agree until a fault is planted."""

    def __init__(self) -> None:
        self.notes: list[Filled] = []
        self.mail: dict[tuple[str, str], Mail] = {}
        self.ledger: list[Line] = []

    def post(self, name: str, verdict: str = "accepted") -> None:
        """Send a message: accepted, or refused because the mailbox is full."""
        is_taken = verdict == "accepted"
        self.notes.append(Filled(BOX, f"text of {name}", name if is_taken else ""))
        self.line("message.posted", verdict, name)
        if is_taken:
            self.there(name)

    def there(self, name: str, request: str = "", text: str = "") -> None:
        """Put a message into the mailbox of the end, taken by a request or not."""
        status = "claimed" if request else "unread"
        body = text or f"text of {name}"
        self.mail[BOX, name] = Mail(BOX, name, status, body=body, request=request)

    def take(self, request: str, *names: str) -> None:
        """Take messages."""
        self.line("message.claimed", "accepted", request=request)
        for name in names:
            self.there(name, request)

    def line(self, kind: str, verdict: str, name: str = "", request: str = "") -> None:
        """Add a row to the ledger."""
        self.ledger.append(Line(0, len(self.ledger), BOX, kind, verdict, name, request=request))

    def kinds(self, *, is_at_rest: bool = True) -> list[str]:
        """The kinds of what is found, whatever the order of the rows."""
        found = check_full_mailbox(self.notes, self.mail, self.ledger[::-1], BOX, is_at_rest=is_at_rest)
        return [one.kind for one in found]


def full() -> Log:
    """A mailbox that was filled, has refused a message, and was emptied in part and filled again."""
    log = Log()
    for number in range(PENDING_MOST):
        log.post(f"m{number}")
    log.post("refused", "rejected")
    log.take("r1", "m0", "m1")
    log.post("m8")
    log.post("m9")
    return log


def test_messages_are_not_counted_before_the_rows_of_their_readers_are_there() -> None:
    log = full()
    log.mail.clear()
    assert log.kinds(is_at_rest=False) == []
    assert MISBEHAVED in log.kinds()


def test_a_mailbox_within_its_limit_has_no_finding() -> None:
    log = full()
    assert log.kinds() == []
    log.line("message.posted", "duplicate", "m9")
    log.line("message.claimed", "duplicate", request="r1")
    assert log.kinds() == []


def test_one_message_too_many_is_found_at_its_offset() -> None:
    log = full()
    log.post("m10")
    log.take("r2", "m8", "m9", "m10")
    assert log.kinds() == [MISBEHAVED], "it was taken later, and was too many meanwhile"


def test_a_claim_that_took_less_than_it_seems_makes_no_room() -> None:
    log = full()
    log.there("m1")
    assert log.kinds() == [MISBEHAVED]


def test_a_refused_message_in_the_mailbox_is_found() -> None:
    log = full()
    log.there("other", text='{"text":"text of refused"}')
    assert log.kinds() == [MISBEHAVED]


def test_an_accepted_message_that_is_not_there_is_found_when_all_is_at_rest() -> None:
    log = full()
    del log.mail[BOX, "m9"]
    assert log.kinds() == [LOST]
    assert log.kinds(is_at_rest=False) == []
