"""The mapping of a dataclass to XML elements: its fields in order, each a simple value, a record or a list.

A leaf is a type whose values are text: how it is written, read, and named in XSD and JSON schema. The XSD
accepts exactly the values that the Python type can hold, where XSD can express it: years of four digits,
microseconds at the finest. For all else (24:00:00, rules of a class) the reader reports a fault of the value.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, Flag
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints
from xml.sax.saxutils import escape

from lxml import etree  # type: ignore[import-untyped]

from connectors.plumbing.xml_wire.mending import NOT_XML

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
    """A type whose values are written as the text of one XML element, such as int or date.

    Attributes:
        xsd_type: its name in XSD, such as `xs:integer`.
        write: returns a value as text that is escaped for XML; raises ValueError for a wrong value.
        read: returns the value of a text; raises ValueError for a wrong text.
        sample: a value for examples.
        what: words for error texts, such as "an integer".
        patterns: regular expressions that the text must match, for XSD.
        choices: the only texts allowed; empty: no such list.
    """

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


_read_bool: Final = _read_by(_BOOLEANS.__contains__, _BOOLEANS.__getitem__)
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
    """Return how values of a type are written in XML, None for a type that needs more than one text.

    `hint` is a type annotation without `None`, such as `int` or an Enum. None is returned for a dataclass, a
    list or an unknown type. Raises TypeError for an Enum or Literal whose values XML cannot tell apart.
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


_MISSING: Final = dataclasses.MISSING


@dataclass(frozen=True)
class Slot:
    """A field of a dataclass as an XML element named `tag`.

    The element occurs any number of times if `is_list`. Otherwise it occurs at most once if `is_optional` or if
    the field has a default, and exactly once if neither. `default` is `dataclasses.MISSING` for a field without
    one.
    """

    name: str
    tag: str
    shape: Leaf | Record
    is_list: bool
    is_optional: bool
    default: Any
    description: str

    @property
    def is_required(self) -> bool:
        """True if the XML element must be present: no list, not optional, and without a default."""
        return not self.is_list and not self.is_optional and self.default is _MISSING


@dataclass(frozen=True)
class Record:
    """A dataclass as an XML element with one child element for each field.

    `slots` has the fields in their order, and `by_tag` has them by the tag that lxml gives the child element.
    """

    cls: type
    slots: tuple[Slot, ...]
    by_tag: dict[str, Slot]


def record_of(cls: type, namespace: str, above: tuple[type, ...] = ()) -> Record:
    """Return how a dataclass is written in XML, with its fields as child elements in `namespace`.

    `above` has the dataclasses that contain this one; callers leave it empty. Raises TypeError, which names the
    field, for a type that XML or XSD cannot express, and for a dataclass that contains itself.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    if cls in above:
        raise TypeError(f"{cls.__name__} holds itself: its depth would have no end")
    hints = get_type_hints(cls, localns={cls.__name__: cls})
    for name, hint in hints.items():
        if isinstance(hint, dataclasses.InitVar):
            raise TypeError(f"{cls.__name__}.{name}: an InitVar is no part of the value")
    slots = tuple(_slot(cls, field, hints[field.name], namespace, above) for field in dataclasses.fields(cls))
    return Record(cls, slots, {slot.tag: slot for slot in slots})


def _slot(cls: type, field: dataclasses.Field[Any], hint: Any, namespace: str, above: tuple[type, ...]) -> Slot:
    where = f"{cls.__name__}.{field.name}"
    if not field.init:
        raise TypeError(f"{where}: a field that is not given to __init__ cannot be read back")
    try:
        tag = etree.QName(namespace, field.name).text
    except ValueError:
        raise TypeError(f"{where}: not a name of an XML element") from None
    item, is_list, is_optional = _unfolded(hint, where)
    try:
        shape: Leaf | Record | None = leaf_of(item)
        if shape is None and isinstance(item, type) and dataclasses.is_dataclass(item):
            shape = record_of(item, namespace, (*above, cls))
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    if shape is None:
        raise TypeError(f"{where}: {hint!r} has no form in XML")
    return Slot(
        field.name,
        tag,
        shape,
        is_list,
        is_optional,
        _default(field, where, is_list, is_optional),
        str(field.metadata.get("description", "")),
    )


def _unfolded(hint: Any, where: str) -> tuple[Any, bool, bool]:
    """Return the type of one element, and whether the field is a list and whether it may be None."""
    is_optional = False
    if get_origin(hint) in (Union, types.UnionType):
        others = [part for part in get_args(hint) if part is not types.NoneType]
        if len(others) != 1 or len(others) == len(get_args(hint)):
            raise TypeError(f"{where}: of several types XML cannot tell which one is meant")
        is_optional, hint = True, others[0]
    if get_origin(hint) is not list:
        return hint, False, is_optional
    if is_optional:
        raise TypeError(f"{where}: XML cannot tell an empty list from none; leave out None")
    (item,) = get_args(hint)
    if get_origin(item) in (list, Union, types.UnionType):
        raise TypeError(f"{where}: a list holds values of one type, no lists and no None")
    return item, True, False


def _default(field: dataclasses.Field[Any], where: str, is_list: bool, is_optional: bool) -> Any:
    """Return a field's default, made once for inspection; `dataclasses.MISSING` if there is none."""
    default = field.default
    if field.default_factory is not _MISSING:
        default = field.default_factory()
    if is_optional and default not in (_MISSING, None):
        raise TypeError(f"{where}: what is left out would be the default, and None could not be said")
    if is_list and default not in (_MISSING, []):
        raise TypeError(f"{where}: what is left out is an empty list, so that must be the default")
    return default
