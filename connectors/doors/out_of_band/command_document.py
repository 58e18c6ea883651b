"""The XML document of a command (XP-11), written by the signer and read by the gateway; see `commands.xsd`.

    command_bytes(RemoveListener("search"), nonce="7c1f…", issued=now, key_id="0f3a…")
    read_command(body).action

The signature covers the document's bytes. So malformed XML is rejected instead of being repaired, and no text
may surround the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from lxml import etree  # type: ignore[import-untyped]

from connectors.plumbing.xml_wire.documents import XmlLimits, XmlRefused
from connectors.plumbing.xml_wire.safe_xml import repair
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.verdicts import MALFORMED

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
    """The command to add a listener.

    `fields` are the fields of the listener as in an entry of conf/organism.yaml. Fields with a default may be
    left out.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoveListener:
    """The command to remove the listener with the name `name`."""

    name: str


@dataclass(frozen=True)
class HotReload:
    """The command to read conf/organism.yaml again and to replace all listeners by those of the file."""


@dataclass(frozen=True)
class ListListeners:
    """The query for all active listeners. It changes nothing."""


@dataclass(frozen=True)
class GetStatus:
    """The query for the organism's version and its numbers of waiting and leased messages. Changes nothing."""


Action = AddListener | RemoveListener | HotReload | ListListeners | GetStatus
_EMPTY: Final[dict[str, type[HotReload | ListListeners | GetStatus]]] = {
    "hot-reload": HotReload,
    "list-listeners": ListListeners,
    "get-status": GetStatus,
}
_TAGS: Final = {kind: tag for tag, kind in _EMPTY.items()}


@dataclass(frozen=True)
class Command:
    """The content of a command's document. Do not trust it before the signature is checked.

    Attributes:
        nonce: A random text that is used once, so that a copied command cannot be carried out again.
        issued: The time of signing, with a time zone. Commands that are more than 300 s old are refused.
        key_id: The id of the key that has signed the document, as the document itself claims.
        action: The command itself.
    """

    nonce: str
    issued: datetime
    key_id: str
    action: Action


class CommandRefused(ValueError):
    """The document is no valid command. `reason` is `malformed` or `too_large`, and the message explains it."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def read_command(body: bytes) -> Command:
    """Parse a command's document and return its content. The signature is not checked here.

    Raises CommandRefused for a document that is too large, is not well-formed, has unsafe XML such as a DTD, or
    does not match `commands.xsd`.
    """
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
    """Return a command as an XML document in UTF-8, to sign and send.

    Args:
        action: The command.
        nonce: A random text that no other command has, such as `secrets.token_hex(16)`.
        issued: The current time, with a time zone.
        key_id: The id of the key that will sign the document, as `command_keys.key_id` returns it.

    Raises:
        ValueError: A text has a character that XML does not allow, such as a control character.
    """
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
