"""Rotating keys by the command line and across gateways: what was made under the old key goes on."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from connectors.cli.keys import keys_command
from connectors.cli.main import main
from connectors.hub.services.conversations import child_thread
from connectors.hub.serving.identities import task_token
from connectors.plumbing.tls_keys.master_keys import activate, add_key, rotate
from connectors.programs.local_stack import LocalStack
from schemas.keys.sealing import Keyring, ensure_keyring, load_keyring, sealed_by
from schemas.settings.settings import Settings, SettingsError
from schemas.streams.principal.principals import token_hash
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.conftest import start_gateway
from tests.connectors.doors.http_api.hub_access import GatewayProcess
from tests.connectors.programs.local_stack.conftest import settings_in
from trunkline_agent.errors import NotFound, Refused, UsageError

__all__ = ["start_gateway"]

pytestmark = pytest.mark.requirement("CM-05")

Body = dict[str, Any]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    found = Settings(data_dir=tmp_path / "data")
    ensure_keyring(found)
    return found


def test_a_new_key_seals_and_the_old_ones_stay_in_a_private_file(settings: Settings) -> None:
    first = load_keyring(settings)
    sealed = first.seal(b"x", "p")
    rotate(settings)
    newest = rotate(settings)
    found = load_keyring(settings)
    assert found.active == newest and len(found.ids) == 3 and found.ids[0] == first.active
    assert found.open(sealed, "p") == b"x" and sealed_by(found.seal(b"x", "p")) == newest
    assert stat.S_IMODE(settings.key_file.stat().st_mode) == 0o600
    assert [one.active for one in found.each()] == [newest, found.ids[1], found.ids[0]]


def test_of_keys_that_are_added_at_once_none_is_lost(settings: Settings) -> None:
    with ThreadPoolExecutor(8) as pool:
        added = set(pool.map(lambda _: add_key(settings), range(16)))
    assert len(added) == 16 and added <= set(load_keyring(settings).ids)


def test_what_cannot_be_rotated_is_left_as_it_is(settings: Settings) -> None:
    before = settings.key_file.read_bytes()
    with pytest.raises(NotFound, match="there is no master key 'k0'"):
        activate(settings, "k0")
    given = settings.model_copy(update={"master_key": SecretStr(before.decode())})
    with pytest.raises(UsageError, match="TRUNKLINE__MASTER_KEY: change them there"):
        rotate(given)
    settings.key_file.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        rotate(settings)
    assert settings.key_file.read_bytes() == before


def test_tokens_and_threads_made_under_an_earlier_key_are_found_again() -> None:
    before = Keyring({"k1": bytes(32)}, "k1")
    after = Keyring({"k1": bytes(32), "k2": bytes(range(32))}, "k2")
    token = task_token(before, "t")
    assert task_token(after, "t", token_hash(token)[:12]) == token
    assert task_token(after, "t") != token
    assert task_token(after, "t", "ffffffffffff") == task_token(after, "t")
    assert child_thread(before, "p", "a", "b") == child_thread(after, "p", "a", "b")


@pytest.mark.stack
def test_the_command_lists_rotates_and_refuses_while_the_stack_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_in(tmp_path / "data")
    monkeypatch.setenv("TRUNKLINE__DATA_DIR", str(settings.data_dir))
    monkeypatch.setenv("TRUNKLINE_CONF", "/dev/null")
    with LocalStack(settings, ("mosquitto",)):
        ensure_keyring(settings)
        assert main(["keys", "rotate", "master"]) == Refused.exit_code
        assert "first 'trunkline down'" in capsys.readouterr().err
        assert main(["keys", "rotate", "master", "--add-only", "--json"]) == 0
        added = json.loads(capsys.readouterr().out)
        assert added["active"] is False
        assert main(["keys", "rotate", "master", "--activate", added["key_id"]]) == 0
    assert main(["keys", "rotate", "master"]) == 0
    capsys.readouterr()
    assert main(["keys", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["master"]
    assert [key["active"] for key in listed] == [False, False, True] and listed[1]["key_id"] == added["key_id"]
    text = settings.key_file.read_text()
    for key in json.loads(text)["keys"].values():
        assert key not in json.dumps(listed)


def test_an_agents_key_is_rotated_by_the_agents_command_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRUNKLINE__DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TRUNKLINE_CONF", "/dev/null")
    called: list[Any] = []
    monkeypatch.setattr("connectors.cli.agents.agents_command.rotate", lambda call: called.append(call) or 0)
    assert main(["keys", "rotate", "agent", "builder", "builder.pem", "--overlap", "2h"]) == 0
    (args,) = called
    assert (args.name, args.file, args.overlap, args.json) == ("builder", Path("builder.pem"), 7200.0, False)
    assert keys_command.__doc__ is not None


def posted(client: httpx.Client, path: str, body: Body, key: str) -> tuple[int, str | None, Body]:
    """Status, verdict and answer of a request under its key."""
    answer = client.post(path, json=body, headers={"Idempotency-Key": key})
    return answer.status_code, answer.headers.get("Trunkline-Verdict"), answer.json()


def test_requests_from_before_a_rotation_have_the_same_answers_and_secrets_after_it(
    backbone_settings: Settings, start_gateway: Callable[..., GatewayProcess]
) -> None:
    overlay = {"host": "mq.example", "port": 1883, "username": "u", "password": "secret word"}
    requests: list[tuple[str, Body, str]] = [
        ("/api/hub/jobs", {"description": "d", "broker": overlay}, "secret"),
        ("/api/hub/principals", {"principal": "ann", "role": "worker"}, "token"),
        ("/api/hub/agents/ann/mqtt", {}, "secret"),
        ("/api/hub/tasks", {"agent_name": "echo", "description": "wait"}, "token"),
    ]
    before = ensure_keyring(backbone_settings)
    gateway = start_gateway()
    with gateway.client() as client:
        wait_until(lambda: "echo" in client.get("/api/hub/agents").text, what="agents")
        first = [posted(client, path, body, f"k{n}") for n, (path, body, _) in enumerate(requests)]
        assert [status for status, _, _ in first] == [201] * len(requests), first
        client.post(f"/api/hub/tasks/{first[3][2]['task']['id']}/cancel", json={})
        job_id = posted(client, "/api/hub/jobs", {"description": "x", "session": "nobody"}, "k7")[2]["job_id"]
        rotated = posted(client, f"/api/hub/jobs/{job_id}/secret", {}, "k8")
    gateway.program.stop()
    rotate(backbone_settings)
    with start_gateway().client() as client:
        for n, (path, body, told) in enumerate(requests):
            status, verdict, answer = posted(client, path, body, f"k{n}")
            assert (status, verdict) == (201, "duplicate"), answer
            assert answer[told] == first[n][2][told]
        again = posted(client, f"/api/hub/jobs/{job_id}/secret", {}, "k8")
        assert (again[1], again[2]["secret"]) == ("duplicate", rotated[2]["secret"])
        once_more = posted(client, "/api/hub/jobs", {"description": "x", "session": "nobody"}, "k7")
        assert (once_more[1], once_more[2]["secret"]) == ("duplicate", rotated[2]["secret"])
        picked = client.post("/api/hub/jobs/pick", json={"session": "s"}).json()
        assert picked["secret"] == first[0][2]["secret"] and picked["broker"]["password"] == "secret word"
        fresh = posted(client, "/api/hub/jobs", {"description": "later"}, "k9")
        assert fresh[0] == 201
        with client.stream("GET", "/healthz") as answer:
            assert answer.status_code == 200
    assert load_keyring(backbone_settings).ids[0] == before.active
