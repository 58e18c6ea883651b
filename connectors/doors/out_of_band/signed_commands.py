"""Signed commands (XP-11): the XML document, see `commands.xsd`, and the Ed25519 keys that sign it.

    command_bytes(RemoveListener("search"), nonce="7c1f…", issued=now, key_id="0f3a…")
    read_command(body).action

The signature covers the document's bytes. So malformed XML is rejected instead of being repaired, and no text
may surround the document.

There is one public key per file `*.pub` in one folder. The owner of a private key may change the listeners. The
gateway makes the operator's pair of keys at its first start. A public key is valid as soon as it is put into
the folder, and invalid as soon as it is removed.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import structlog
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from lxml import etree  # type: ignore[import-untyped]

from connectors.plumbing.xml_wire.documents import XmlLimits, XmlRefused
from connectors.plumbing.xml_wire.safe_xml import repair
from schemas.settings.settings import Settings, SettingsError
from schemas.streams.principal.principals import OPERATOR
from trunkline_agent.errors import UsageError
from trunkline_agent.mcp.signing import private_key_pem, public_key_pem
from trunkline_agent.private_files import make_first, read_private
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.ids import is_name
from trunkline_agent.wire.signing import base64_bytes, key_id_of
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


log = structlog.stdlib.get_logger(__name__)

SIGNATURE_HEADER: Final = "X-Signature"
PUBLIC: Final = ".pub"
PRIVATE: Final = ".pem"
_FILE_BYTES: Final = 4096
_SIGNATURE_BYTES: Final = 64
_OF_OTHERS_TO_WRITE: Final = 0o022


@dataclass(frozen=True)
class CommandKey:
    """A public key whose commands the gateway accepts.

    Attributes:
        name: The name of its file without `.pub`. The ledger records it as the principal of a command.
        key_id: The id of the key, as `key_id` returns it.
        public: The key itself.
    """

    name: str
    key_id: str
    public: Ed25519PublicKey

    def has_signed(self, body: bytes, signature: str) -> bool:
        """Return whether `signature` is a valid signature of this key over the bytes `body`.

        Args:
            body: The signed bytes, exactly as they were received.
            signature: The signature in base64. Text that is no base64 gives False and raises nothing.
        """
        given = base64_bytes(signature)
        if given is None or len(given) != _SIGNATURE_BYTES:
            return False
        try:
            self.public.verify(given, body)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class KeyFolder:
    """The public keys in a folder.

    Attributes:
        keys: The accepted keys, by key id.
        faults: The reason why a `*.pub` file is not accepted, by file name.
    """

    keys: dict[str, CommandKey]
    faults: dict[str, str]


def ensure_operator_key(settings: Settings) -> None:
    """Create the operator's private and public key files if the folder has no public key at all.

    Otherwise nothing changes. Several gateways may call this at once: all of them end up with the same pair.
    Raises SettingsError if the files cannot be written or the operator's private key is unusable.
    """
    folder = settings.command_keys_path
    try:
        if any(folder.glob(f"*{PUBLIC}")):
            return
        private = private_key_file(settings)
        if not private.exists():
            make_first(private, private_key_pem(Ed25519PrivateKey.generate()))
        # This also completes a pair after a gateway was killed between the two files.
        make_first(folder / f"{OPERATOR}{PUBLIC}", public_key_pem(load_private_key(private).public_key()))
    except (OSError, UsageError) as error:
        why = str(error) if isinstance(error, UsageError) else type(error).__name__
        raise SettingsError(f"xml_pump.command_keys_dir: cannot make a key in {folder}: {why}") from None


def private_key_file(settings: Settings) -> Path:
    """Return the path of the operator's private key, whether or not the file exists."""
    return settings.command_keys_path / f"{OPERATOR}{PRIVATE}"


def read_keys(folder: Path) -> KeyFolder:
    """Read all public keys (`*.pub`) of a folder, and return them with the faults of unusable files.

    It never raises. A folder that cannot be read, or that others may write to, gives no keys and one fault. A
    file that others may write to is not accepted either.
    """
    keys: dict[str, CommandKey] = {}
    faults: dict[str, str] = {}
    try:
        if folder.stat().st_mode & _OF_OTHERS_TO_WRITE:
            return KeyFolder({}, {folder.name: "others can write to this folder, so no key in it is accepted"})
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(PUBLIC))
    except OSError as error:
        return KeyFolder({}, {folder.name: f"cannot be read: {error.strerror}"})
    for name in names:
        try:
            found = _command_key(folder / name)
        except ValueError as error:
            faults[name] = str(error)
            continue
        keys.setdefault(found.key_id, found)
    return KeyFolder(keys, faults)


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key from a PEM file that only its owner can read.

    Raises UsageError if the file is readable by others, cannot be read, or has no Ed25519 key without a
    password. The error shows none of the file's content.
    """
    try:
        key = serialization.load_pem_private_key(read_private(path), password=None)
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(f"{path} holds no private key in PEM, or one with a password") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds no Ed25519 key")
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """Return the id of a key: the first 16 hex digits of the SHA-256 of its DER (SubjectPublicKeyInfo)."""
    return key_id_of(public_key_pem(key))


def sign(key: Ed25519PrivateKey, body: bytes) -> str:
    """Return the signature of `key` over the bytes `body` in base64, to send in the header `X-Signature`."""
    return base64.b64encode(key.sign(body)).decode("ascii")


def _command_key(path: Path) -> CommandKey:
    """Return the key in a file. Raises ValueError with the reason why the key is not accepted."""
    name = path.name.removesuffix(PUBLIC)
    if not is_name(name):
        raise ValueError("its name is not valid in the ledger: use letters, digits, '.', '_', '-'")
    try:
        # O_NONBLOCK, because opening a pipe would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError("not a file")
            if mode & _OF_OTHERS_TO_WRITE:
                raise ValueError("others can write to it")
            key = serialization.load_pem_public_key(file.read(_FILE_BYTES))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnsupportedAlgorithm:
        raise ValueError("an unknown kind of key") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("not an Ed25519 key")
    return CommandKey(name, key_id(key), key)
