"""A list of all settings with types, defaults, bounds and descriptions, for the settings reference."""

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
    """The description of one setting.

    Attributes:
        name: the name with its section, such as `kafka.topic`.
        type: the type in words, such as `integer` or `text`.
        default: the default value, or None for a setting that is unset by default.
        bounds: the bounds of a number in words, such as `at least 1`. Empty if there are none.
        description: the meaning of the setting.
        alias: a second environment variable for it, such as `MQTT_BROKER`, or None.
    """

    name: str
    type: str
    default: object
    bounds: str
    description: str
    alias: str | None

    @property
    def variable(self) -> str:
        """The environment variable that sets this setting, such as `TRUNKLINE__KAFKA__TOPIC`."""
        return ENV_PREFIX + self.name.replace(".", "__").upper()

    @property
    def is_secret(self) -> bool:
        """True if the setting is a password or key, so that its value must not be shown."""
        return self.type == _TYPES[SecretStr]


def all_settings(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[Setting]:
    """Yield a description of each setting, section by section.

    Args:
        model: the model whose fields are described. Nested sections are included.
        prefix: the text before each name, for the recursion. Callers omit both arguments.
    """
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
