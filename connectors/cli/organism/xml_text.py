"""XML of agents on a terminal (CM-06): indented if it can be parsed, and always escaped."""

from __future__ import annotations

from typing import Final

from connectors.terminal.terminal_text import escaped
from connectors.xml_wire.faults import XmlRefused
from connectors.xml_wire.safe_xml import repair

_MARGIN: Final = "    "


def shown_xml(text: str) -> str:
    """Return `text` as indented lines, so that none of them looks like a line of the console."""
    from lxml import etree  # type: ignore[import-untyped]

    try:
        root = repair(text.encode("utf-8", "replace")).root
    except XmlRefused:
        lines = text.split("\n")
    else:
        etree.indent(root)
        lines = etree.tostring(root, encoding="unicode").split("\n")
    return "\n".join(_MARGIN + escaped(line) for line in lines)
