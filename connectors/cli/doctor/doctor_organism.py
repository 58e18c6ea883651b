"""What `trunkline doctor` checks of the XML pump: its file of listeners, and the way that commands take."""

from __future__ import annotations

import socket

from connectors.cli.doctor.doctor_findings import FAIL, OK, WARN, Finding
from connectors.local_stack import control
from connectors.local_stack.part_plan import GATEWAY
from connectors.terminal.terminal_text import escaped
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings

_CONNECT_S = 2.0
_MEND = "the listeners of the log stand; mend the file, then: trunkline organism reload"


def check_organism(settings: Settings) -> Finding:
    """The file of the listeners can be loaded, with its handlers."""
    from connectors.organism.organism_file import OrganismError, check_agents, load_organism, organism_path

    file, path = settings.xml_pump.organism_file, organism_path(settings)
    if path is None:
        return Finding("organism", OK, f"{file or 'no file'} is not there: listeners come by commands alone")
    try:
        found = load_organism(path)
        check_agents(settings, path, [listener.name for listener in found.listeners])
    except OrganismError as error:
        return Finding("organism", FAIL, str(error), _MEND)
    if (fault := _fault_at_the_gateway(settings)) is not None:
        return Finding("organism", FAIL, f"the gateway has not loaded {file}: {fault}", _MEND)
    return Finding("organism", OK, f"{len(found.listeners)} listeners in {file}")


def _fault_at_the_gateway(settings: Settings) -> str | None:
    """Return the gateway's fault of the file; None if there is no fault, or no gateway to ask."""
    from connectors.gateway_client.gateway_client import GatewayClient, path_of

    state = control.running_state(settings)
    if state is None or GATEWAY not in state["parts"]:
        return None
    try:
        with GatewayClient(settings) as gateway:
            fault = gateway.get(path_of("listeners"))["fault"]
    except TrunklineError:  # the check of the gateway says what is wrong with it
        return None
    return None if fault is None else escaped(str(fault))


def check_commands(settings: Settings) -> Finding:
    """A gateway takes signed commands, and the keys that count are in order."""
    from connectors.out_of_band.command_keys import read_keys
    from connectors.unix_socket.claimed_socket import address_of

    path, folder = settings.command_socket, settings.command_keys_path
    state = control.running_state(settings)
    if state is None or GATEWAY not in state["parts"]:
        return Finding(
            "commands", WARN, "no gateway of this data directory runs here", "trunkline up starts it"
        )
    keys = read_keys(folder)
    if keys.faults:
        name, why = next(iter(keys.faults.items()))
        return Finding("commands", WARN, f"{folder}: {name}: {why}", "mend or remove it")
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(_CONNECT_S)
    try:
        with address_of(path) as address:
            client.connect(address)
    except OSError as error:
        return Finding(
            "commands", FAIL, f"{path}: {error.strerror or error}", f"trunkline logs {GATEWAY} says why"
        )
    finally:
        client.close()
    return Finding("commands", OK, f"{path}, keys: {', '.join(key.name for key in keys.keys.values())}")
