"""Signed commands over the Unix socket: what counts, what is refused, and what the ledger says of it."""

from __future__ import annotations

import base64
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from connectors.doors.out_of_band.signed_commands import (
    AddListener,
    GetStatus,
    HotReload,
    ListListeners,
    RemoveListener,
    key_id,
    sign,
)
from tests.broker_processes import wait_until
from tests.connectors.doors.out_of_band.conftest import CommandStack
from tests.connectors.doors.out_of_band.sample_handlers import MODULE, NAMESPACE
from trunkline_agent.mcp.signing import public_key_pem

ENVELOPE = "urn:trunkline:envelope:1"
pytestmark = pytest.mark.requirement("XP-11")


def test_the_socket_and_the_operators_key_are_its_owners_alone(stack: CommandStack):
    socket = stack.settings.command_socket
    assert stat.S_ISSOCK(socket.stat().st_mode)
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    keys = stack.settings.command_keys_path
    assert {one.name for one in keys.iterdir()} == {"operator.pem", "operator.pub"}
    assert stat.S_IMODE((keys / "operator.pem").stat().st_mode) == 0o600


def test_a_listener_is_added_with_what_its_handler_says_and_is_removed(stack: CommandStack):
    fields = {"name": "adder", "handler": f"{MODULE}:add", "capability": "adds", "timeout_s": 2.5, "tools": []}
    status, answer = stack.give(AddListener(fields))
    assert (status, answer["verdict"], answer["listener"]) == (200, "accepted", "adder")
    row = stack.listeners()["adder"]
    assert (row["root_tag"], row["namespace"], row["capability"]) == ("sum", NAMESPACE, "adds")
    assert (row["timeout_ms"], row["visible_tools"], row["concurrency"]) == (2500, [], 8)
    assert 'name="first"' in row["xsd"]
    assert "<sum" in row["example"]
    status, removed = stack.give(RemoveListener("adder"))
    assert (status, removed["verdict"], removed["pending"]) == (200, "accepted", 0)
    assert removed["version"] > answer["version"]
    assert "adder" not in stack.listeners()


@pytest.mark.requirement("XB-04")
def test_listeners_and_status_are_shown_to_a_signed_command_and_change_nothing(stack: CommandStack):
    name, before = stack.added(), len(stack.organism_log())
    body, signature = stack.command(ListListeners())
    status, answer = stack.post(body, signature)
    assert status == 200, answer
    rows = {row["listener"]: row for row in answer["listeners"]}
    assert rows.keys() == stack.listeners().keys() and rows[name]["waiting"] == 0
    assert not {"xsd", "example"} & rows[name].keys()
    assert stack.post(body, signature)[1]["reason"] == "replayed"
    status, told = stack.give(GetStatus())
    assert (status, told["version"], told["listeners"]) == (200, answer["version"], len(rows))
    assert (told["waiting"], told["leased"]) == (0, 0)
    forged = stack.command(GetStatus(), key=Ed25519PrivateKey.generate(), said_key=None)
    assert stack.post(*forged)[0] == 403
    assert len(stack.organism_log()) == before
    stack.give(RemoveListener(name))


def test_the_record_is_the_change_and_says_whose_key_it_was(stack: CommandStack):
    name = stack.added()
    (record,) = [one for one in stack.organism_log() if one.body.get("listener", {}).get("name") == name]
    assert (record.type, record.source) == ("listener.added", "commands/operator")


def test_a_replayed_command_is_refused_and_does_nothing_again(stack: CommandStack):
    name = stack.added()
    body, signature = stack.command(RemoveListener(name))
    assert stack.post(body, signature)[0] == 200
    assert stack.give(AddListener({"name": name, "type": "human"}))[0] == 200
    status, answer = stack.post(body, signature)
    assert (status, answer["reason"]) == (403, "replayed")
    assert name in stack.listeners()
    refusal = stack.wait_refused("sent before")
    assert (refusal["reason"], refusal["principal"]) == ("unauthorized", "operator")


def test_a_nonce_is_good_for_one_command_whatever_it_says(stack: CommandStack):
    name = stack.added()
    assert stack.give(RemoveListener(name), nonce=f"once-{name}")[0] == 200
    status, answer = stack.give(AddListener({"name": name, "type": "human"}), nonce=f"once-{name}")
    assert (status, answer["reason"]) == (403, "replayed")
    assert name not in stack.listeners()


def test_a_key_counts_while_its_file_is_in_the_folder(stack: CommandStack):
    name, key = stack.added(), Ed25519PrivateKey.generate()
    status, answer = stack.give(RemoveListener(name), key=key)
    assert (status, answer["reason"]) == (403, "unauthorized")
    assert stack.wait_refused("unknown key")["principal"] == "anonymous"
    file = stack.settings.command_keys_path / "ann.pub"
    file.write_text(public_key_pem(key.public_key()))
    file.chmod(0o644)
    assert stack.give(RemoveListener(name), key=key)[0] == 200
    assert [one for one in stack.organism_log() if one.body.get("name") == name][-1].source == "commands/ann"
    file.chmod(0o666)
    assert stack.give(AddListener({"name": name, "type": "human"}), key=key)[0] == 403
    file.unlink()
    assert stack.give(AddListener({"name": name, "type": "human"}), key=key)[0] == 403


def test_a_forged_command_is_refused_and_does_nothing(stack: CommandStack):
    name = stack.added()
    body, signature = stack.command(RemoveListener(name))
    stranger = Ed25519PrivateKey.generate()
    other = stack.command(RemoveListener(stack.added()))[0]
    raw = base64.b64decode(signature)
    for given in (
        sign(stranger, body),
        None,
        "",
        "no base64",
        signature.rstrip("="),
        base64.b64encode(bytes([raw[0] ^ 1, *raw[1:]])).decode(),
        base64.b64encode(raw + b"\0").decode(),
        f"{signature[:10]} {signature[10:]}",
    ):
        status, answer = stack.post(body, given)
        assert (status, answer["reason"]) == (403, "unauthorized"), given
    assert stack.post(other, signature)[0] == 403
    assert stack.post(body.replace(name.encode(), b"somebody"), signature)[0] == 403
    assert name in stack.listeners()
    refusal = stack.wait_refused("signature")
    assert (refusal["reason"], refusal["principal"], refusal["route"]) == (
        "unauthorized",
        "anonymous",
        "POST /commands",
    )


def test_the_key_that_a_command_names_must_have_signed_it(stack: CommandStack):
    name, key = stack.added(), Ed25519PrivateKey.generate()
    said = key_id(stack.operator_key.public_key())
    assert stack.give(RemoveListener(name), key=key, said_key=said)[0] == 403
    assert name in stack.listeners()


@pytest.mark.parametrize("late_s", [301.0, 3600.0, -302.0], ids=["stale", "old", "ahead"])
def test_a_command_of_another_time_is_refused(stack: CommandStack, late_s: float):
    name = stack.added()
    status, answer = stack.give(RemoveListener(name), late_s=late_s)
    assert (status, answer["reason"]) == (403, "unauthorized")
    assert name in stack.listeners()
    assert stack.wait_refused("issued ")["principal"] == "operator"


@pytest.mark.parametrize("late_s", [295.0, -295.0], ids=["late", "early"])
def test_clocks_may_differ_by_less_than_five_minutes(stack: CommandStack, late_s: float):
    assert stack.give(RemoveListener(stack.added()), late_s=late_s)[0] == 200


_COMMAND = (
    '<command xmlns="urn:trunkline:commands:1" nonce="n" issued="2026-01-01T00:00:00Z" key="0123456789abcdef">'
)
_BAD = {
    "nothing": b"",
    "no XML": b"remove everything",
    "JSON": b'{"command": "hot-reload"}',
    "another root": b"<remove-listener name='x'/>",
    "no namespace": b"<command nonce='n'><hot-reload/></command>",
    "DOCTYPE": f"<!DOCTYPE command>{_COMMAND}<hot-reload/></command>".encode(),
    "an entity": f'<!DOCTYPE c [<!ENTITY e SYSTEM "file:///etc/passwd">]>{_COMMAND}<hot-reload/></command>'.encode(),
    "unfinished": f"{_COMMAND}<hot-reload/>".encode(),
    "no command in it": f"{_COMMAND}</command>".encode(),
    "two commands": f"{_COMMAND}<hot-reload/><hot-reload/></command>".encode(),
    "an unknown command": f"{_COMMAND}<shut-down/></command>".encode(),
    "an unknown attribute": f'{_COMMAND}<hot-reload now="yes"/></command>'.encode(),
    "a name with a path": f'{_COMMAND}<remove-listener name="../x"/></command>'.encode(),
    "a comment": f"{_COMMAND}<!-- x --><hot-reload/></command>".encode(),
    "no such day": f"{_COMMAND}<hot-reload/></command>".replace("01-01", "02-30").encode(),
    "a number beyond all": f'{_COMMAND}<add-listener name="x" concurrency="{"9" * 5000}"/></command>'.encode(),
    "deep": (_COMMAND + "<a>" * 200 + "</a>" * 200 + "</command>").encode(),
    "no UTF-8": _COMMAND.encode() + b"\xff<hot-reload/></command>",
}


@pytest.mark.parametrize("what", _BAD)
def test_what_is_no_command_is_refused_before_anybody_looks_at_its_signature(stack: CommandStack, what: str):
    before = stack.version()
    status, answer = stack.post(_BAD[what], sign(stack.operator_key, _BAD[what]))
    assert (status, answer["reason"]) in ((400, "malformed"), (413, "too_large"))
    assert "passwd" not in str(answer)
    assert stack.version() == before


def test_an_oversized_command_is_refused_and_recorded(stack: CommandStack):
    body, _ = stack.command(AddListener({"name": "huge", "type": "human", "capability": "x" * 200_000}))
    status, answer = stack.post(body, sign(stack.operator_key, body))
    assert (status, answer["reason"]) == (413, "too_large")
    assert stack.wait_refused("bytes")["reason"] == "too_large"


def test_refusals_are_recorded_at_a_bounded_rate(stack: CommandStack):
    def recorded() -> int:
        return len([one for one in stack.refusals() if one["reason"] == "malformed"])

    before = recorded()
    for _ in range(20):
        assert stack.post(b"<flood/>", None)[0] == 400
    # Five at once, and then one every ten seconds.
    assert 0 < wait_until(recorded, what="a refusal") <= before + 8


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "x", "handler": f"{MODULE}:not_a_handler"}, "not a handler"),
        ({"name": "x", "handler": "no_such_module:f"}, "cannot import"),
        ({"name": "x", "handler": f"{MODULE}:add", "root_tag": "other"}, "root_tag"),
        ({"name": "x", "handler": f"{MODULE}:add", "namespace": "urn:other"}, "namespace"),
        ({"name": "x"}, "handler"),
        ({"name": "x", "type": "llm"}, "client"),
        ({"name": "x", "handler": "os.system('x')"}, "handler"),
        ({"name": "x", "type": "human", "concurrency": 100_000}, "concurrency"),
    ],
    ids=["no handler", "no module", "tag", "namespace", "none", "llm", "code", "concurrency"],
)
def test_a_listener_that_cannot_be_is_refused_with_what_to_do(
    stack: CommandStack, fields: dict[str, object], said: str
):
    status, answer = stack.give(AddListener(fields))
    assert (status, answer["reason"]) == (409, "illegal_transition")
    assert said in answer["message"]
    assert "x" not in stack.listeners()


def test_a_name_that_is_somebody_elses_is_refused(stack: CommandStack):
    with stack.operator() as client:
        assert (
            client.post("/api/hub/principals", json={"principal": "bob", "role": "worker"}).status_code == 201
        )
    wait_until(lambda: stack.give(AddListener({"name": "bob", "type": "human"}))[0] == 403, what="bob is known")
    assert "bob" not in stack.listeners()
    assert stack.wait_refused("listener bob")["reason"] == "policy"
    status, answer = stack.give(AddListener({"name": "operator", "type": "human"}))
    assert (status, answer["reason"]) == (409, "illegal_transition")


def test_a_listener_is_added_once_and_one_that_is_not_there_cannot_be_removed(stack: CommandStack):
    name = stack.added()
    status, answer = stack.give(AddListener({"name": name, "type": "human"}))
    assert (status, answer["reason"]) == (409, "illegal_transition")
    status, answer = stack.give(RemoveListener("nobody"))
    assert (status, answer["reason"]) == (404, "unknown_stream")


def test_a_reload_of_what_is_no_organism_changes_nothing(stack: CommandStack):
    name, file = stack.added(), stack.folder / "organism.yaml"
    assert stack.give(HotReload())[0] == 409
    file.write_text("listeners: [{name: a, handlr: 'b:c'}]\n")
    status, answer = stack.give(HotReload())
    assert (status, answer["reason"]) == (409, "illegal_transition")
    assert "listeners, a, handlr" in answer["message"]
    file.unlink()
    assert name in stack.listeners()


def test_nothing_else_is_served_there_and_no_command_on_the_hubs_port(stack: CommandStack):
    body, signature = stack.command(HotReload())
    with stack.operator() as client:
        answer = client.post("/commands", content=body, headers={"X-Signature": signature})
    assert answer.status_code == 404


@pytest.mark.parametrize("tag", ["add-listener", "remove-listener", "hot-reload"])
@pytest.mark.parametrize("namespace", ["urn:trunkline:commands:1", ""], ids=["ours", "none"])
def test_a_privileged_tag_on_the_main_way_is_an_unknown_tag(stack: CommandStack, tag: str, namespace: str):
    name = stack.added()
    before = stack.version()
    payload = f'<{tag} xmlns="{namespace}" name="{name}"/>'
    document = f'<message xmlns="{ENVELOPE}">{payload}</message>'
    with stack.operator() as client:
        answer = client.post("/messages", content=document, headers={"Content-Type": "application/xml"})
    assert answer.status_code == 422
    assert "<huh" in answer.text
    assert stack.version() == before
    assert name in stack.listeners()
