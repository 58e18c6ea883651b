"""The recipients of an XML message: the one named in `<to>`, or all visible listeners of its root tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from connectors.hub.services.hub import Hub
from connectors.operations.rules.hub_policy import is_known_recipient
from connectors.plumbing.xml_wire.documents import Faulty
from schemas.streams.control.organism import ListenerRow

ROUTING: Final = "routing"


def recipients_of(
    hub: Hub, sender: str, to: str | None, root_tag: str, namespace: str | None, also: Sequence[str] = ()
) -> list[str]:
    """Return the names of the mailboxes that an XML message goes to. The list is never empty.

    Args:
        hub: The hub.
        sender: The name of the sender. A listener that declares `visible_tools` can write only to the listeners
            named there.
        to: The recipient named in `<to>`. None means all active listeners of the root tag, except the sender.
        root_tag: The root tag of the payload.
        namespace: The XML namespace that the listeners must have; None for any. It is ignored if `to` is given.
        also: Further names that a sender with `visible_tools` can write to.

    Raises:
        Faulty: No recipient has the name `to`, the sender may not write to it, or no listener takes this root
            tag. The error says what would be right.
    """
    sees = hub.listeners.row(sender)
    visible = None if sees is None or sees.visible_tools is None else {*sees.visible_tools, *also}
    if to is not None:
        is_there = visible is None or to in visible
        if is_there and is_known_recipient(hub.live_view, to):
            return [to]
        why = "no recipient has the name in <to>"
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


def _clark(row: ListenerRow) -> str:
    return f'<{row.root_tag} xmlns="{row.namespace}">'
