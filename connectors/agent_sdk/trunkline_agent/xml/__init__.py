"""Sending to the XML door: an XML payload to the listeners of the XML pump. It needs the extra `[xml]`.

    from trunkline_agent import Credentials
    from trunkline_agent.xml import XmlSender

    with XmlSender(Credentials.load("builder.json")) as sender:
        sent = sender.send("shop", '<price xmlns="urn:example:shop:1"><article>lamp</article></price>')

The answers of the listeners come as messages into the mailbox of the agent.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trunkline_agent.extras import require_extra

if TYPE_CHECKING:
    from trunkline_agent.xml.sender import AsyncXmlSender, PostedXml, XmlSender

require_extra("xml")

__all__ = ["AsyncXmlSender", "PostedXml", "XmlSender"]
_MODULES = {"AsyncXmlSender": "sender", "PostedXml": "sender", "XmlSender": "sender"}


require_extra("xml")


def __getattr__(name: str) -> Any:
    """Import a public name of this package at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
