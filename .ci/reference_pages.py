#!/usr/bin/env python3
"""Writes the reference pages that follow from the code, and the digests of the contracts, below docs/reference.

.venv/bin/python .ci/reference_pages.py                    write them
.venv/bin/python .ci/reference_pages.py --check            fail if one of them is out of date
.venv/bin/python .ci/reference_pages.py --contracts DIR    write the contracts themselves, into a folder
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Written by .ci/reference_pages.py: do not edit. -->"
sys.path.insert(0, str(ROOT))
os.environ["COLUMNS"] = "100"

from connectors.cli.main import COMMANDS, parser_of, top_level_help  # noqa: E402
from connectors.cli.stack.settings_command import all_settings  # noqa: E402
from connectors.doors.http_api.contracts.document_routes import OPENAPI_FILE, contract_files, file_of  # noqa: E402
from connectors.hub.serving.api_document import ROLES_LINE  # noqa: E402
from schemas.settings.settings import Settings  # noqa: E402
from schemas.streams.fold import KINDS, VIEW_TABLES, VIEWS  # noqa: E402
from schemas.streams.principal.principals import OPERATOR  # noqa: E402
from schemas.tables.arrow_tables import (  # noqa: E402
    LEDGER_ARROW,
    VIEW_ARROW,
    VIEW_ROWS,
    Position,
    with_comments,
)
from schemas.tables.ledger import LedgerRow  # noqa: E402
from trunkline_agent.wire.verdicts import DOOR_REASONS, REASONS  # noqa: E402

SETTINGS_TEXT = """\
Defaults are overridden by `conf/trunkline.yaml`, or the file that `TRUNKLINE_CONF` names. Variables
`TRUNKLINE__SECTION__NAME` override the file. An unknown name is an error. An empty variable counts as not set,
except `TRUNKLINE__DATA_DIR`, which must not be empty. Secrets come from the environment or from files with mode
0600, never from the settings file. A change takes effect after `down` and `up`.

`./trunkline settings` prints the values in force and their sources; `./trunkline settings --sample` prints a
commented settings file."""


def settings_page() -> Iterator[str]:
    """Yield the lines of the page about settings."""
    yield "# Settings"
    yield ""
    yield "For people who run Trunkline: every setting with its type, default and meaning."
    yield ""
    yield SETTINGS_TEXT
    for section, members in groupby(all_settings(), lambda one: one.name.rpartition(".")[0]):
        yield ""
        yield f"## {section or 'General'}"
        yield ""
        if section:
            yield section_text(section)
            yield ""
        yield "| setting | type | default | meaning |"
        yield "|---|---|---|---|"
        for one in members:
            kind = f"{one.type}, {one.bounds}" if one.bounds else one.type
            value = str(one.default).lower() if isinstance(one.default, bool) else one.default
            default = "unset" if one.default is None else f"`{value}`"
            alias = f" Also as the variable `{one.alias}`." if one.alias else ""
            yield f"| `{one.name}` | {kind} | {default} | {one.description}{alias} |"


def section_text(section: str) -> str:
    """Return the docstring of a section's model as one line."""
    model: Any = Settings.model_fields[section].annotation
    return " ".join((model.__doc__ or "").split())


def cli_page() -> Iterator[str]:
    """Yield the lines of the page about the command line."""
    yield "# Command line"
    yield ""
    yield "For users of `./trunkline`: the help of every command."
    yield ""
    yield "Exit codes: 0 success, 1 runtime error, 2 wrong usage or setting, 3 nothing found, 4 refused,"
    yield "5 backbone unreachable, 130 interrupted."
    yield ""
    yield "```"
    yield top_level_help().rstrip()
    yield "```"
    for name in COMMANDS:
        yield ""
        yield f"## {name}"
        for each in parsers_of(parser_of(name)):
            yield ""
            yield "```"
            yield each.format_help().rstrip().replace(str(ROOT), "/path/to/checkout")
            yield "```"


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of its actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name in action.choices:
                yield from parsers_of(action.choices[name])


def http_page() -> Iterator[str]:
    """Yield the lines of the page about the HTTP API."""
    document = openapi()
    yield "# HTTP API"
    yield ""
    yield "For programs that call the hub: its operations. An asterisk marks what is required. The operator may"
    yield "perform all operations. `own`: only for things that the caller made or holds. A running hub serves"
    yield "the OpenAPI document, with the fields of bodies and answers and with examples, at `/openapi.json`."
    yield "The page `/docs` shows it. It is one of the [contracts](contracts.md)."
    yield "The rules that all operations share are in [Rules of HTTP](http_rules.md)."
    for tag, operations in groupby(sorted(operations_of(document)), lambda one: one[0]):
        yield ""
        yield f"## {tag}"
        yield ""
        yield "| operation | what it does | roles | parameters and fields of the body | answers |"
        yield "|---|---|---|---|---|"
        for _, path, method, operation in operations:
            inputs = ", ".join(f"`{name}`" for name in inputs_of(operation, document)) or "-"
            text = " ".join(operation["description"].partition(ROLES_LINE)[0].split())
            answers = ", ".join(sorted(operation["responses"]))
            yield f"| `{method.upper()} {path}` | {text} | {roles_of(operation)} | {inputs} | {answers} |"


def roles_of(operation: dict[str, Any]) -> str:
    """Return the roles beside the operator that may perform an operation."""
    if "security" not in operation:
        return "all, without a token"
    roles = {role: reach for role, reach in operation["x-trunkline-roles"].items() if role != OPERATOR}
    return ", ".join(role if reach == "all" else f"{role} (own)" for role, reach in roles.items()) or "-"


@cache
def openapi() -> dict[str, Any]:
    """Return the hub's OpenAPI document."""
    from connectors.hub.live.live_view import LiveView
    from connectors.hub.services.hub import Hub
    from connectors.programs.gateway_program.application import build_application
    from schemas.keys.sealing import Keyring

    settings, keyring = Settings(), Keyring({"reference": bytes(32)}, "reference")
    app: Any = build_application(Hub(settings, keyring, "reference", LiveView(settings, keyring)))
    while not hasattr(app, "openapi"):
        app = app.app
    found: dict[str, Any] = app.openapi()
    return found


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield section, path, method and operation."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield operation["tags"][0], path, method, operation


def inputs_of(operation: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    """Yield the names of parameters and of the body's fields, with an asterisk if they are required."""
    for one in operation.get("parameters", ()):
        yield one["name"] + ("*" if one.get("required") and one["in"] != "path" else "")
    content = operation.get("requestBody", {}).get("content", {})
    for media in content.values():
        schema = media.get("schema", {})
        name = schema.get("$ref", "").rpartition("/")[2]
        model = document["components"]["schemas"].get(name, schema)
        yield from (field + "*" * (field in model.get("required", ())) for field in model.get("properties", ()))


def reasons_page() -> Iterator[str]:
    """Yield the lines of the page about reasons."""
    yield "# Reasons"
    yield ""
    yield "For readers of receipts, answers or the ledger: why a record was rejected. The checks run in this"
    yield "order, and the first one that fails gives the reason. `malformed` is checked before and after"
    yield "`schema_version`."
    yield ""
    yield "| reason | meaning | decided by |"
    yield "|---|---|---|"
    for reason, meaning in REASONS.items():
        yield f"| `{reason}` | {meaning} | {'the door' if reason in DOOR_REASONS else 'the fold'} |"


def record_types_page() -> Iterator[str]:
    """Yield the lines of the page about record types."""
    yield "# Record types"
    yield ""
    yield "For developers of doors and readers of the log: the types of records, by kind of stream. The key"
    yield "of a record is `<kind>/<name>`. Every body has `schema_version`, too. An asterisk: a required field."
    for kind in KINDS.values():
        yield ""
        yield f"## {kind.name}"
        yield ""
        yield "| record type | fields of its body |"
        yield "|---|---|"
        for record_type, model in kind.models.items():
            fields = [
                f"`{field.alias or name}{'*' * field.is_required()}`"
                for name, field in model.model_fields.items()
                if name != "schema_version"
            ]
            yield f"| `{record_type}` | {', '.join(fields) or '-'} |"


def tables_page() -> Iterator[str]:
    """Yield the lines of the page about tables."""
    yield "# Tables"
    yield ""
    yield "For analysts and auditors: the Delta tables and their columns. Times are in UTC. `partition` and"
    yield "`last_offset` name the record that made the row."
    yield ""
    yield "## ledger"
    yield ""
    yield "One row for each record of the log, with any verdict. `dead_letters` are the rows whose `verdict` is"
    yield "`rejected`."
    yield ""
    yield from column_table(with_comments(LEDGER_ARROW, LedgerRow))
    for name in VIEW_TABLES:
        yield ""
        yield f"## {name}"
        yield ""
        yield " ".join((VIEW_ROWS[name].__doc__ or "").partition("Attributes:")[0].split())
        yield ""
        if name in VIEWS:
            yield f"Key: {', '.join(f'`{column}`' for column in VIEWS[name].KEY)}."
            yield ""
        yield from column_table(with_comments(VIEW_ARROW[name], VIEW_ROWS[name], Position))


def column_table(schema: Any) -> Iterator[str]:
    """Yield a table of the columns of an Arrow schema, with their comments."""
    yield "| column | type | may be null | meaning |"
    yield "|---|---|---|---|"
    for field in schema:
        comment = (field.metadata or {}).get(b"comment", b"").decode("utf-8")
        yield f"| `{field.name}` | {field.type} | {'yes' if field.nullable else 'no'} | {comment} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "settings.md": settings_page,
    "cli.md": cli_page,
    "http_api.md": http_page,
    "reasons.md": reasons_page,
    "record_types.md": record_types_page,
    "tables.md": tables_page,
}


DIGESTS = "contracts.sha256"


def contracts() -> dict[str, bytes]:
    """Return the contents of the contracts by their paths."""
    return {OPENAPI_FILE: file_of(openapi()), **contract_files(Settings())}


def reference_files() -> Iterator[tuple[str, bytes]]:
    """Yield the path below docs/reference, and the content, of each file. `sha256sum -c` reads the digests."""
    for name, page in PAGES.items():
        text = "\n".join(line.rstrip() for line in "\n".join([NOTE, *page()]).splitlines()) + "\n"
        yield name, text.encode()
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contracts().items()]
    yield DIGESTS, "".join(lines).encode()


def write(files: dict[Path, bytes]) -> None:
    """Write files, with the folders that they need."""
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def main() -> int:
    """Write the files, or compare them."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    parser.add_argument("--contracts", type=Path, metavar="DIR", help="write the contracts, and nothing else")
    args = parser.parse_args()
    if args.contracts is not None:
        write({args.contracts / name: content for name, content in contracts().items()})
        return 0
    wanted = {FOLDER / name: content for name, content in reference_files()}
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_bytes() != content]
    if args.check and stale:
        names = ", ".join(str(path.relative_to(FOLDER)) for path in stale)
        print(f"out of date: {names}; run .venv/bin/python .ci/reference_pages.py", file=sys.stderr)
        return 1
    write({path: wanted[path] for path in stale})
    return 0


if __name__ == "__main__":
    sys.exit(main())
