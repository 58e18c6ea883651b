"""The XML document of a command (XP-11), written by the signer and read by the gateway; see `commands.xsd`.

    command_bytes(RemoveListener("search"), nonce="7c1f…", issued=now, key_id="0f3a…")
    read_command(body).action

The signature covers the document's bytes. So a command is never repaired, and nothing may surround it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from lxml import etree  # type: ignore[import-untyped]

from connectors.terminal.terminal_text import escaped
from connectors.xml_wire.faults import XmlLimits, XmlRefused
from connectors.xml_wire.safe_xml import repair
from schemas.wire.verdicts import MALFORMED

NAMESPACE: Final = "urn:trunkline:commands:1"
COMMAND_BYTES: Final = 128 * 1024
_LIMITS: Final = XmlLimits(document_bytes=COMMAND_BYTES, depth=8)
_SCHEMA: Final = etree.XMLSchema(etree.parse(str(Path(__file__).with_name("commands.xsd"))))
_WHY_CHARACTERS: Final = 300
# Fields that are attributes of add-listener. `tools` and `system_prompt` are elements.
_TEXTS: Final = ("name", "type", "capability", "root_tag", "namespace", "handler", "model", "client")
_NUMBERS: Final = ("concurrency", "per_minute", "tokens_per_minute")
_ATTRIBUTES: Final = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(_NUMBERS, int), "timeout_s": float}
_TOOLS, _PROMPT = "tools", "system_prompt"


@dataclass(frozen=True)
class AddListener:
    """Add a listener. `fields` are the fields of an entry of conf/organism.yaml that are given."""

    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoveListener:
    """Remove the listener of this name."""

    name: str


@dataclass(frozen=True)
class HotReload:
    """Read conf/organism.yaml again."""


@dataclass(frozen=True)
class ListListeners:
    """List the listeners. Changes nothing."""


@dataclass(frozen=True)
class GetStatus:
    """Show the organism's version and the number of messages that wait and are leased. Changes nothing."""


Action = AddListener | RemoveListener | HotReload | ListListeners | GetStatus
_EMPTY: Final[dict[str, type[HotReload | ListListeners | GetStatus]]] = {
    "hot-reload": HotReload,
    "list-listeners": ListListeners,
    "get-status": GetStatus,
}
_TAGS: Final = {kind: tag for tag, kind in _EMPTY.items()}


@dataclass(frozen=True)
class Command:
    """The content of a document, not to be trusted before the signature is checked."""

    nonce: str
    issued: datetime
    key_id: str
    action: Action


class CommandRefused(ValueError):
    """The document is no command. `reason` is `malformed` or `too_large`; the text says why."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def read_command(body: bytes) -> Command:
    """Return the command in a document. Raises CommandRefused."""
    try:
        repaired = repair(body, _LIMITS, root_tag="command")
    except XmlRefused as error:
        raise CommandRefused(error.reason, str(error)) from None
    if repaired.notes:
        raise CommandRefused(
            MALFORMED, f"a command is not repaired: {'; '.join(repaired.notes)}"[:_WHY_CHARACTERS]
        )
    root = repaired.root
    if not _SCHEMA.validate(root):
        said = escaped(str(_SCHEMA.error_log.last_error.message))[:_WHY_CHARACTERS]
        raise CommandRefused(MALFORMED, f"does not match commands.xsd: {said}")
    try:
        issued = datetime.fromisoformat(root.get("issued"))
    except ValueError:
        raise CommandRefused(MALFORMED, "issued: not a valid time") from None
    return Command(root.get("nonce"), issued, root.get("key"), _action(root[0]))


def command_bytes(action: Action, *, nonce: str, issued: datetime, key_id: str) -> bytes:
    """Return the document to sign and send. Raises ValueError for a text that XML cannot hold."""
    root = etree.Element(f"{{{NAMESPACE}}}command", nsmap={None: NAMESPACE})
    root.set("nonce", nonce)
    root.set("issued", issued.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z")
    root.set("key", key_id)
    if isinstance(action, AddListener):
        _write_listener(etree.SubElement(root, f"{{{NAMESPACE}}}add-listener"), action.fields)
    elif isinstance(action, RemoveListener):
        etree.SubElement(root, f"{{{NAMESPACE}}}remove-listener").set("name", action.name)
    else:
        etree.SubElement(root, f"{{{NAMESPACE}}}{_TAGS[type(action)]}")
    return bytes(etree.tostring(root, encoding="utf-8"))


def _action(element: Any) -> Action:
    tag = etree.QName(element).localname
    if tag == "remove-listener":
        return RemoveListener(element.get("name"))
    return AddListener(_fields(element)) if tag == "add-listener" else _EMPTY[tag]()


def _fields(element: Any) -> dict[str, Any]:
    said = {name.replace("-", "_"): value for name, value in element.attrib.items()}
    found: dict[str, Any] = {name: read(said[name]) for name, read in _ATTRIBUTES.items() if name in said}
    for child in element:
        if etree.QName(child).localname == _TOOLS:
            found[_TOOLS] = [tool.text for tool in child]
        else:
            found[_PROMPT] = child.text or ""
    return found


def _write_listener(element: Any, fields: Mapping[str, Any]) -> None:
    for name in _ATTRIBUTES:
        if fields.get(name) is not None:
            element.set(name.replace("_", "-"), str(fields[name]))
    if fields.get(_TOOLS) is not None:
        tools = etree.SubElement(element, f"{{{NAMESPACE}}}tools")
        for name in fields[_TOOLS]:
            etree.SubElement(tools, f"{{{NAMESPACE}}}tool").text = name
    if fields.get(_PROMPT) is not None:
        etree.SubElement(element, f"{{{NAMESPACE}}}system-prompt").text = fields[_PROMPT]
