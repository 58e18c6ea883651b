"""The form of a dataclass in XML: its fields in order, each a leaf, a record or a list of one of them."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from lxml import etree  # type: ignore[import-untyped]

from connectors.xml_payloads.leaves import Leaf, leaf_of

_MISSING: Final = dataclasses.MISSING


@dataclass(frozen=True)
class Slot:
    """A field as an element `tag`: once, at most once (optional or with a default), or any number of times."""

    name: str
    tag: str
    shape: Leaf | Record
    is_list: bool
    is_optional: bool
    default: Any
    description: str

    @property
    def is_required(self) -> bool:
        """Whether the element must be present."""
        return not self.is_list and not self.is_optional and self.default is _MISSING


@dataclass(frozen=True)
class Record:
    """A dataclass: its elements in the order of its fields."""

    cls: type
    slots: tuple[Slot, ...]
    by_tag: dict[str, Slot]


def record_of(cls: type, namespace: str, above: tuple[type, ...] = ()) -> Record:
    """Return the form of a dataclass. Raises TypeError, with the field, for one that XML or XSD cannot hold."""
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
