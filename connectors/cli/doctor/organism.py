"""Checks of the XML pump: its file of listeners, and the socket for signed commands."""

from __future__ import annotations

import socket

from connectors.cli.doctor.findings import Checks, Finding, fail, is_started, ok, warn
from connectors.local_stack.part_plan import GATEWAY
from connectors.terminal.terminal_text import escaped
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings

_CONNECT_S = 2.0
_MEND = "the listeners of the log stay; correct the file, then: trunkline organism reload"
CHECKS = Checks()


@CHECKS.add("organism")
def check_organism(settings: Settings) -> Finding:
    """Check that the file of the listeners can be loaded, with its handlers."""
    from connectors.organism.organism_file import OrganismError, check_agents, load_organism, organism_path

    file, path = settings.xml_pump.organism_file, organism_path(settings)
    if path is None:
        return ok(f"{file or 'no file'} is not there: listeners come by commands alone")
    try:
        found = load_organism(path)
        check_agents(settings, path, [listener.name for listener in found.listeners])
    except OrganismError as error:
        return fail(str(error), _MEND)
    if (fault := _fault_at_the_gateway(settings)) is not None:
        return fail(f"the gateway has not loaded {file}: {fault}", _MEND)
    return ok(f"{len(found.listeners)} listeners in {file}")


def _fault_at_the_gateway(settings: Settings) -> str | None:
    """Return the gateway's error for the file; None without an error or a gateway."""
    from connectors.gateway_client.gateway_client import GatewayClient, path_of

    if not is_started(settings, GATEWAY):
        return None
    try:
        with GatewayClient(settings) as gateway:
            fault = gateway.get(path_of("listeners"))["fault"]
    except TrunklineError:  # the check of the gateway reports this
        return None
    return None if fault is None else escaped(str(fault))


@CHECKS.add("commands")
def check_commands(settings: Settings) -> Finding:
    """Check that a gateway takes signed commands, and that all files of keys are valid."""
    from connectors.out_of_band.command_keys import read_keys
    from connectors.unix_socket.claimed_socket import address_of

    path, folder = settings.command_socket, settings.command_keys_path
    if not is_started(settings, GATEWAY):
        return warn("no gateway of this data directory runs here", "trunkline up starts it")
    keys = read_keys(folder)
    if keys.faults:
        name, why = next(iter(keys.faults.items()))
        return warn(f"{folder}: {name}: {why}", "correct or remove it")
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(_CONNECT_S)
    try:
        with address_of(path) as address:
            client.connect(address)
    except OSError as error:
        return fail(f"{path}: {error.strerror or error}", f"trunkline logs {GATEWAY} says why")
    finally:
        client.close()
    return ok(f"{path}, keys: {', '.join(key.name for key in keys.keys.values())}")
