"""The floors of `connectors`: which there are, and that imports lead downwards only."""

from __future__ import annotations

from tests.source_files import python_files
from tests.test_architecture import LIBRARY, imported_modules, module_files, offenders

FLOORS = ("cli", "tools", "programs", "doors", "operations", "hub", "log", "plumbing")
"""The floors, from the top. Beside them is the project of the library."""


def place(module: str) -> tuple[int, str] | None:
    """The floor of a module of `connectors`, and its door if it is part of one."""
    parts = module.split(".")
    if parts[0] != "connectors" or len(parts) < 3:
        return None
    return FLOORS.index(parts[1]), parts[2] if parts[1] == "doors" else ""


def climbs(module: str, imported: str) -> bool:
    """Tell whether an import leads to a floor above, or from one door to another."""
    upper, lower = place(module), place(imported)
    if upper is None or lower is None:
        return False
    return lower[0] < upper[0] or (lower[0] == upper[0] and lower[1] != upper[1])


def test_connectors_has_its_floors_and_the_library_and_nothing_else() -> None:
    folders = {path.parts[1] for path in python_files("connectors") if len(path.parts) > 2}
    assert folders == {*FLOORS, LIBRARY.name}


def test_a_floor_imports_floors_below_it_only_and_a_door_no_other_door() -> None:
    found = [(module, other) for module in module_files() for other in sorted(imported_modules(module))]
    assert any(place(module) and place(other) for module, other in found)
    offenders(f"{module} imports {other}" for module, other in found if climbs(module, other))
