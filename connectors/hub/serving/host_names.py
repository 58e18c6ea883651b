"""The host names under which a door answers, for its check of the header `Host`.

A page of another site may reach a loopback port under a name that resolves to it (DNS rebinding), so a door
answers under known names alone. Names are equal whatever their case, and with or without the dot of the DNS
root at their end (RFC 9110, section 4.2.3; RFC 3986, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
NOT_KNOWN: Final = "name it in the setting gateway.host_names"
"""The advice for a request under a name that the door does not know."""
_SHOWN_CHARACTERS: Final = 100


def name_and_port(host: str) -> tuple[str, str]:
    """Return the name and the port of a header `Host`: the name in lower case, and an empty text for no port.

    An IPv6 address keeps its brackets. A text that is no such header gives a name that no door has.
    """
    name, colon, port = host.rpartition(":")
    if not colon or "]" in port:
        name, port = host, ""
    return name.lower().removesuffix("."), port


class HostNames:
    """A set of host names.

    Args:
        names: Names and addresses without ports. An IPv6 address may lack its brackets.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(
            name_and_port(f"[{name}]" if ":" in name and not name.startswith("[") else name)[0]
            for name in names
            if name
        )

    def __contains__(self, name: str) -> bool:
        """Return whether the set has a name, which `name_and_port` returned."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, sorted."""
        return iter(sorted(self._names))


def shown(host: str) -> str:
    """Return a header `Host` for an error text: quoted, and cut after 100 characters."""
    return repr(host[:_SHOWN_CHARACTERS])
