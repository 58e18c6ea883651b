#!/usr/bin/env python3
"""Writes what the clients of the hub have from its operations, and the sync half of the library of agents.

    .venv/bin/python .ci/client_side.py [--check]

- `connectors/cli/shared/declared_requests.py`: the requests of the actions that `COMMAND` names,
- `hub/operation_values.py` and `async_operations.py` of the library: the methods that `CALL` names, and values,
- `operations.js` and `operations.d.ts` of the library for JavaScript: the same,
- the sync half of the library, from its async half (`sync_half.py`).

With `--check` nothing is written; the exit code is 1 if a file is not as this program would write it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from typing import Final

from described_operations import MARK, ROOT, SDK, Described, Field, declaring
from library_methods import js_calls, python_calls, python_values, ts_types
from sync_half import LIBRARY, MODULES, formatted, sync_half

from connectors.hub.serving.api_document import EXAMPLES

_ABSENCE: Final = re.compile(r" ?\b(?:Null|Without it)\b.*", re.DOTALL)


def cli_requests() -> str:
    """Return the module with the requests of the command line."""
    lines = [
        f"# {MARK}",
        '"""The requests of the actions that follow from declarations of operations, by command and action."""',
        "",
        "from connectors.cli.shared.actions import Declared, Given",
        "",
        "REQUESTS = {",
    ]
    for one in declaring("COMMAND"):
        fields = [*one.path, *(field for field in one.sent if field.name != "after" or one.takes("limit"))]
        given = "".join(f"{_cli_field(f)}, " for f in fields)
        text = one.paragraphs[0].partition(". ")[0].rstrip(".").replace("the caller's", "your").replace("`", "")
        text = text.replace("the caller", "you").removesuffix(", or answer 404")
        more = f", {one.rows!r}" if one.rows else ""
        more += f", {one.by!r}" if one.by else ""
        more += f", example={example!r}" if (example := _example(one)) else ""
        path = tuple(one.parts())
        lines.append(
            f"    {one.kind.COMMAND!r}: Declared({one.kind.METHOD!r}, {path!r}, {text!r}, ({given}){more}),"
        )
    return formatted("\n".join([*lines, "}", ""]), "declared_requests.py")


def _example(one: Described) -> str:
    """Return examples of the positional arguments, as the OpenAPI document has them."""
    found = []
    for field in [*one.path, *(f for f in one.sent if f.is_needed)]:
        before = one.kind.PATH.split(f"/{{{field.name}}}")[0].rpartition("/")[2]
        value = next(
            (EXAMPLES[name] for name in (f"{before}.{field.name}", field.name) if name in EXAMPLES), "x"
        )
        found.append(shlex.quote(str(value)))
    return " ".join(found)


def _cli_kind(field: Field) -> str:
    kind = field.kind
    match kind.get("type"):
        case "boolean":
            return "flag"
        case "integer" if field.name == "limit" and field.schema.get("default"):
            return "limit"
        case "integer" if field.name.endswith("_s"):
            return "whole_seconds"
        case "integer":
            return "number"
        case "number":
            return "seconds"
        case "array":
            return "names"
        case "string":
            return "name" if str(kind.get("pattern", "")).startswith("^[A-Za-z0-9][") else "text"
    raise TypeError(f"{field.name}: the command line has no argument for {kind}")


def _cli_field(field: Field) -> str:
    given = [repr(field.name), repr(_short(field.text)), repr(_cli_kind(field))]
    given += [f"choices={tuple(field.kind['enum'])!r}"] if "enum" in field.kind else []
    given += ["is_needed=True"] if field.is_needed else []
    return f"Given({', '.join(given)})"


def _short(text: str) -> str:
    found = _ABSENCE.sub("", text).partition(". ")[0].rstrip(".")
    return found[:1].lower() + found[1:]


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 for a change")
    is_check = parser.parse_args().check
    files = {
        ROOT / "connectors" / "cli" / "shared" / "declared_requests.py": cli_requests,
        LIBRARY / "hub" / "operation_values.py": python_values,
        LIBRARY / "async_operations.py": python_calls,
        SDK / "js" / "lib" / "operations.js": js_calls,
        SDK / "js" / "lib" / "operations.d.ts": ts_types,
    }
    # The sync half comes last, because it follows from files above.
    files |= {LIBRARY / name: lambda name=name: sync_half(name) for name in MODULES}
    is_wrong = False
    for path, write in files.items():
        text = write()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        is_wrong = True
        print(f"{path.relative_to(ROOT)}: {'is not as generated' if is_check else 'written'}")
        if not is_check:
            path.write_text(text, encoding="utf-8")
    return int(is_check and is_wrong)


if __name__ == "__main__":
    sys.exit(main())
