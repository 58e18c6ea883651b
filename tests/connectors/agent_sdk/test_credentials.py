"""Credentials: the file of an agent, the environment, and what neither shows."""

from __future__ import annotations

import json
import stat

import pytest

from trunkline_agent.credentials import Credentials, HubAccess, McpAccess, MqttAccess
from trunkline_agent.errors import NotFound, UsageError

WHOLE = Credentials(
    "builder",
    HubAccess("http://127.0.0.1:3200", "the-token"),
    MqttAccess("127.0.0.1", 1883, True, "agents", "the-secret"),
    McpAccess("http://127.0.0.1:3100", "-----BEGIN the-key"),
    "/somewhere/ca.pem",
)


def written(folder, document, mode=0o600):
    path = folder / "builder.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    path.chmod(mode)
    return path


@pytest.mark.requirement("AG-03")
def test_credentials_that_were_saved_are_loaded_alike(tmp_path):
    path = tmp_path / "builder.json"
    written(tmp_path, "an older one", 0o644)
    WHOLE.save(path)
    assert Credentials.load(path) == WHOLE and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    Credentials("x").save(path)
    found = Credentials.load(str(path))
    assert (found.hub, found.mqtt, found.mcp, found.ca_certs) == (None, None, None, None)


@pytest.mark.requirement("AG-03")
def test_a_relative_authority_is_beside_the_file(tmp_path):
    path = written(tmp_path, {"schema_version": 1, "name": "b", "ca_certs": "tls/ca.pem"})
    assert Credentials.load(path).ca_certs == str(tmp_path / "tls/ca.pem")


@pytest.mark.requirement("AG-03")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    path = written(tmp_path, {"schema_version": 1, "name": "b"}, mode)
    with pytest.raises(UsageError, match=f"chmod 600 {path}"):
        Credentials.load(path)


@pytest.mark.requirement("AG-03")
def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(NotFound, match="agents join"):
        Credentials.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="directory"):
        Credentials.load(tmp_path)
    with pytest.raises(UsageError):
        WHOLE.save(tmp_path / "none" / "x.json")


@pytest.mark.requirement("AG-03")
@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ("not json", "line 1 column 1"),
        ("[" * 100_000, "too deep"),
        ("[]", "expected a JSON object"),
        ({"name": "b"}, "schema_version is None"),
        ({"schema_version": 2, "name": "b"}, "schema_version is 2"),
        ({"schema_version": 1}, "name is missing"),
        ({"schema_version": 1, "name": "a/b"}, "not a name"),
        ({"schema_version": 1, "name": "b", "hub": "the-secret"}, "hub: expected an object"),
        ({"schema_version": 1, "name": "b", "hub": {"token": "the-secret"}}, "hub.url is missing"),
        (
            {"schema_version": 1, "name": "b", "hub": {"url": 1, "token": "the-secret"}},
            "hub.url: expected a string",
        ),
        (
            {"schema_version": 1, "name": "b", "mqtt": {"host": "h", "port": True, "secret": "the-secret"}},
            "mqtt.port",
        ),
        (
            {"schema_version": 1, "name": "b", "mqtt": {"host": "h", "port": 0, "secret": "the-secret"}},
            "not a port",
        ),
        ({"schema_version": 1, "name": "b", "mcp": {"url": "u"}}, "mcp.private_key is missing"),
    ],
)
def test_a_fault_is_named_with_its_place_and_without_a_secret(tmp_path, document, fault):
    path = written(tmp_path, document)
    with pytest.raises(UsageError, match="credentials file") as failed:
        Credentials.load(path)
    assert fault in str(failed.value) and "the-secret" not in str(failed.value)


@pytest.mark.requirement("AG-03")
def test_the_environment_names_a_file_or_the_hub(tmp_path):
    path = tmp_path / "builder.json"
    WHOLE.save(path)
    hub = {"TRUNKLINE_HUB_URL": "http://h:1", "TRUNKLINE_AGENT_TOKEN": "t"}
    assert Credentials.from_environment({"TRUNKLINE_CREDENTIALS": str(path), **hub}) == WHOLE
    assert Credentials.from_environment(hub) == Credentials("", HubAccess("http://h:1", "t"))
    more = {**hub, "TRUNKLINE_AGENT_NAME": "b", "TRUNKLINE_CA_CERTS": "ca.pem"}
    assert Credentials.from_environment(more) == Credentials(
        "b", HubAccess("http://h:1", "t"), ca_certs="ca.pem"
    )
    with pytest.raises(UsageError, match="TRUNKLINE_AGENT_TOKEN are not set"):
        Credentials.from_environment({"TRUNKLINE_HUB_URL": "http://h:1"})
    with pytest.raises(UsageError, match="TRUNKLINE_AGENT_NAME"):
        Credentials.from_environment({**hub, "TRUNKLINE_AGENT_NAME": "a b"})


@pytest.mark.requirement("AG-03")
def test_a_door_without_access_is_named():
    with pytest.raises(UsageError, match="'mqtt'"):
        Credentials("builder", WHOLE.hub).mqtt_access()
    assert WHOLE.hub_access() is WHOLE.hub and WHOLE.mcp_access() is WHOLE.mcp


@pytest.mark.requirement("AG-02")
def test_no_repr_shows_a_secret():
    shown = repr(WHOLE) + repr(WHOLE.hub) + repr(WHOLE.mqtt) + repr(WHOLE.mcp)
    assert "the-" not in shown and "builder" in shown
