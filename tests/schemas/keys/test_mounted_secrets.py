"""Every reader of a secret, run as a user of its own, on files as a container's platform mounts them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from schemas.settings.settings import PROJECT_ROOT
from tests.odd_places import folder_of_another_user
from tests.programs import required_program, run_program

pytestmark = pytest.mark.requirement("OP-52")

USER, GROUP, OTHER = 123456, 54321, 123457
DENIED, OPEN = "cannot be read by this process", "is readable by others"
# Owner, group and mode of a file, and what a reader with USER and GROUP says of it: "" if it takes the file.
CASES = {
    "mounted": (0, GROUP, 0o440, ""),
    "mounted to write": (0, GROUP, 0o640, ""),
    "own": (USER, GROUP, 0o600, ""),
    "own to read": (USER, GROUP, 0o400, ""),
    "mounted for all": (0, GROUP, 0o644, OPEN),
    "mounted and group may write": (0, GROUP, 0o660, OPEN),
    "own and group may read": (USER, GROUP, 0o640, OPEN),
    "of another user": (OTHER, GROUP, 0o440, OPEN),
    "of root alone": (0, 0, 0o400, DENIED),
}
READERS = r"""
import argparse, json, os, sys
from pathlib import Path
from connectors.cli.shared.arguments import read_broker
from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token, read_token_file
from connectors.tools.job_tools.job_files import read_private
from connectors.plumbing.mqtt_link.broker_settings import load_role_passwords
from connectors.doors.out_of_band.signed_commands import load_private_key
from connectors.plumbing.tls_keys.tls_files import check_server_key
from schemas.integrity.audit_anchors import load_anchor_key
from schemas.settings.settings import check_key_file
from schemas.keys.record_macs import FILE_BRIDGE, load_mac_key
from schemas.keys.sealing import load_keyring
from schemas.settings.kafka_settings import read_password
from schemas.settings.settings import GatewaySettings, MqttSettings, Settings
from trunkline_agent.command.command_options import read_secret
from trunkline_agent.credentials import Credentials
from trunkline_agent.mcp.private_keys import AgentKey
from trunkline_agent.mqtt.mqtt_tls import mqtt_context

def broker(path):
    return read_broker(argparse.Namespace(broker_file=str(path), broker=None))

def gateway_token(path):
    return ensure_operator_token(Settings(gateway=GatewaySettings(operator_token_file=path)))

READERS = {
    "credentials.json": [Credentials.load],
    "rsa.pem": [lambda path: AgentKey(path).current()],
    "ed25519.pem": [load_anchor_key, load_private_key, check_server_key,
                    lambda path: check_key_file("gateway.", path, None)],
    "token": [read_secret, read_password, read_token_file, gateway_token,
              lambda path: read_private(path, "the secret")],
    "master.json": [lambda path: load_keyring(Settings(master_key_file=path))],
    "mac.json": [lambda path: load_mac_key(Settings(mac_key_file=path), FILE_BRIDGE)],
    "broker.json": [broker],
    "data/keys/mqtt.json": [lambda path: load_role_passwords(Settings(data_dir=path.parent.parent))],
    "tls.pem": [lambda path: mqtt_context(MqttSettings(tls=True, certfile=path))],
}
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))
said = {}
for folder in map(Path, sys.argv[3:]):
    for name, readers in READERS.items():
        for number, read in enumerate(readers):
            try:
                read(folder / name)
                text = ""
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            said.setdefault(folder.name, {})[f"{name} {number}"] = text
print(json.dumps(said))
"""
NODE = """
const { Credentials } = await import(process.argv[1]);
process.setgroups([]); process.setgid(Number(process.argv[3])); process.setuid(Number(process.argv[2]));
const said = {};
for (const folder of process.argv.slice(4)) {
  try {
    Credentials.load(`${folder}/credentials.json`);
    said[folder.split("/").at(-1)] = "";
  } catch (error) {
    said[folder.split("/").at(-1)] = `${error.message}; ${error.advice}`;
  }
}
console.log(JSON.stringify(said));
"""


def secrets() -> dict[str, str]:
    """The content of each file."""
    pem = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    small = rsa.generate_private_key(65537, 2048).private_bytes(*pem).decode()
    key = {"key": "A" * 43 + "=", "signer": "file", "master": "k1", "name": "k1:1/file"}
    return {
        "credentials.json": json.dumps(
            {"schema_version": 1, "name": "ann", "hub": {"url": "http://h:1", "token": "t"}}
        ),
        "rsa.pem": small,
        "ed25519.pem": ed25519.Ed25519PrivateKey.generate().private_bytes(*pem).decode(),
        "token": "0123456789abcdef0123456789abcdef\n",
        "master.json": json.dumps({"active": "k1", "keys": {"k1": "A" * 43 + "="}}),
        "mac.json": json.dumps(key),
        "broker.json": json.dumps({"host": "127.0.0.1", "password": "p"}),
        "data/keys/mqtt.json": json.dumps(dict.fromkeys(("operator", "bridge", "delegator"), "p" * 32)),
        "tls.pem": small,
    }


@pytest.fixture(scope="module")
def folders() -> Any:
    """A folder for each case, with each file in it."""
    texts = secrets()
    with folder_of_another_user() as top:
        for case, (owner, group, mode, _) in CASES.items():
            for name, text in texts.items():
                file = top / case / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
                os.chown(file, owner, group)
                file.chmod(mode)
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir())):
            folder.chmod(0o755)  # an earlier test may have set the umask of a stack
        yield [top / case for case in CASES]


def check(case: str, text: str, reader: str) -> None:
    """Check what a reader says of a file."""
    owner, group, mode, expected = CASES[case]
    if not expected:
        assert OPEN not in text and DENIED not in text, (case, reader, text)
        return
    assert expected in text and f"mode {mode:04o}, owner {owner}, group {group}" in text, (case, reader, text)
    assert ("chmod 600" if expected == OPEN else "as the owner") in text and "0440" in text, (
        case,
        reader,
        text,
    )


@pytest.mark.long
def test_each_reader_of_a_secret_takes_mounted_files_and_says_why_it_refuses_others(
    folders: list[Path],
) -> None:
    command = [sys.executable, "-c", READERS, str(USER), str(GROUP), *map(str, folders)]
    done = run_program(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRUNKLINE_CONF": os.devnull}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(CASES)
    for case, said in found.items():
        for reader, text in said.items():
            check(case, text, reader)
    taken = {reader for reader, text in found["mounted"].items() if not text}
    # Its file is no pair of a certificate and a key, so TLS refuses it later.
    assert set(found["mounted"]) - taken == {"tls.pem 0"}, found["mounted"]


@pytest.mark.node
def test_the_javascript_library_takes_mounted_credentials_by_the_same_rule(folders: list[Path]) -> None:
    library = PROJECT_ROOT / "connectors" / "agent_sdk" / "js" / "lib" / "credentials.js"
    node = required_program("nodejs", "node", "nodejs")
    command = [
        node,
        "--input-type=module",
        "--eval",
        NODE,
        library.as_uri(),
        str(USER),
        str(GROUP),
        *map(str, folders),
    ]
    done = run_program(command)
    assert done.returncode == 0, done.stderr
    for case, text in json.loads(done.stdout).items():
        check(case, text, "JavaScript")
