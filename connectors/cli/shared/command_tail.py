"""Arguments of commands that end with a command of the user's own: `… -- COMMAND [ARGUMENT…]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class CommandTailParser(argparse.ArgumentParser):
    """Cuts off what stands behind the first `--`, as `command`, once `takes_command` is set: argparse
    cannot, when there are positional arguments and options before it.
    """

    takes_command = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's; `command` is a list, empty without `--`."""
        if not self.takes_command:
            return super().parse_known_args(args, namespace)
        before, command = list(args or ()), []
        if "--" in before:
            at = before.index("--")
            before, command = before[:at], before[at + 1 :]
        found, left = super().parse_known_args(before, namespace)
        found.command = command
        return found, left
