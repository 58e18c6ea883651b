"""Payload values that are text in XML: how each type is written, read, and named in XSD and JSON schema.

The XSD accepts exactly the values that the Python type can hold, where XSD can express it: years of four
digits, microseconds at the finest. For all else (24:00:00, rules of a class) the reader reports a fault of the
value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, Flag
from typing import Any, Final, Literal, get_args, get_origin
from xml.sax.saxutils import escape

from connectors.xml_wire.mending import NOT_XML

# Python refuses to convert longer texts to int, and the Decimal 1E+999999 is a text of a million digits.
DIGITS: Final = 4000
_ZONE_LIMIT: Final = timedelta(hours=14)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,4000}").fullmatch
_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)").fullmatch
_DOUBLE: Final = re.compile(r"-?INF|NaN|[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?").fullmatch
_DATE: Final = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_DATETIME: Final = rf"{_DATE}T[0-9]{{2}}:[0-9]{{2}}:[0-9]{{2}}(\.[0-9]{{1,6}})?(Z|[+\-][0-9]{{2}}:[0-9]{{2}})?"
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Leaf:
    """A type whose values are text. `write` and `read` raise ValueError for a value that they cannot take."""

    xsd_type: str
    write: Callable[[Any], str]
    read: Callable[[str], Any]
    json_schema: dict[str, Any]
    sample: Any
    what: str
    patterns: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


def _is(kind: type, value: Any, *, but: type | None = None) -> None:
    if not isinstance(value, kind) or (but is not None and isinstance(value, but)):
        raise ValueError(f"it is of the type {type(value).__name__}")


def _write_str(value: Any) -> str:
    _is(str, value)
    if NOT_XML.search(value):
        raise ValueError("it holds a character that XML cannot hold")
    return escape(value, {"\r": "&#xD;"})


def _write_int(value: Any) -> str:
    _is(int, value, but=bool)
    if abs(value) >= 10**DIGITS:
        raise ValueError(f"it has more than {DIGITS} digits")
    return str(int(value))


def _write_float(value: Any) -> str:
    if not isinstance(value, float):
        _is(int, value, but=bool)
    try:
        value = float(value)
    except OverflowError:
        raise ValueError("it is beyond the numbers of a float") from None
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "INF" if value > 0 else "-INF"


def _write_bool(value: Any) -> str:
    _is(bool, value)
    return "true" if value else "false"


def _write_decimal(value: Any) -> str:
    _is(Decimal, value)
    if not value.is_finite():
        raise ValueError("it is no finite number")
    if max(abs(value.adjusted()), len(value.as_tuple().digits), -int(value.as_tuple().exponent)) >= DIGITS:
        raise ValueError(f"it has more than {DIGITS} digits")
    return format(value, "f")


def _write_datetime(value: Any) -> str:
    _is(datetime, value)
    zone = value.utcoffset()
    if zone is not None and (zone % timedelta(minutes=1) or abs(zone) > _ZONE_LIMIT):
        raise ValueError("its time zone is no whole number of minutes, or more than 14 hours from UTC")
    return str(value.isoformat())


def _write_date(value: Any) -> str:
    _is(date, value, but=datetime)
    return str(value.isoformat())


def _read_by(fits: Callable[[str], Any], made: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        text = text.strip(" \t\r\n")
        if not fits(text):
            raise ValueError("not written so")
        return made(text)

    return read


def _read_bool(text: str) -> bool:
    try:
        return _BOOLEANS[text.strip(" \t\r\n")]
    except KeyError:
        raise ValueError("not written so") from None


LEAVES: Final[dict[type, Leaf]] = {
    str: Leaf("xs:string", _write_str, str, {"type": "string"}, "text", "text"),
    int: Leaf("xs:integer", _write_int, _read_by(_INTEGER, int), {"type": "integer"}, 1, "an integer"),
    float: Leaf("xs:double", _write_float, _read_by(_DOUBLE, float), {"type": "number"}, 1.5, "a number"),
    bool: Leaf("xs:boolean", _write_bool, _read_bool, {"type": "boolean"}, True, "true or false"),
    Decimal: Leaf(
        "xs:decimal",
        _write_decimal,
        _read_by(_DECIMAL, Decimal),
        {"type": "string", "pattern": r"^[+-]?(\d+(\.\d*)?|\.\d+)$"},
        Decimal("1.50"),
        "a decimal number, as 1.50",
    ),
    datetime: Leaf(
        "xs:dateTime",
        _write_datetime,
        _read_by(re.compile(_DATETIME).fullmatch, datetime.fromisoformat),
        {"type": "string", "format": "date-time"},
        datetime(2030, 1, 31, 12, 30, tzinfo=UTC),
        "a time, as 2030-01-31T12:30:00+00:00",
        patterns=(_DATETIME,),
    ),
    date: Leaf(
        "xs:date",
        _write_date,
        _read_by(re.compile(_DATE).fullmatch, date.fromisoformat),
        {"type": "string", "format": "date"},
        date(2030, 1, 31),
        "a date, as 2030-01-31",
        patterns=(_DATE,),
    ),
}


def leaf_of(hint: Any) -> Leaf | None:
    """Return the leaf for a type, or None for a type that is no leaf.

    Raises TypeError for an Enum or Literal whose values XML cannot tell apart.
    """
    if get_origin(hint) is Literal:
        return _choice({str(value): value for value in get_args(hint)}, get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        if issubclass(hint, Flag):
            raise TypeError("a Flag is a set of values")
        return _choice({str(member.value): member for member in hint}, [member.value for member in hint])
    return LEAVES.get(hint) if isinstance(hint, type) else None


def _choice(by_text: dict[str, Any], values: Any) -> Leaf:
    """Return the leaf for one of some texts or integers, written as they are."""
    if not values or not all(isinstance(v, str | int) and not isinstance(v, bool) for v in values):
        raise TypeError("its values must be texts or integers")
    if len(by_text) != len(values):
        raise TypeError("two of its values are written alike")
    if any(NOT_XML.search(text) or re.search(r"[\t\r\n]", text) for text in by_text):
        raise TypeError("one of its values holds a control character")
    texts = {value: text for text, value in by_text.items()}

    def write(value: Any) -> str:
        text = texts.get(value) if isinstance(value, str | int | Enum) else None
        # 1 == True, so equal values may have different types.
        if text is None or type(value) is not type(by_text[text]):
            raise ValueError("it is none of the values")
        return escape(text)

    def read(text: str) -> Any:
        if text not in by_text:
            raise ValueError("none of the values")
        return by_text[text]

    shown = tuple(by_text)
    return Leaf(
        "xs:string",
        write,
        read,
        {"type": "string", "enum": list(shown)},
        by_text[shown[0]],
        f"one of {', '.join(shown)}"[:300],
        choices=shown,
    )
