"""Actions of commands such as `trunkline tasks ACTION`, declared where their functions are.

The function's name is the action's name, and the first line of its docstring is the help:

    ACTIONS = Actions()

    @ACTIONS.add(argument("task", "the task"), example="trunkline tasks show 5b7e…")
    def _show(call: Call) -> int:
        \"\"\"Show one task.\"\"\"
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connectors.cli.shared.call import Call

Argument = Callable[[argparse._ActionsContainer], object]
"""Adds one argument, or a group of arguments, to a parser."""
Run = Callable[["Call"], int]
"""Runs an action and returns its exit code. Raises TrunklineError."""


def argument(name: str, text: str, **options: Any) -> Argument:
    """Return an argument with a help text and with options of `ArgumentParser.add_argument`."""
    if not name.startswith("-"):
        options.setdefault("metavar", name.upper())
    return lambda parser: parser.add_argument(name, help=text, **options)


def flag(name: str, text: str) -> Argument:
    """Return an option without a value."""
    return argument(name, text, action="store_true")


def one_of(*choices: Argument, required: bool = False) -> Argument:
    """Return arguments of which at most one may be given, or exactly one if `required`."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for choice in choices:
            choice(group)

    return add


@dataclass(frozen=True)
class Action:
    """One action of a command. An action with `kinds` has no `run`; its sub-actions have.

    `epilog` is shown below the help, with its line breaks. `takes_json` adds the option `--json`. With
    `takes_command`, all that follows `--` becomes `args.command`, a list that is empty without `--`. `usage`
    replaces the line that argparse makes. `late` names an optional positional argument that may also follow
    the options.
    """

    name: str
    text: str
    run: Run | None = None
    arguments: Sequence[Argument] = ()
    epilog: str | None = None
    takes_json: bool = True
    takes_command: bool = False
    usage: str | None = None
    late: str | None = None
    kinds: Sequence[Action] = ()


class Actions(list[Action]):
    """The actions of a command, in the order of its help."""

    def add(self, *arguments: Argument, example: str | None = None, **more: Any) -> Callable[[Run], Run]:
        """Return a decorator that adds a function as an action. `more` are fields of `Action`."""

        def decorate(run: Run) -> Run:
            name = run.__name__.strip("_").replace("_", "-")
            text = (run.__doc__ or "").partition("\n")[0].rstrip(".")
            if example is not None:
                more["epilog"] = f"example: {example}"
            self.append(Action(name, text[:1].lower() + text[1:], run, arguments, **more))
            return run

        return decorate


class _ActionParser(argparse.ArgumentParser):
    """Parser of one action. Also does what argparse cannot: see `takes_command` and `late` of `Action`."""

    action: Action

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        before, command = list(args or ()), []
        if self.action.takes_command and "--" in before:
            at = before.index("--")
            before, command = before[:at], before[at + 1 :]
        found, left = super().parse_known_args(before, namespace)
        if self.action.takes_command:
            found.command = command
        late = self.action.late
        if late and getattr(found, late) is None and left and (left[0] == "-" or left[0][:1] != "-"):
            setattr(found, late, left.pop(0))
        return found, left


def add_actions(parser: argparse.ArgumentParser, actions: Sequence[Action], metavar: str = "ACTION") -> None:
    """Add a sub-parser for each action. The parsed arguments hold the action's function as `run`."""
    commands = parser.add_subparsers(required=True, metavar=metavar, parser_class=_ActionParser)
    for action in actions:
        found = commands.add_parser(
            action.name,
            help=action.text,
            description=action.text,
            epilog=action.epilog,
            usage=action.usage,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        found.action = action
        if action.kinds:
            add_actions(found, action.kinds, "KIND")
            continue
        for add in action.arguments:
            add(found)
        if action.takes_json:
            found.add_argument("--json", action="store_true", help="print JSON instead of text")
        found.set_defaults(run=action.run)
