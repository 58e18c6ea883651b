"""Print each setting with its value in force and where the value comes from; secrets are masked.

A value comes from the defaults, from conf/trunkline.yaml (or the file that TRUNKLINE_CONF names), or from a
variable TRUNKLINE__SECTION__NAME. Later sources win, in this order. `--sample` prints a settings file in which
every setting is explained and commented out.

Examples:
  trunkline settings                 all of them
  trunkline settings gateway kafka.topic
  trunkline settings --sample > conf/trunkline.yaml
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.call import Call
from connectors.cli.shared.text_output import aligned, print_json
from schemas.settings.settings import ALIASES, ENV_PREFIX, Settings, setting_origins
from trunkline_agent.errors import UsageError

_DEFAULT = "default"
_WIDTH = 100


ARGUMENTS = (
    argument("name", "a setting or a section (default: all)", nargs="*", metavar="name"),
    flag("--sample", "print a commented settings file"),
    flag("--json", "print one JSON object, with types, bounds and descriptions"),
)


def run(call: Call) -> int:
    """Print the named settings, or all, with value and source, and return 0.

    With `--sample` it prints a settings file instead. Raises UsageError for a name that does not exist.
    """
    found = list(_chosen(call.name))
    if call.sample:
        print(sample_file(found), end="")
        return 0
    origins = setting_origins()
    rows = [(one.name, _shown(one, call.settings), origins.get(one.name, _DEFAULT)) for one in found]
    if call.json:
        facts = [one._asdict() | {"default": _plain(one.default), "variable": one.variable} for one in found]
        values = [{"value": value, "source": source} for _, value, source in rows]
        print_json({"settings": [fact | value for fact, value in zip(facts, values, strict=True)]})
    else:
        cells = [(name, _text(value), source) for name, value, source in rows]
        print(aligned(("setting", "value", "source"), cells, cell_limit=1000))
    return 0


def sample_file(settings: list[Setting]) -> str:
    """Return the text of a settings file (YAML) in which every setting is commented out and has its default.

    Secrets are left out.
    """
    lines = ["# Settings of Trunkline. Remove the # before a setting, and before its section, to change it."]
    for section, members in groupby(settings, lambda one: one.name.rpartition(".")[0]):
        lines += ["", f"# {section}:"] if section else [""]
        indent = "  " if section else ""
        for one in members:
            if not one.is_secret:
                bounds = f" ({one.bounds})" if one.bounds else ""
                lines += [f"# {indent}# {line}" for line in textwrap.wrap(one.description + bounds, _WIDTH)]
                value = "null" if one.default is None else yaml.safe_dump(_plain(one.default)).split("\n")[0]
                lines.append(f"# {indent}{one.name.rpartition('.')[2]}: {value}")
    return "\n".join(lines) + "\n"


def _chosen(names: list[str]) -> Iterator[Setting]:
    known = list(all_settings())
    if not names:
        yield from known
    for name in names:
        members = [one for one in known if one.name == name or one.name.startswith(f"{name}.")]
        if not members:
            raise UsageError(f"no such setting or section: {name}; trunkline settings lists them all")
        yield from members


def _shown(one: Setting, settings: Settings) -> Any:
    value = reduce(getattr, one.name.split("."), settings)
    return "********" if one.is_secret and value is not None else _plain(value)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


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
