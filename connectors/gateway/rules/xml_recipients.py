"""Who gets an XML message: the listener that it names, or every one of its root tag that its sender sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from connectors.gateway.rules.hub_policy import is_known_recipient
from connectors.gateway.services.hub import Hub
from connectors.xml_wire.faults import Faulty
from schemas.fold.view_rows import ListenerRow

ROUTING: Final = "routing"


def recipients_of(
    hub: Hub, sender: str, to: str | None, root_tag: str, namespace: str | None, also: Sequence[str] = ()
) -> list[str]:
    """The names of those who get it. A sender that is a listener sees what it was given, and those of `also`.

    Raises Faulty: nobody of this name, or nobody for this tag. Who may not be seen does not exist.
    """
    sees = hub.listeners.row(sender)
    visible = None if sees is None or sees.visible_tools is None else {*sees.visible_tools, *also}
    if to is not None:
        is_there = visible is None or to in visible
        if is_there and is_known_recipient(hub.live_view, to):
            return [to]
        why = "nobody has the name that <to> says"
        raise Faulty(ROUTING, why, expected="a name that you were given, or no <to>")
    found = [
        row
        for row in hub.listeners.of_tag(root_tag)
        if row.listener != sender and (visible is None or row.listener in visible)
    ]
    fitting = [row.listener for row in found if namespace is None or row.namespace == namespace]
    if found and not fitting:
        wanted = " or ".join(sorted({_clark(row) for row in found}))
        raise Faulty(ROUTING, f"<{root_tag}> is known, but in another namespace", expected=wanted)
    if not fitting:
        raise Faulty(ROUTING, f"no listener takes <{root_tag}>", expected="a payload that a listener takes")
    return fitting


def is_listener(hub: Hub, name: str) -> bool:
    """Whether there is a listener of this name, or was: its mailbox is not another's to have."""
    return hub.listeners.row(name) is not None


def _clark(row: ListenerRow) -> str:
    return f'<{row.root_tag} xmlns="{row.namespace}">'
