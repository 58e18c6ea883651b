"""The check of the organism file against the agents' files of this machine, before a gateway loads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from connectors.organism.agent_definitions import read_definitions
from connectors.organism.organism_file import OrganismError, parsed, read_file
from schemas.settings.settings import PROJECT_ROOT, Settings


def organism_path(settings: Settings) -> Path | None:
    """Where the file is; None when the settings name none, or it does not exist."""
    file = settings.xml_pump.organism_file
    return PROJECT_ROOT / file if file is not None and (PROJECT_ROOT / file).exists() else None


def check_organism_names(settings: Settings) -> None:
    """Read the file, without its handlers, and compare its names with those of the agents' definitions. Raises
    OrganismError.
    """
    path = organism_path(settings)
    if path is None:
        return
    plan = parsed(read_file(path), path)
    check_agents(settings, path, [entry.name for entry in (*plan.listeners, *plan.agents)])


def check_agents(settings: Settings, path: Path, names: Iterable[str]) -> None:
    """Raise OrganismError for a listener with the name of an agent: both would have one mailbox, so a gateway
    loads nothing of such a file.
    """
    folder = settings.gateway.agents_dir
    agents = read_definitions(PROJECT_ROOT / folder).agents
    for name in names:
        if name in agents:
            raise OrganismError(
                f"{path}: listener {name}: an agent of {folder} has this name; give one of the two another, or "
                "nothing of this file is loaded"
            )
