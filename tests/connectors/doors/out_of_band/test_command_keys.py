"""Keys of commands: made once, believed only when nobody else could have put them there; and the vectors."""

from __future__ import annotations

import base64
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from connectors.doors.out_of_band.signed_commands import (
    CommandKey,
    ensure_operator_key,
    key_id,
    load_private_key,
    private_key_file,
    read_command,
    read_keys,
    sign,
)
from schemas.settings.settings import PROJECT_ROOT, Settings, SettingsError, XmlPumpSettings
from trunkline_agent.errors import UsageError
from trunkline_agent.mcp.signing import public_key_pem
from trunkline_agent.mcp.signing import public_pem as rsa_pem

pytestmark = pytest.mark.requirement("XP-11")
PAGE = (PROJECT_ROOT / "docs" / "how-to" / "use_the_xml_pump.md").read_text(encoding="utf-8")
BLOCK: dict[str, Any] = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[-1])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, xml_pump=XmlPumpSettings(command_keys_dir=tmp_path / "keys"))


@pytest.mark.parametrize("vector", BLOCK["vectors"], ids=lambda vector: vector["name"])
def test_the_vectors_of_the_page_hold(vector: dict[str, str]):
    private = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(BLOCK["seed"]))
    assert public_key_pem(private.public_key()) == BLOCK["public_key"]
    assert key_id(private.public_key()) == BLOCK["key_id"]
    body = vector["body"].encode()
    assert sign(private, body) == vector["signature"]
    key = CommandKey("test", BLOCK["key_id"], private.public_key())
    assert key.has_signed(body, vector["signature"])
    assert not key.has_signed(body + b" ", vector["signature"])
    assert read_command(body).key_id == BLOCK["key_id"]


def test_the_command_on_the_page_is_one():
    (block,) = [one for one in re.findall(r"```xml\n(.*?)```", PAGE, re.DOTALL) if "<command" in one]
    assert read_command(block.strip().encode()).key_id == BLOCK["key_id"]


def test_the_operators_pair_is_made_once_and_only_where_there_is_no_key(settings: Settings):
    folder = settings.command_keys_path
    ensure_operator_key(settings)
    private = load_private_key(private_key_file(settings))
    assert stat.S_IMODE(private_key_file(settings).stat().st_mode) == 0o600
    assert list(read_keys(folder).keys) == [key_id(private.public_key())]
    ensure_operator_key(settings)
    assert load_private_key(private_key_file(settings)).private_bytes_raw() == private.private_bytes_raw()
    # A gateway that was killed between the two files goes on.
    (folder / "operator.pub").unlink()
    ensure_operator_key(settings)
    assert list(read_keys(folder).keys) == [key_id(private.public_key())]
    # A folder with keys of its own gets no other.
    private_key_file(settings).unlink()
    (folder / "operator.pub").rename(folder / "ann.pub")
    ensure_operator_key(settings)
    assert [one.name for one in folder.iterdir()] == ["ann.pub"]


def test_a_folder_that_cannot_be_made_is_said_with_its_setting(settings: Settings):
    settings.command_keys_path.write_text("in the way")
    with pytest.raises(SettingsError, match=r"xml_pump\.command_keys_dir"):
        ensure_operator_key(settings)


def test_what_is_no_key_does_not_count_and_is_named(settings: Settings):
    folder = settings.command_keys_path
    ensure_operator_key(settings)
    good = public_key_pem(Ed25519PrivateKey.generate().public_key())
    (folder / "rsa.pub").write_text(rsa_pem(rsa.generate_private_key(public_exponent=65537, key_size=2048)))
    (folder / "text.pub").write_text("ssh-ed25519 AAAA")
    (folder / "private.pub").write_bytes(private_key_file(settings).read_bytes())
    (folder / "open.pub").write_text(good)
    (folder / "open.pub").chmod(0o666)
    (folder / "a b.pub").write_text(good)
    (folder / "folder.pub").mkdir()
    (folder / "notes.txt").write_text(good)
    found = read_keys(folder)
    assert [key.name for key in found.keys.values()] == ["operator"]
    assert set(found.faults) == {"rsa.pub", "text.pub", "private.pub", "open.pub", "a b.pub", "folder.pub"}
    folder.chmod(0o777)
    assert read_keys(folder).keys == {}
    assert read_keys(folder / "nowhere").keys == {}


def test_a_private_key_that_others_can_read_is_not_used(settings: Settings, tmp_path: Path):
    ensure_operator_key(settings)
    file = private_key_file(settings)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        load_private_key(file)
    file.chmod(0o600)
    file.write_text("SECRET, not a key")
    with pytest.raises(UsageError) as raised:
        load_private_key(file)
    assert "SECRET" not in str(raised.value)


def test_a_signature_has_one_notation():
    private = ed25519.Ed25519PrivateKey.generate()
    key, signature = CommandKey("test", "", private.public_key()), sign(private, b"body")
    assert key.has_signed(b"body", signature)
    # The last character has four bits that say nothing.
    same_bytes = f"{signature[:-3]}{chr(ord(signature[-3]) + 1)}=="
    assert base64.b64decode(same_bytes, validate=True) == base64.b64decode(signature)
    for other in (same_bytes, signature + "\n", f" {signature}", signature.rstrip("="), "ä", "=" * 88, ""):
        assert not key.has_signed(b"body", other), other
