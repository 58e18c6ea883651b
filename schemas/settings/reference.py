"""Every setting with its type, default, bounds and description, read from the models of the sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from schemas.settings.settings import ALIASES, ENV_PREFIX, Settings

_SIGNS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_TYPES = {bool: "true or false", int: "integer", float: "number", Path: "path", SecretStr: "secret"}


class Setting(NamedTuple):
    """One setting. `default` is None for a setting without a default; `alias` is a second variable for it."""

    name: str
    type: str
    default: object
    bounds: str
    description: str
    alias: str | None

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.name.replace(".", "__").upper()

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown."""
        return self.type == _TYPES[SecretStr]


def all_settings(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings in the order of the sections, the settings of one section together."""
    aliases = {".".join(path): name for name, path in ALIASES.items()}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from all_settings(field.annotation, f"{prefix}{name}.")
        else:
            dotted = prefix + name
            text = (field.description or "").replace("\n", " ")
            yield Setting(dotted, _type(field), field.default, _bounds(field), text, aliases.get(dotted))


def _type(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        return " or ".join(f"`{word}`" for word in get_args(kind))
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    return _TYPES.get(kind, "text")


def _bounds(field: FieldInfo) -> str:
    found = ((name, getattr(rule, name, None)) for rule in field.metadata for name in _SIGNS)
    return ", ".join(f"{_SIGNS[name]} {bound:,}" for name, bound in found if bound is not None)
