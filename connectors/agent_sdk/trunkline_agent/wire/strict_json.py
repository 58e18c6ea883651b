"""A strict JSON parser (rule CM-02), and the canonical form of JSON that is signed (rule JE-05).

`decode` rejects input that other parsers accept: duplicate keys, NaN and Infinity (also as 1e999), integers
outside -2^63 … 2^63-1, nesting deeper than 64, lone surrogates, invalid UTF-8. It has a fast and a slow path
with equal results, which a property test compares. The fast path exists where msgspec and orjson are installed,
as they are in the product. It takes bytes that contain no float, are nested up to `FAST_DEPTH` levels, and are
canonical or as JavaScript's `JSON.stringify` or Python's `json.dumps` write them: msgspec parses them and
checks the types, and the same bytes must be written again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import GenericAlias
from typing import Annotated, Any, Final, NoReturn

try:
    import msgspec
    import orjson
except ImportError:
    IS_FAST = False
else:
    IS_FAST = True

MAX_DEPTH: Final = 64
INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
_INT_DIGITS = 20  # sign and 19 digits: a longer literal is always out of range
FAST_DEPTH: Final = 8


def _plain_parser() -> Callable[[bytes], dict[str, Any]] | None:
    """Return a parser of plain objects (`is_plain`). It fails for others, and may accept a duplicate key.

    Without msgspec and orjson there is none.
    """
    if not IS_FAST:
        return None
    scalar: Any = None | bool | Annotated[int, msgspec.Meta(ge=INT_MIN, le=INT_MAX)] | str
    value = scalar
    for _ in range(FAST_DEPTH - 1):
        value = scalar | GenericAlias(list, (value,)) | GenericAlias(dict, (str, value))
    return msgspec.json.Decoder(GenericAlias(dict, (str, value))).decode


_parse_plain: Final = _plain_parser()


class MalformedJsonError(ValueError):
    """The bytes are not strict JSON (rule CM-02). The message names the broken rule and quotes no input."""


def canonical(document: Any) -> bytes:
    """Return `document` as canonical JSON in UTF-8: equal documents give equal bytes (rule JE-05).

    Keys are sorted by code point, there are no spaces, characters are not ASCII-escaped, and numbers are
    written as Python's `json.dumps` writes them. This is not RFC 8785: floats and the order of keys beyond the
    basic multilingual plane differ. Raises UnicodeEncodeError for lone surrogates and ValueError for NaN and
    Infinity.
    """
    if IS_FAST and type(document) is dict and is_plain(document):
        try:
            return canonical_plain(document)
        except TypeError:
            pass  # a key that is no text, or a lone surrogate
    return _canonical_slowly(document)


def _canonical_slowly(document: Any) -> bytes:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def canonical_plain(document: Any) -> bytes:
    """Return the same bytes as `canonical(document)`, ten times as fast.

    Call it only if `is_plain(document)` is true. For other documents the bytes may differ.
    """
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS) if IS_FAST else _canonical_slowly(document)


def is_plain(value: Any, depth: int = 1) -> bool:
    """Return whether `value` is simple enough that orjson and `json.dumps` write the same bytes.

    It must not contain a float, an integer beyond 64 bits or nesting deeper than 64 levels.

    Args:
        value: an object or an array, as a JSON parser returns it.
        depth: the nesting level of `value`, for the recursion. Callers omit it.
    """
    if depth > MAX_DEPTH:
        return False
    for item in value.values() if type(value) is dict else value:
        kind = type(item)
        if kind is str or kind is bool or item is None:
            continue
        if kind is int:
            if not INT_MIN <= item <= INT_MAX:
                return False
        elif (kind is not dict and kind is not list) or not is_plain(item, depth + 1):
            return False
    return True


def decode(value: bytes) -> tuple[Any, bool]:
    """Parse strict JSON.

    Args:
        value: the bytes to parse.

    Returns:
        The document, and whether it is an object, plain (`is_plain`), nested up to `FAST_DEPTH` levels and
        written canonically in `value`. If so, `canonical_plain` returns the same bytes again.

    Raises:
        MalformedJsonError: the bytes are not JSON, or break a rule of this module, such as a duplicate key. The
            message names the rule.
    """
    if _parse_plain is None:
        return decode_slowly(value), False
    try:
        document = _parse_plain(value)
        if orjson.dumps(document, option=orjson.OPT_SORT_KEYS) == value:
            return document, True
        # Most clients write with spaces or in the order of their own. No key was there twice if the same bytes
        # come out again, or else as many colons: each key has one, those in texts come out again, and no text
        # has one as an escape.
        compact = orjson.dumps(document)
        has_each_key_once = compact.count(b":") == value.count(b":") and b"\\u" not in value
        if compact == value or has_each_key_once:
            return document, False
    except (ValueError, TypeError):
        pass
    return decode_slowly(value), False


def decode_slowly(value: bytes) -> Any:
    """Parse strict JSON with Python's parser and return the document.

    `decode` calls this for input that its fast path cannot take.

    Raises:
        MalformedJsonError: the bytes are not JSON, or break a rule of this module, such as a duplicate key. The
            message names the rule.
    """
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedJsonError("not UTF-8") from None
    try:
        document = _PARSER.decode(text)
    except MalformedJsonError:
        raise
    except RecursionError:
        raise MalformedJsonError(f"nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise MalformedJsonError(f"not JSON{where}") from None
    _check_tree(document)
    return document


def _check_tree(document: Any) -> None:
    level, depth = [document], 0
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in item:
                    _check_text(key)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str):
                _check_text(item)
        if any(isinstance(item, dict | list) for item in level):
            depth += 1
            if depth > MAX_DEPTH:
                raise MalformedJsonError(f"nested deeper than {MAX_DEPTH}")
        level = below


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise MalformedJsonError("a lone surrogate") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedJsonError("a key twice in one object")
    return found


def _integer(literal: str) -> int:
    if len(literal) > _INT_DIGITS or not INT_MIN <= (number := int(literal)) <= INT_MAX:
        raise MalformedJsonError("an integer outside 64 bits")
    return number


def _float(literal: str) -> float:
    number = float(literal)
    if math.isinf(number):
        raise MalformedJsonError("a number beyond the largest float")
    return number


def _constant(name: str) -> NoReturn:
    raise MalformedJsonError(f"{name} is not JSON")


_PARSER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_constant
)
