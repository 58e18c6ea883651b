"""The result of a check of `trunkline doctor` (a finding), and the tables of checks by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path

from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.programs.local_stack import control
from connectors.programs.local_stack.part_plan import GATEWAY
from schemas.settings.settings import Settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.private_files import PrivateFileError, check_private

OK, WARN, FAIL = "ok", "warn", "fail"
START = "start it: trunkline up"
RESTART = "see trunkline logs; then trunkline down and trunkline up"


@dataclass(frozen=True)
class Finding:
    """The result of one check of `trunkline doctor`.

    Attributes:
        level: `ok`, `warn` or `fail`. Only `fail` makes the doctor's exit code 1.
        found: A text about the state that was found.
        mend: A text that says how to repair a fault; empty if there is none.
    """

    level: str
    found: str
    mend: str = ""


Check = Callable[[Settings], Finding]
"""Checks one thing. A TrunklineError, SettingsError or OSError that it raises counts as a failure."""


class Checks(dict[str, Check]):
    """The checks of one module by name, in the order in which the doctor reports them."""

    def add(self, name: str) -> Callable[[Check], Check]:
        """Return a decorator that adds a function as the check `name` and returns the function unchanged."""

        def decorate(check: Check) -> Check:
            self[name] = check
            return check

        return decorate


# Findings of a check that found nothing wrong, or a fault that does not fail the doctor, or one that does.
ok, warn, fail = partial(Finding, OK), partial(Finding, WARN), partial(Finding, FAIL)

NO_GATEWAY = ok("not looked at: no gateway of this data directory runs here")
NO_ANSWER = ok("not looked at: the gateway does not answer")


def at_the_gateway(check: Callable[[GatewayClient], Finding]) -> Check:
    """Return a check that gives a client of the gateway to `check`, if a gateway of this stack answers."""

    @wraps(check)
    def with_a_client(settings: Settings) -> Finding:
        if not is_started(settings, GATEWAY):
            return NO_GATEWAY
        try:
            with GatewayClient(settings) as gateway:
                return check(gateway)
        except TrunklineError:  # the check of the gateway reports this
            return NO_ANSWER

    return with_a_client


def first_of(texts: Sequence[str], between: str, most: int = 3) -> str:
    """Return the first texts, and how many more there are."""
    more = f", and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def private_file(path: Path, maker: str = "") -> Finding:
    """Return a finding about a secret file: a failure if others can read it, a warning if it is missing.

    `maker` is the text that says how to make a missing file, such as a command.
    """
    if not path.exists():
        return warn(f"{path} is not there yet", maker)
    try:
        check_private(path)
    except PrivateFileError as error:
        return fail(str(error.args[0]), error.advice.removeprefix("run: "))
    return ok(f"{path}, mode {path.stat().st_mode & 0o777:o}")


def is_started(settings: Settings, part: str) -> bool:
    """Return whether a stack runs with this data directory and has the part `part`, such as `kafka`."""
    state = control.running_state(settings)
    return state is not None and part in state["parts"]
