"""The fields of a message, from its sender to its recipients, and durations: the same at every door (DL-30).

A field that is added to `DESCRIPTION` is taken, checked and shown by every door and command line. "A field of a
message" in docs/explanation/architecture.md says what else it needs, by hand. The durations are the times until
a message is delivered and until it expires.
"""

from __future__ import annotations

# Nothing that is slow to import: the file queue has to start quickly.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

DURATION_S_LEAST = 0.001
DURATION_S_MOST = 366 * 24 * 3600
EXPIRES_FIRST = "the message would expire before it is delivered"
UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TEXT_MOST = 10**9
# DEL and C1, the separators of lines and paragraphs, and halves of characters.
_NOT_IN_A_LINE = ((127, 159), (0x2028, 0x2029), (0xD800, 0xDFFF))


def is_duration(value: object) -> bool:
    """Return whether a value is a number of seconds from a millisecond to 366 days."""
    # Numbers that are not finite are outside.
    return type(value) in (int, float) and DURATION_S_LEAST <= value <= DURATION_S_MOST  # type: ignore[operator]


def expires_first(deliver_after: float | None, expires_in: float | None) -> bool:
    """Return whether a message would expire before it is delivered.

    Both are times from its posting, in the same unit. None means at once, and never.
    """
    return expires_in is not None and (deliver_after or 0) >= expires_in


def duration_s(text: str) -> float:
    """Return the seconds of a duration such as `90`, `0.5`, `90s`, `5m`, `2h` or `1d`, for argparse.

    Raises argparse.ArgumentTypeError for another form, and for 10^9 seconds or more.
    """
    number = text.rstrip("smhd")
    unit = text[len(number) :]
    whole, _, part = number.partition(".")
    # No float such as `1e3` or `nan`, and no digits of other scripts.
    is_number = number.isascii() and (whole + part).isdigit()
    if is_number and unit in UNIT_S and (found := float(number) * UNIT_S[unit]) < _TEXT_MOST:
        return found
    from argparse import ArgumentTypeError  # other callers of this module have no command line

    raise ArgumentTypeError(f"expected a time such as 30s, 5m, 2h or 1d, found {text[:40]!r}")


class MessageField:
    """An optional field of a message: a name by CM-01, such as an id, or one line of text.

    Attributes:
        name: Its name in JSON.
        text: Its meaning, for people.
        most: The most characters of its text. 0: it is a name.
        metavar: The value of its option, in a command line's help.
        option: The option of a command line, such as `--in-reply-to`.
        label: Its name for people.
        short: Its meaning as a part of a sentence.
    """

    def __init__(self, name: str, text: str, most: int = 0) -> None:
        self.name = name
        self.text = text
        self.most = most
        self.metavar = "TEXT" if most else "ID"
        self.option = "--" + name.replace("_", "-")
        self.label = name.replace("_", " ").capitalize()
        self.short = text[:1].lower() + text[1:].rstrip(".")

    def fault(self, value: object, is_name: Callable[[str], bool]) -> str | None:
        """Return why a value is not valid, or `None` if it is. `None` is no value.

        `is_name` decides whether a text is a name.
        """
        if value is None:
            return None
        if not self.most:
            return None if type(value) is str and is_name(value) else "expected a name"
        is_valid = type(value) is str and 1 <= len(value) <= self.most and is_one_line(value)
        return None if is_valid else f"expected one line of 1 to {self.most} characters"


def is_one_line(text: str) -> bool:
    """Return whether a text has no line break, no other control character and no lone surrogate (D800-DFFF)."""
    if text.isprintable():
        return True
    return not any(one < " " or least <= ord(one) <= most for one in text for least, most in _NOT_IN_A_LINE)


CONVERSATION = (
    MessageField("in_reply_to", "Id of the message that this one answers."),
    MessageField("thread", "Id of the conversation."),
)
"""The fields that put a message into a conversation. For XML they come from the envelope alone."""
DESCRIPTION = (MessageField("subject", "Short text about the message, for lists.", most=200),)
"""The fields that describe a message, wherever it is sent."""
MESSAGE_FIELDS = (*CONVERSATION, *DESCRIPTION)
"""All fields, in the order in which documents show them."""


def message_fields_of(message: Any) -> dict[str, Any]:
    """Return the fields of a message that an object has as attributes, and that are not `None`."""
    return {
        one.name: value for one in MESSAGE_FIELDS if (value := getattr(message, one.name, None)) is not None
    }


def unknown_field(given: Mapping[str, object]) -> TypeError | None:
    """Return the error for a field that no message has, or `None`."""
    unknown = given.keys() - {one.name for one in MESSAGE_FIELDS}
    return TypeError(f"a message has no field {min(unknown)!r}") if unknown else None
