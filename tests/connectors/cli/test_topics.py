"""`trunkline topics` as a user runs it, against a real gateway (DL-24)."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.cli.main import main
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from tests.broker_processes import wait_until
from tests.connectors.cli.conftest import CommandLine, json_of

pytestmark = pytest.mark.requirement("DL-24")


@pytest.mark.kafka
def test_a_message_is_published_to_who_is_subscribed(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    token = hub.post(path_of("principals"), {"principal": "bo", "role": "worker"})["token"]
    assert "operator is subscribed to news" in trunkline.call("topics", "subscribe", "news").stdout
    assert trunkline.json("topics", "subscribe", "news", TRUNKLINE_TOKEN=token)["subscriber"] == "bo"
    file = tmp_path / "menu.json"
    file.write_text('{"soup": "hot"}')
    about = ("--priority", "high", "--expires", "1h", "--thread", "t1")
    sent = trunkline.json("topics", "publish", "news", "note", f"@{file}", *about)
    assert (sent["recipients"], sent["topic"]) == (2, "news")
    drained = trunkline.json("messages", "drain", "--wait", "20s", TRUNKLINE_TOKEN=token)
    (message,) = drained["messages"]
    assert (message["topic"], message["payload"], message["thread"]) == ("news", {"soup": "hot"}, "t1")
    text = trunkline.call("messages", "drain", "--wait", "20s").stdout
    assert "topic" in text and "news" in text
    listed = trunkline.call("topics", "list").stdout
    assert listed.splitlines()[1].split()[:4] == ["news", "2", "subscribed", "1"]
    shown = trunkline.call("topics", "show", "news").stdout.splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["bo", "operator"]
    assert trunkline.call("topics", "unsubscribe", "news", "--as", "bo").returncode == 0
    assert trunkline.json("topics", "show", "news")["subscribers"] == 1
    told = trunkline.call("topics", "publish", "news", "note", "--text", "the last one")
    assert "is on its way to 1 subscribers of news" in told.stdout


@pytest.mark.kafka
@pytest.mark.requirement("CM-04")
def test_the_same_request_id_is_the_same_message(hub: GatewayClient, trunkline: CommandLine) -> None:
    trunkline.call("topics", "subscribe", "news")
    publish = ("topics", "publish", "news", "note", "--request-id", "p-1", "--json")
    first = json_of(trunkline.call(*publish, "[1]"))
    assert json_of(trunkline.call(*publish, "[1]")) == first
    assert first["request_id"] == "p-1"
    assert trunkline.call(*publish, "[2]").returncode == 4
    mailbox = path_of("mailboxes", "default", "operator")
    wait_until(lambda: hub.get(mailbox)["total"] == 1, what="the copy")


@pytest.mark.kafka
@pytest.mark.requirement("CM-06")
def test_exit_codes_and_errors(hub: GatewayClient, trunkline: CommandLine) -> None:
    token = hub.post(path_of("principals"), {"principal": "bo", "role": "worker"})["token"]
    unknown = trunkline.call("topics", "publish", "news", "note")
    assert (unknown.returncode, "no topic with this name" in unknown.stderr) == (3, True)
    assert trunkline.call("topics", "list").returncode == 3
    assert trunkline.json("topics", "list") == {"topics": [], "total": 0}
    assert trunkline.call("topics", "show", "news").returncode == 3
    assert trunkline.call("topics", "subscribe", "news", "--as", "nobody").returncode == 3
    assert trunkline.call("topics", "subscribe", "news", "--as", "ann", TRUNKLINE_TOKEN=token).returncode == 4
    assert trunkline.call("topics", "subscribe", "a b").returncode == 2
    assert trunkline.call("topics", "publish", "news", "note", "{").returncode == 2
    assert trunkline.call("topics", "publish", "news", "note", "[1]", "--text", "x").returncode == 2


def test_the_command_for_the_topic_of_the_log_is_not_mistaken_for_topics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["topic", "create"]) == 2
    assert "Did you mean 'topics'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["log", "--help"])
    told = capsys.readouterr().out
    assert "trunkline log create" in told
    assert "'trunkline topics'" in told
