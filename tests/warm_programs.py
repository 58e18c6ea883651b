"""Work that a fork server does once, so that no program that it forks has to do it again.

A program is as it would be without: the server only imports modules early, and fills the caches of Python's
libraries by building an application that it throws away.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tempfile
from pathlib import Path

from schemas.settings.settings import Settings, XmlPumpSettings

_LATE_IMPORT = re.compile(r"^ +from ((?:connectors|schemas)[.\w]+) import", re.MULTILINE)


def warm_gateway() -> None:
    """Build the applications of all doors of a gateway: half of the processor time of its start."""
    from connectors.hub.live.live_view import LiveView
    from connectors.hub.services.hub import Hub
    from connectors.programs.gateway_program.application import doors_of
    from schemas.keys.sealing import ensure_keyring

    with tempfile.TemporaryDirectory(prefix="warm-") as name:
        folder = Path(name)
        pump = XmlPumpSettings(organism_file=folder / "organism.yaml", processes=0)
        settings = Settings(data_dir=folder, xml_pump=pump)
        keyring = ensure_keyring(settings)
        doors_of(Hub(settings, keyring, "of-nobody", LiveView(settings, keyring, folder / "view"), []))


def warm_command(name: str) -> None:
    """Import the module of a command of `trunkline`, and the modules that its functions import."""
    from connectors.cli.main import COMMANDS

    # The program itself says what is wrong with an unknown command.
    if name not in COMMANDS:
        return
    importlib.import_module("connectors.cli.shared.call")
    importlib.import_module(COMMANDS[name].module)
    parts = [module for path, module in sys.modules.items() if path.startswith("connectors.cli.")]
    for module in parts:
        for found in _LATE_IMPORT.findall(inspect.getsource(module)):
            importlib.import_module(found)


def warm(module: str, arguments: tuple[str, ...]) -> None:
    """Prepare this process for forks of a program that starts with these arguments."""
    if module == "connectors.programs.gateway_program":
        warm_gateway()
    elif module == "connectors.cli" and arguments:
        warm_command(arguments[0])
