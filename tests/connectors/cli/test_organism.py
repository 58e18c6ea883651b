"""`trunkline organism`: what it shows, what it signs, and what it says when it is refused (XP-11)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from connectors.cli.main import COMMANDS
from schemas.settings.settings import Settings
from tests.connectors.cli.conftest import CommandLine
from tests.connectors.doors.out_of_band.conftest import CommandStack, running_commands
from tests.connectors.doors.out_of_band.sample_handlers import MODULE, NAMESPACE

__all__ = ["running_commands"]

pytestmark = pytest.mark.requirement("XP-11")


@pytest.fixture
def hub_settings(stack: CommandStack) -> Settings:
    """The settings of the stack's own gateway."""
    return stack.gateways[-1].settings


def test_a_listener_is_added_shown_and_removed(trunkline: CommandLine):
    done = trunkline.call("organism", "add-listener", "adder", "--handler", f"{MODULE}:add", "--tool", "book")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("listener adder is there; version ")
    shown = trunkline.call("organism", "show")
    assert shown.returncode == 0
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("adder ")]
    for word in ("handler", "<sum>", NAMESPACE, "book", "8"):
        assert word in line
    told = json.loads(trunkline.call("organism", "show", "--json").stdout)
    assert [row["listener"] for row in told["listeners"]] == ["adder"]
    # The same over the socket, without a token.
    listed = json.loads(trunkline.call("organism", "list-listeners", "--json").stdout)
    assert [row["listener"] for row in listed["listeners"]] == ["adder"]
    assert "adder" in trunkline.call("organism", "list-listeners").stdout
    assert "1 listeners, 0 messages wait, 0 are handled" in trunkline.call("organism", "get-status").stdout
    gone = trunkline.call("organism", "remove-listener", "adder")
    assert (gone.returncode, gone.stderr) == (0, "")
    assert gone.stdout.startswith("listener adder is gone, 0 messages go back to their senders; version ")
    assert trunkline.call("organism", "show").returncode == 3
    assert "adder" in trunkline.call("organism", "show", "--removed").stdout


def test_every_option_of_a_listener_arrives(trunkline: CommandLine, stack: CommandStack):
    answer = trunkline.call(
        *("organism", "add-listener", "thinker", "--type", "llm", "--root-tag", "think", "--json"),
        *("--namespace", "urn:example:think:1", "--model", "small", "--client", "my_clients:one"),
        *("--system-prompt", "Be <brief> & kind.\nAlways.", "--capability", "thinks", "--no-tools"),
        *("--concurrency", "2", "--per-minute", "30", "--tokens-per-minute", "500", "--timeout", "1.5"),
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["listener"] == "thinker"
    row = stack.listeners()["thinker"]
    assert json.loads(row["options"]) == {
        "client": "my_clients:one",
        "model": "small",
        "system_prompt": "Be <brief> & kind.\nAlways.",
    }
    said = ("root_tag", "namespace", "capability", "visible_tools", "concurrency", "per_minute")
    assert [row[name] for name in said] == ["think", "urn:example:think:1", "thinks", [], 2, 30]
    assert (row["tokens_per_minute"], row["timeout_ms"]) == (500, 1500)
    assert trunkline.call("organism", "remove-listener", "thinker").returncode == 0


def test_the_file_is_loaded_again(trunkline: CommandLine, stack: CommandStack):
    file = stack.folder / "organism.yaml"
    file.write_text("listeners: [{name: ann, type: human}]\n")
    done = trunkline.call("organism", "reload")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 listeners are loaded; version ")
    file.write_text("listeners: [{name: ann, typ: human}]\n")
    refused = trunkline.call("organism", "reload")
    assert refused.returncode == 4
    assert "listeners, ann, typ" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("remove-listener", "nobody"), 3, "there is no listener of this name"),
        (("add-listener", "x"), 4, "handler: a listener needs one"),
        (("add-listener", "x", "--handler", "no_such_module:f"), 4, "cannot import no_such_module"),
        (("add-listener", "operator", "--type", "human"), 4, "a name that the programs use"),
        (("add-listener", "a/b", "--type", "human"), 2, "not the name of a listener"),
        (("add-listener", "x", "--type", "human", "--capability", "\x00"), 2, "cannot be in a command"),
        (("add-listener", "x", "--tool", "a", "--no-tools"), 2, "not both"),
        (("remove-listener", "x", "--key", "no-such-file.pem"), 2, "cannot read the key"),
    ],
    ids=["no listener", "no handler", "no module", "reserved", "no name", "no XML", "both", "no key"],
)
def test_a_refusal_says_why_and_has_its_exit_code(
    trunkline: CommandLine, arguments: tuple[str, ...], code: int, said: str
):
    done = trunkline.call("organism", *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stdout == ""


def test_another_key_counts_only_when_it_is_in_the_folder(trunkline: CommandLine, tmp_path: Path):
    private = tmp_path / "ann.pem"
    private.touch(mode=0o600)
    private.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    refused = trunkline.call("organism", "reload", "--key", str(private))
    assert refused.returncode == 4
    assert "unknown key: it is not among the accepted command keys" in refused.stderr
    private.chmod(0o644)
    assert "chmod 600" in trunkline.call("organism", "reload", "--key", str(private)).stderr


def test_the_keys_are_listed_without_a_gateway(trunkline: CommandLine, stack: CommandStack):
    bad = stack.settings.command_keys_path / "bob.pub"
    bad.write_text("no key")
    done = trunkline.call("organism", "keys")
    bad.unlink()
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[1].split()[0] == "operator"
    assert any(line.startswith("bob.pub holds no valid key") for line in lines)
    told = json.loads(trunkline.call("organism", "keys", "--json").stdout)
    assert [key["name"] for key in told["keys"]] == ["operator"]
    assert "PRIVATE" not in str(told)


def test_without_a_gateway_it_says_where_it_looked(stack: CommandStack, tmp_path: Path):
    pump = stack.settings.xml_pump.model_copy(
        update={"command_socket": tmp_path / "none.sock", "command_keys_dir": stack.settings.command_keys_path}
    )
    elsewhere = CommandLine(stack.settings.model_copy(update={"xml_pump": pump}))
    done = elsewhere.call("organism", "reload")
    assert done.returncode == 5
    assert str(tmp_path / "none.sock") in done.stderr
    assert "'trunkline up' starts it" in done.stderr


def test_its_help_teaches(trunkline: CommandLine):
    assert {"organism", "console"} <= set(COMMANDS)
    done = trunkline.call("organism", "--help")
    for action in ("show", "add-listener", "remove-listener", "reload", "keys"):
        assert action in done.stdout
        assert "example: trunkline organism" in trunkline.call("organism", action, "--help").stdout


@pytest.mark.requirement("XP-15")
def test_an_xml_document_is_sent_or_told_what_would_be_right(
    trunkline: CommandLine, stack: CommandStack, tmp_path: Path
):
    person = stack.added()
    envelope = (
        '<message xmlns="urn:trunkline:envelope:1"><to>{}</to><note xmlns="urn:x:1">soup</note></message>'
    )
    file = tmp_path / "note.xml"
    file.write_text(envelope.format(person))
    first = trunkline.call("messages", "xml", str(file), "--request-id", "once", "--json")
    again = trunkline.call("messages", "xml", str(file), "--request-id", "once", "--json")
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert list(told["messages"]) == [person]
    assert json.loads(again.stdout) == told
    named = trunkline.call("messages", "xml", str(file), "--as", person)
    assert (named.returncode, f"waits for {person}" in named.stdout) == (0, True)
    with stack.operator() as client:
        found = client.get(f"/api/hub/mailboxes/default/{person}").json()["messages"]
    assert sorted(row["sender"] for row in found) == ["operator", person]
    file.write_text(envelope.format("nobody"))
    huh = trunkline.call("messages", "xml", str(file))
    assert huh.returncode == 4
    assert "<huh" in huh.stdout
    assert "it was not understood" in huh.stderr
    file.write_text("<!DOCTYPE a><a/>")
    assert trunkline.call("messages", "xml", str(file)).returncode == 2
    assert trunkline.call("messages", "xml", str(tmp_path / "none.xml")).returncode == 2
    assert trunkline.call("messages", "xml", str(file), "--as", "nobody").returncode == 4
