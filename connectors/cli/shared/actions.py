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
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from connectors.cli.shared.call import Call

Argument = Callable[[argparse._ActionsContainer], object]
"""A function that adds one argument, or a group of arguments, to a parser of argparse."""
Run = Callable[["Call"], int]
"""A function that runs an action and returns its exit code. It raises TrunklineError."""


def argument(name: str, text: str, *, older: Sequence[str] = (), **options: Any) -> Argument:
    """Declare an argument of an action: return a function that adds the argument to a parser.

    Args:
        name: The name of a positional argument, or an option such as `--limit`.
        text: The help of the argument.
        older: Other spellings of the option, which it has had.
        options: Further arguments of `ArgumentParser.add_argument`.
    """
    if not name.startswith("-"):
        options.setdefault("metavar", name.upper())
    return lambda parser: parser.add_argument(name, *older, help=text, **options)


def flag(name: str, text: str) -> Argument:
    """Declare an option without a value, which is True if it is given, else False.

    `name` is the option, such as `--json`, and `text` its help. The returned function adds it to a parser.
    """
    return argument(name, text, action="store_true")


def one_of(*choices: Argument, required: bool = False) -> Argument:
    """Declare a group of arguments of which at most one may be given, or exactly one if `required` is set.

    `choices` are declared with `argument` or `flag`. The returned function adds the group to a parser.
    """

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for choice in choices:
            choice(group)

    return add


@dataclass(frozen=True)
class Action:
    """One action of a command, such as `list` in `trunkline jobs list`.

    Attributes:
        name: The name of the action.
        text: Its help in one line.
        run: The function that runs it; None for an action with `kinds`.
        arguments: Its arguments.
        epilog: A text that is shown below the help, with its line breaks.
        takes_json: Whether it has the option `--json`.
        takes_command: Whether all that follows `--` becomes the list `args.command`, empty without `--`.
        usage: The line that replaces the usage that argparse makes.
        late: The name of an optional positional argument that may also follow the options.
        kinds: Its sub-actions, each with a `run` of its own.
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
        """Return a decorator that adds a function as an action and returns the function unchanged.

        The function's name becomes the action's name, and the first line of its docstring the help.

        Args:
            arguments: The arguments of the action, declared with `argument`, `flag` or `one_of`.
            example: A command line to show below the help; None for no example.
            more: Further fields of `Action`, by name.
        """

        def decorate(run: Run) -> Run:
            name = run.__name__.strip("_").replace("_", "-")
            text = (run.__doc__ or "").partition("\n")[0].rstrip(".")
            if example is not None:
                more["epilog"] = f"example: {example}"
            self.append(Action(name, text[:1].lower() + text[1:], run, arguments, **more))
            return run

        return decorate


class Given(NamedTuple):
    """A field of a declared request.

    Attributes:
        name: Its name.
        text: Its help.
        kind: `flag`, `limit`, `name`, `names`, `number`, `seconds`, `text` or `whole_seconds`.
        choices: All its values. Empty: any.
        is_needed: Whether a request needs it.
    """

    name: str
    text: str
    kind: str = "name"
    choices: tuple[str, ...] = ()
    is_needed: bool = False


class Declared(NamedTuple):
    """A request of an action, as the hub's operation declares it.

    Attributes:
        method: `GET` or `POST`.
        path: The parts of the path below the API's; the names of fields are in braces.
        text: Its description, in a line.
        given: Its fields.
        rows: The field of the answer with the rows of a list. None: it is no list.
        by: The field of a row by which the list goes on in the next answer. None: there is one answer.
        example: Examples of the arguments that it needs.
    """

    method: str
    path: tuple[str, ...]
    text: str
    given: tuple[Given, ...] = ()
    rows: str | None = None
    by: str | None = None
    example: str = ""

    @property
    def has_key(self) -> bool:
        """True if it has an idempotency key."""
        return self.method == "POST"


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
    """Add a sub-parser for each action to `parser`. The parsed arguments have the action's function as `run`.

    `metavar` is the placeholder for the action's name in the usage.
    """
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
