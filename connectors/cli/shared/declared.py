"""Actions of the command line that follow from the declarations of the hub's operations.

`declared_requests.py` has the request of each action, with its arguments. It is generated, so that help needs
none of the hub's modules. A command adds how people see the answer, by `add_declared`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from connectors.cli.shared.actions import Action, Actions, Argument, Declared, Given, argument
from connectors.cli.shared.arguments import limit, name_of, request_id, whole_seconds
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.declared_requests import REQUESTS
from connectors.cli.shared.text_output import CELL_LIMIT, fields
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import duration_s

Lines = Callable[[Row], Sequence[str]]
"""A function that returns the lines of text about an answer."""


class Shown(NamedTuple):
    """How the command line offers a declared action, and shows its answer.

    Attributes:
        name: The action's name.
        text: Its help. None: the begin of the operation's description.
        answer: The text about an answer, whose names in braces are arguments, and fields of the answer. Or a
            function that returns its lines. None: all its fields, or a table of its rows.
        columns: The columns of the table. None: the fields of a row.
        arguments: Arguments that differ from those that follow from the operation, by the names of its fields.
            None leaves one out.
        by: The field of a row by which the list goes on; several are joined by slashes. None: that of the
            declaration.
        adapted: Returns the answer as the command line shows it.
        rows: The field of that answer with the rows. None: that of the declaration.
        cell_limit: The largest number of characters of a cell.
    """

    name: str
    text: str | None = None
    answer: str | Lines | None = None
    columns: Columns | None = None
    arguments: Mapping[str, Argument | None] = {}
    by: str | None = None
    adapted: Callable[[Row], Row] | None = None
    rows: str | None = None
    cell_limit: int = CELL_LIMIT


def add_declared(actions: Actions, command: str, *shown: Shown) -> None:
    """Append all declared actions of a command to `actions`.

    Args:
        actions: The command's actions so far.
        command: The command, such as `schedules`.
        shown: How actions are offered and shown, in the order in which they are listed. All other declared
            actions come last, as their declarations say.

    Raises:
        KeyError: `shown` names an action that no operation of the command declares.
    """
    named = {one.name: one for one in shown}
    found = {key.partition(" ")[2]: one for key, one in REQUESTS.items() if key.partition(" ")[0] == command}
    for name in dict.fromkeys([*named, *found]):
        actions.append(_action(command, found[name], named.get(name, Shown(name))))


def newest_last(rows: str) -> Callable[[Row], Row]:
    """Return a function that turns the order of an answer's rows around. `rows` is the field that has them."""
    return lambda found: {**found, rows: found[rows][::-1]}


def _action(command: str, request: Declared, shown: Shown) -> Action:
    given = [one for one in request.given if shown.arguments.get(one.name, one) is not None]
    arguments = [shown.arguments.get(one.name) or _argument(command, one) for one in given]
    if request.has_key:
        arguments.append(request_id("the same request"))

    def run(call: Call) -> int:
        return _print(call, request, shown, _asked(call, request, shown, [one.name for one in given]))

    text = shown.text or request.text
    example = f"example: trunkline {command} {shown.name} {request.example}".rstrip()
    return Action(shown.name, text[:1].lower() + text[1:], run, arguments, example)


def _argument(command: str, given: Given) -> Argument:
    """Return the argument of a field: a positional one if a request needs it, else an option."""
    noun = command.removesuffix("s") if given.name == "name" else given.name.replace("_", " ")
    article = "an" if noun[0] in "aeiou" else "a"
    types: dict[str, dict[str, Any]] = {
        "flag": {"action": "store_true"},
        "name": {"type": name_of(f"{article} {noun}")},
        "names": {"action": "append"},
        "number": {"type": int, "metavar": "N"},
        "seconds": {"type": duration_s, "metavar": "TIME"},
        "whole_seconds": {"type": whole_seconds, "metavar": "TIME"},
    }
    if given.kind == "limit":
        return limit()
    options = {"choices": given.choices} if given.choices else types.get(given.kind, {})
    if given.is_needed:
        return argument(given.name, given.text, **options)
    if given.kind != "flag" and not given.choices:
        options = {"metavar": given.name.upper(), **options}
    return argument(
        f"--{given.name.removesuffix('_s').replace('_', '-')}", given.text, dest=given.name, **options
    )


def _asked(call: Call, request: Declared, shown: Shown, names: Sequence[str]) -> Row:
    """Send the request, and return the answer."""
    values = {name: getattr(call, name) for name in names}
    path = [str(values.pop(part[1:-1])) if part[0] == "{" else part for part in request.path]
    if request.method == "POST":
        return call.post_named(*path, possible_effect="it was carried out", **values)
    if request.by is not None and "limit" not in values:
        found: Row = call.get_all(*path, key=request.rows or "", name=shown.by or request.by, **values)
    else:
        found = call.get(*path, **values)
    return found if shown.adapted is None else shown.adapted(found)


def _print(call: Call, request: Declared, shown: Shown, found: Row) -> int:
    if key := shown.rows or request.rows:
        columns = shown.columns or {one.upper().replace("_", " "): one for one in next(iter(found[key]), {})}
        return call.print_rows(found, key, columns, shown.cell_limit)
    if shown.answer is None:
        return call.print_answer(found, fields(found))
    if callable(shown.answer):
        return call.print_answer(found, *shown.answer(found))
    known = {name: escaped(str(value)) for name, value in {**vars(call), **found}.items()}
    return call.print_answer(found, shown.answer.format(**known))
