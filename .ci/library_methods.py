"""Writes the methods of the agents' libraries that follow from operations, and the values that they return."""

from __future__ import annotations

import re
from typing import Final

from described_operations import MARK, Described, Field, called, sent_fields, text_of, values
from pydantic.alias_generators import to_camel
from sync_half import formatted

from connectors.hub.engine.operation import Call
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS

WIDTH: Final = 108
# The end of the text of an optional field: its meaning when it is null.
_ABSENT: Final = re.compile(r" Null: .*", re.DOTALL)
_UNKNOWN: Final = re.compile(r"404 for (.+?)(?:,| and | or answer|\.)", re.DOTALL)


def _python_type(field: Field, *, is_value: bool = False) -> str:
    kind = field.kind
    match kind.get("type"):
        case "array":
            of = _python_type(Field("", kind["items"], ""))
            found = f"tuple[{of}, ...]" if is_value else f"list[{of}]"
        case "object" if isinstance(kind.get("additionalProperties"), dict):
            found = f"dict[str, {_python_type(Field('', kind['additionalProperties'], ''))}]"
        case name:
            names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
            found = names.get(str(name), "dict[str, Any]" if "$ref" in kind else "Any")
    is_open = field.is_optional or not (is_value or field.is_needed)
    return f"{found} | None" if is_open and found != "Any" else found


def _wrapped(text: str, indent: str) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(indent) + len(line) + len(word) >= WIDTH:
            lines.append(indent + line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, indent + line]


def _listed(named: list[tuple[str, str]], indent: str) -> list[str]:
    """Return the lines of a list of names with texts, as docstrings have them."""
    found = []
    for name, text in named:
        first, *rest = _wrapped(f"{name}: {text}", indent)
        found += [first, *(f"    {line}" for line in rest)]
    return found


def python_values() -> str:
    """Return the module with the values that the methods return."""
    lines = [
        f"# {MARK}",
        '"""The values that the methods of agents return, whose fields are those of the hub\'s answers."""',
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "from typing import Any, ClassVar, TypedDict",
        "from trunkline_agent.hub.hub_values import BlobReference, HubValue",
        *_python_sent_fields(),
    ]
    for name, (text, fields) in values().items():
        described = [(own, f.text.replace("Null:", "None:")) for own, f in fields]
        lines += ["", "", "@dataclass(frozen=True, slots=True)", f"class {name}(HubValue):"]
        lines += [
            *_wrapped(f'"""{text}', "    "),
            "",
            "    Attributes:",
            *_listed(described, " " * 8),
            '    """',
        ]
        lines += [f"    FIELDS: ClassVar = {tuple(f.name for _, f in fields)!r}"]
        lines += [f"    {own}: {_python_type(f, is_value=True)}" for own, f in fields]
    text = "\n".join([*lines, ""])
    return formatted(
        text if "Any]" in text or ": Any" in text else text.replace("import Any, ", "import "), "x.py"
    )


def _python_sent_fields() -> list[str]:
    described = [(f.name, f.text.replace("Null:", "None:")) for f in sent_fields()]
    types = {"blob": "BlobReference | str | None"}
    return [
        "",
        "",
        "class SentFields(TypedDict, total=False):",
        '    """The optional fields of a message that is sent.',
        "",
        "    Attributes:",
        *_listed(described, " " * 8),
        '    """',
        *(f"    {f.name}: {types.get(f.name) or _python_type(f)}" for f in sent_fields()),
    ]


def python_calls() -> str:
    """Return the module with the methods of the async agent."""
    lines = [
        f"# {MARK}",
        '"""The methods of an agent that are one request to the hub each."""',
        "from __future__ import annotations",
        "from trunkline_agent.hub.agent_plans import AgentCalls",
        "from trunkline_agent.hub import agent_plans",
        "from trunkline_agent.hub.async_client import AsyncHubClient",
        "from trunkline_agent.hub.hub_requests import path_of, post_json",
        f"from trunkline_agent.hub.operation_values import {', '.join(values())}",
        "",
        "class AsyncOperations:",
        '    """The plain operations of the hub, as methods of `AsyncAgent`."""',
        "    hub: AsyncHubClient",
        "    _calls: AgentCalls",
    ]
    for one, call, arguments, value in called():
        is_read, key = one.kind.METHOD == "GET", one.kind.KEY is not None
        given = [f"{f.name}: {_python_type(f)}{'' if f.is_needed else ' = None'}" for f in arguments]
        given += ["*", "key: str | None = None"] if key else []
        shown = "None" if value is None else f"list[{value.name}]" if one.rows else value.name
        described = [(f.name, f.text.replace("Null:", "None:")) for f in arguments]
        described += [("key", "The same key is the same request. None makes one for this call.")] if key else []
        lines += ["", f"    async def {call.name}({', '.join(['self', *given])}) -> {shown}:"]
        lines += [*_wrapped(f'"""{text_of(call, one)}', "        "), ""]
        lines += ["        Args:", *_listed(described, " " * 12), ""] if described else []
        lines += ["        Raises:"]
        if unknown := _UNKNOWN.search(" ".join(one.paragraphs)):
            lines += [f"            NotFound: The request names {unknown[1]}."]
        lines += ["            TrunklineError: Any other refusal, as of `send`.", '        """']
        parts = (part.strip("{}") if part[0] == "{" else f'"{part}"' for part in one.parts())
        path = f"path_of({', '.join(parts)})"
        names = [f.name for f in one.path]
        fields = ", ".join(f'"{f.name}": {f.name}' for f in arguments if f.name not in names)
        if one.rows:
            most = [f.schema["maximum"] for f in one.sent if f.name == "limit"]
            fields = ", ".join(filter(None, [fields, *(f'"limit": {number}' for number in most)]))
            plan = (
                f'list_rows({value.name}, {path}, "{one.rows}", "{one.by}", {{{fields}}}, self._calls.retries)'
            )
        elif is_read:
            plan = f"read({value.name}, {path}, {{{fields}}}, self._calls.retries)"
        else:
            keyed = "key" if key else "None"
            plan = f"change({value and value.name}, {path}, {{{fields}}}, {keyed}, self._calls.retries)"
        if value is None:
            plan = f"post_json({path}, {{{fields}}}, retries=self._calls.retries, key={keyed})"
            lines += [f"        await self.hub.run({plan})"]
        else:
            lines += [f"        return await self.hub.run(agent_plans.{plan})"]
    return formatted("\n".join([*lines, ""]), "x.py")


# The library for JavaScript.

JS_HEAD: Final = """\
import { pathOf } from "./hub_client.js";

/** Return the fields that were given: a field without a value is left out. */
export function given(fields) {
  const found = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null);
  return Object.fromEntries(found);
}

function valueOf(found, fields) {
  return Object.fromEntries(
    Object.entries(fields).map(([own, [name, isMoment]]) => {
      const value = found[name] ?? null;
      return [own, isMoment && value !== null ? new Date(value) : value];
    }),
  );
}

// All rows of a list, whatever the number of requests.
async function rowsOf(hub, path, { rows, by, query, signal }) {
  const found = [];
  for (;;) {
    const after = found.at(-1)?.[by];
    const answer = await hub.get(path, { query: { ...query, after }, signal });
    found.push(...answer[rows]);
    if (answer[rows].length === 0 || !(answer.left || answer[rows].length === query.limit)) return found;
  }
}
"""


def _js_text(lines: list[str], indent: str) -> list[str]:
    if len(lines) == 1:
        return [f"{indent}/** {lines[0]} */"]
    return [f"{indent}/**", *(f"{indent} * {line}".rstrip() for line in lines), f"{indent} */"]


def js_calls() -> str:
    """Return the module with the methods of the agent in JavaScript."""
    lines = [f"// {MARK}", "", JS_HEAD, *_js_fields()]
    for name, (_, fields) in values().items():
        lines += [f"const {_constant(name)} = {{"]
        for own, f in fields:
            moment = ", true" if f.kind.get("format") == "date-time" else ""
            lines += [f'  {to_camel(own)}: ["{f.name}"{moment}],']
        lines += ["};", ""]
    lines += [
        "/** The plain operations of the hub, as methods of `Agent`. */",
        "export class Operations {",
        "  #hub;",
        "",
    ]
    lines += ["  constructor(hub) {", "    this.#hub = hub;", "  }"]
    for one, call, arguments, value in called():
        lines += ["", *_js_text(_js_described(one, call, arguments), "  ")]
        needed, options = _js_arguments(one, arguments)
        named = [to_camel(f.name) for f in options]
        named += ["key", "signal"] if one.kind.KEY is not None else ["signal"]
        given = ", ".join([*needed, f"{{ {', '.join(named)} }} = {{}}"])
        lines += [f"  async {to_camel(call.name)}({given}) {{"]
        parts = (to_camel(part.strip("{}")) if part[0] == "{" else f'"{part}"' for part in one.parts())
        path = f"pathOf({', '.join(parts)})"
        sent = [f for f in arguments if f not in one.path]
        fields = [_pair(f.name, to_camel(f.name)) for f in sent]
        if one.rows:
            fields += [f"limit: {f.schema['maximum']}" for f in one.sent if f.name == "limit"]
            query = f"{{ {', '.join(fields)} }}" if fields else "{}"
            lines += [f"    const query = {query};"]
            options_text = f'{{ rows: "{one.rows}", by: "{one.by}", query, signal }}'
            lines += [f"    const found = await rowsOf(this.#hub, {path}, {options_text});"]
            lines += [f"    return found.map((row) => valueOf(row, {_constant(value.name)}));"]
        else:
            if one.kind.METHOD == "GET":
                query = f"query: {{ {', '.join(fields)} }}, " if fields else ""
                asked = f"await this.#hub.get({path}, {{ {query}signal }})"
            else:
                body = f"{{ {', '.join(fields)} }}" if fields else "{}"
                asked = f"await this.#hub.post({path}, {body}, {{ {', '.join(named[len(options) :])} }})"
            lines += [
                f"    {asked};" if value is None else f"    return valueOf({asked}, {_constant(value.name)});"
            ]
        lines += ["  }"]
    return "\n".join([*lines, "}", ""])


def _js_fields() -> list[str]:
    sent = [to_camel(f.name) for f in sent_fields()]
    taken = {"blob": "blob?.digest ?? blob"}
    shown = [f"    {to_camel(one.name)}: found.{one.name} ?? null," for one in MESSAGE_FIELDS]
    return [
        "/** The optional fields of a message that is sent, as the hub names them. */",
        f"export function sentFields({{ {', '.join(sent)} }}) {{",
        "  return given({",
        *(f"    {_pair(f.name, taken.get(f.name) or to_camel(f.name))}," for f in sent_fields()),
        "  });",
        "}",
        "",
        "/** The fields that a message takes from its sender to its recipients, by their names here. */",
        "export function messageFields(found) {",
        "  return {",
        *shown,
        "  };",
        "}",
        "",
    ]


def _js_arguments(one: Described, arguments: list[Field]) -> tuple[list[str], list[Field]]:
    """Return the names of the positional arguments, and the fields of the options."""
    needed = [f for f in arguments if f in one.path or f.is_needed]
    return [to_camel(f.name) for f in needed], [f for f in arguments if f not in needed]


def _js_described(one: Described, call: Call, arguments: list[Field]) -> list[str]:
    lines = _wrapped(text_of(call, one).replace("`None`", "null"), "")
    needed, _ = _js_arguments(one, arguments)
    told = [(f"@param {n if (n := to_camel(f.name)) in needed else f'options.{n}'}", f.text) for f in arguments]
    return [
        *lines,
        *([""] if told else []),
        *(line for name, text in told for line in _wrapped(f"{name} {text}", "")),
    ]


def _constant(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


def _pair(name: str, value: str) -> str:
    return name if name == value else f"{name}: {value}"


def _ts_type(field: Field) -> str:
    kind = field.kind
    match kind.get("type"):
        case "string" if "enum" in kind:
            found = " | ".join(f'"{one}"' for one in kind["enum"])
        case "string":
            found = "Date" if kind.get("format") == "date-time" else "string"
        case "array":
            found = f"{_ts_type(Field('', kind['items'], ''))}[]"
        case "object" if isinstance(kind.get("additionalProperties"), dict):
            found = f"Record<string, {_ts_type(Field('', kind['additionalProperties'], ''))}>"
        case name:
            names = {"integer": "number", "number": "number", "boolean": "boolean"}
            found = names.get(str(name), "Record<string, any>" if "$ref" in kind else "any")
    return f"{found} | null" if field.is_optional else found


def _ts_fields() -> list[str]:
    lines = ["/** The optional fields of a message that is sent. */", "export interface SentFields {"]
    types = {"blob": "{ digest: string } | string"}
    for f in sent_fields():
        shown = types.get(f.name) or _ts_type(f).removesuffix(" | null")
        lines += [*_js_text(_wrapped(_ABSENT.sub("", f.text), ""), "  "), f"  {to_camel(f.name)}?: {shown};"]
    lines += ["}", "", "/** The fields that a message takes from its sender to its recipients. */"]
    lines += ["export interface MessageFields {"]
    for one in MESSAGE_FIELDS:
        lines += [*_js_text([one.text], "  "), f"  readonly {to_camel(one.name)}: string | null;"]
    return [*lines, "}", ""]


def ts_types() -> str:
    """Return the types of the methods and values."""
    lines = [f"// {MARK}", "", *_ts_fields()]
    for name, (text, fields) in values().items():
        lines += [*_js_text([text], ""), f"export interface {name} {{"]
        for own, f in fields:
            lines += [*_js_text(_wrapped(f.text, ""), "  "), f"  {to_camel(own)}: {_ts_type(f)};"]
        lines += ["}", ""]
    lines += ["/** The plain operations of the hub, as methods of `Agent`. */", "export class Operations {"]
    for one, call, arguments, value in called():
        needed, options = _js_arguments(one, arguments)
        given = [f"{to_camel(f.name)}: {_ts_type(f)}" for f in arguments if to_camel(f.name) in needed]
        types = [f"{to_camel(f.name)}?: {_ts_type(f).removesuffix(' | null')}" for f in options]
        types += ["key?: string"] if one.kind.KEY is not None else []
        shown = "void" if value is None else f"{value.name}[]" if one.rows else value.name
        lines += [*_js_text(_js_described(one, call, arguments), "  "), f"  {to_camel(call.name)}("]
        lines += [f"    {one}," for one in given]
        lines += ["    options?: {", *(f"      {one};" for one in [*types, "signal?: AbortSignal"]), "    },"]
        lines += [f"  ): Promise<{shown}>;"]
    return "\n".join([*lines, "}", ""])
