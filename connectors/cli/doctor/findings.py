"""The result of a check of `trunkline doctor` (a finding), and the checks on the parts of the stack.

Each check returns ok, or a fault and its repair.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Final

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.local_stack import control, memory
from connectors.programs.local_stack.part_plan import BRIDGE, FILES, GATEWAY, XML_PUMP
from schemas.settings.settings import Settings
from trunkline_agent.errors import TrunklineError
from trunkline_agent.private_files import PrivateFileError, check_private
from trunkline_agent.terminal_text import escaped

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


_CONNECT_S: Final = 2.0
# The doctor names so many sessions or mailboxes for which lines of the file queue wait.
_SHOWN: Final = 5
_MEND: Final = "the listeners of the log stay; correct the file, then: trunkline organism reload"
CHECKS: Final = Checks()


def check_part(settings: Settings, part: str) -> Finding:
    """Check that the part `part` of the stack, such as `bridge`, runs and is ready.

    A part that was not started, or was restarted after it had ended, is a warning. A part that is not ready is
    a failure.
    """
    status = next((status for status in control.part_statuses(settings) if status.name == part), None)
    if status is None or not is_started(settings, part):
        return warn("not started by this stack", START)
    found, why = f"{status.state}, restarts: {status.restarts}", f"trunkline logs {part} says why"
    if status.memory_kills:
        found += f", of these {status.memory_kills} because the kernel killed it for memory"
        why = f"give the stack more memory: {memory.PAGE}"
    if status.state != "ready":
        return fail(found if status.why is None else f"{found}: {status.why}", why)
    return warn(found, f"it died before: {why}") if status.restarts else ok(found)


CHECKS.add(BRIDGE)(partial(check_part, part=BRIDGE))


@CHECKS.add(FILES)
def check_files(settings: Settings) -> Finding:
    """Check that the file bridge is ready, and that no session and no mailbox keeps lines of the queue waiting.

    Waiting lines are a warning.
    """
    from connectors.doors.file_bridge.records import Progress, progress_file

    part = check_part(settings, FILES)
    progress = Progress.load(progress_file(settings))
    held = [f"{name}/{one} ({why})" for name, names in progress.held.items() for one, why in names.items()]
    stuck = [f"{name} ({why})" for name, why in progress.stuck.items()]
    if part.level == FAIL or not (held or stuck):
        return part
    said = first_of(sorted(map(escaped, stuck or held)), ", ", _SHOWN)
    if stuck:
        mend = f"trunkline logs {FILES} says since when; the bridge tries again, so mend the cause"
        return warn(f"{part.found}; no line of these sessions of the file queue is carried: {said}", mend)
    return warn(
        f"{part.found}; lines of the file queue wait for {said}",
        "let the readers take their messages, or raise their limits: trunkline principals limit",
    )


@CHECKS.add(XML_PUMP)
def check_xml_pump(settings: Settings) -> Finding:
    """Check that each process of the XML pump in the stack runs and is ready.

    The finding has the worst level of all processes, see `check_part`. Without a process, it is a warning,
    unless the setting `xml_pump.processes` is 0.
    """
    state = control.running_state(settings) or {"parts": ()}
    names = [name for name in state["parts"] if name == XML_PUMP or name.startswith(f"{XML_PUMP}_")]
    if not names and settings.xml_pump.processes == 0:
        return ok("none is to run here: xml_pump.processes is 0")
    pumps = {name: check_part(settings, name) for name in names or [XML_PUMP]}
    worst = max(pumps.values(), key=lambda pump: (OK, WARN, FAIL).index(pump.level))
    if len(pumps) == 1:
        return worst
    return replace(worst, found="; ".join(f"{name}: {pump.found}" for name, pump in pumps.items()))


@CHECKS.add("organism")
def check_organism(settings: Settings) -> Finding:
    """Check that conf/organism.yaml and its handlers can be loaded, here and by the gateway that runs.

    A file or handler that cannot be loaded is a failure. Without the file, or without a running gateway, there
    is no fault. The check blocks for a second or two, because a child process imports the handlers.
    """
    from connectors.hub.organism.organism_file import OrganismError, check_agents, load_organism, organism_path

    file, path = settings.xml_pump.organism_file, organism_path(settings)
    if path is None:
        return ok(f"{file or 'no file'} is not there: listeners come by commands alone")
    try:
        found = load_organism(path)
        check_agents(settings, path, [listener.name for listener in found.listeners])
    except OrganismError as error:
        return fail(str(error), _MEND)
    at_work = _fault_at_the_gateway(settings)
    if at_work.level == FAIL:
        return fail(f"the gateway has not loaded {file}: {at_work.found}", _MEND)
    return ok(f"{len(found.listeners)} listeners in {file}")


@at_the_gateway
def _fault_at_the_gateway(gateway: GatewayClient) -> Finding:
    """Return the gateway's error for the file as a failure."""
    fault = gateway.get(path_of("listeners"))["fault"]
    return ok("") if fault is None else fail(escaped(str(fault)))


@CHECKS.add("commands")
def check_commands(settings: Settings) -> Finding:
    """Check that the gateway accepts signed commands on its Unix socket, and that all key files are valid.

    Without a running gateway, or with an invalid key file, it is a warning. A socket without a server is a
    failure.
    """
    from connectors.doors.out_of_band.signed_commands import read_keys
    from trunkline_agent.sockets import address_of

    path, folder = settings.command_socket, settings.command_keys_path
    if not is_started(settings, GATEWAY):
        return warn("no gateway of this data directory runs here", "trunkline up starts it")
    keys = read_keys(folder)
    if keys.faults:
        name, why = next(iter(keys.faults.items()))
        return warn(f"{folder}: {name}: {why}", "correct or remove it")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, address_of(path) as address:
            client.settimeout(_CONNECT_S)
            client.connect(address)
    except OSError as error:
        return fail(f"{path}: {error.strerror or error}", f"trunkline logs {GATEWAY} says why")
    return ok(f"{path}, keys: {', '.join(key.name for key in keys.keys.values())}")
