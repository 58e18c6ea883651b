"""The local stack's Mosquitto under TLS 1.3: who is refused, and that passwords, ACL and limits still hold."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from pydantic import SecretStr

from connectors.cli.doctor.brokers import check_accounts, check_mqtt
from connectors.doors.mqtt_accounts.mosquitto_files import (
    PASSWORDS,
    password_line,
    read_lines,
    reload_broker,
    write_acl,
    write_lines,
)
from connectors.plumbing.mqtt_link.broker_settings import (
    BRIDGE,
    DELEGATOR,
    OPERATOR,
    load_role_passwords,
    role_mqtt,
)
from connectors.plumbing.tls_keys.tls_files import TlsFolder, client_name, create
from connectors.programs.gateway_program.program import certificate_watches
from connectors.programs.local_stack import LocalStack
from connectors.programs.local_stack.part import child_environment
from schemas.settings.settings import Settings, load_settings
from tests.broker_processes import LOOPBACK, wait_until, with_mqtt
from tests.connectors.plumbing.tls_keys.test_served_certificates import serial_at
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.mqtt_wire import listening, publish_all
from trunkline_agent.broker import Broker, BrokerAccess, clear_password, job_broker
from trunkline_agent.errors import BackboneUnreachable, UsageError
from trunkline_agent.mqtt import mqtt_tls
from trunkline_agent.mqtt.event_delivery import DeliveryConnection
from trunkline_agent.mqtt.mqtt_client import LoginAnswer, try_login
from trunkline_agent.wire.agent_message import mqtt_user
from trunkline_agent.wire.mqtt_password import mqtt_password

pytestmark = [pytest.mark.requirement("JE-23"), pytest.mark.stack]

MINE, OTHER, SECRET = "0a1b2c3d", "4e5f6a7b", "a secret"
ANSWER_S = 5.0


def hardened_in(folder: Path, **mqtt: object) -> tuple[Settings, TlsFolder]:
    """Settings of a stack whose Mosquitto takes TLS, and the files that make it so."""
    made = create(folder / "keys" / "tls", mutual=True)
    return with_mqtt(settings_in(folder), tls=True, ca_certs=made.of("ca").certificate, **mqtt), made


@pytest.fixture(scope="module")
def hardened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalStack, TlsFolder]]:
    """The hardened Mosquitto for the whole file, with accounts of two jobs and of an agent."""
    settings, made = hardened_in(tmp_path_factory.mktemp("hardened") / "a folder")
    with LocalStack(settings, ("mosquitto",)) as stack:
        folder = stack.settings.mqtt.accounts_dir
        lines = read_lines(folder / PASSWORDS)
        lines |= {user: password_line(user, mqtt_password(SECRET, user)) for user in (MINE, OTHER)}
        write_lines(folder / PASSWORDS, lines.values())
        assert reload_broker(folder)
        worker = job_broker(stack.settings.mqtt, MINE, SECRET)
        wait_until(lambda: login(worker) is LoginAnswer.LET_IN, what="the job's account")
        yield stack, made


@pytest.fixture
def settings(hardened: tuple[LocalStack, TlsFolder]) -> Settings:
    return hardened[0].settings


@pytest.fixture
def worker(settings: Settings) -> Broker:
    """The broker's settings as the worker of a job uses them."""
    return job_broker(settings.mqtt, MINE, SECRET)


def login(mqtt: BrokerAccess) -> LoginAnswer:
    return try_login(mqtt, mqtt.username, clear_password(mqtt), 5)


def paho_gets_in(
    mqtt: BrokerAccess, context: ssl.SSLContext | None, properties: Properties | None = None
) -> bool:
    """True if a plain paho client is let in with this context; it raises what TLS raises while connecting."""
    client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTv5, reconnect_on_failure=False)
    client.username_pw_set(mqtt.username, clear_password(mqtt))
    if context is not None:
        client.tls_set_context(context)
    said: list[Any] = []
    heard = threading.Event()

    def note(*arguments: Any) -> None:
        said.append(arguments[3])
        heard.set()

    client.on_connect = client.on_disconnect = note
    client.connect(LOOPBACK, mqtt.port, properties=properties)
    client.loop_start()
    try:
        assert heard.wait(ANSWER_S)
        return not said[0].is_failure
    finally:
        client.disconnect()
        client.loop_stop()


def trusting(ca: Path | None, highest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    context.maximum_version = highest
    context.sslsocket_class = mqtt_tls._Connection
    return context


def test_a_client_with_our_authority_gets_in_and_one_with_another_is_told_whom_to_trust(
    worker: Broker, tmp_path: Path
) -> None:
    assert paho_gets_in(worker, trusting(worker.ca_certs))
    stranger = create(tmp_path / "stranger").of("ca").certificate
    for wrong in (stranger, None):
        with pytest.raises(ssl.SSLCertVerificationError):
            paho_gets_in(worker, trusting(wrong))
        mistaken = replace(worker, ca_certs=wrong)
        assert login(mistaken) is LoginAnswer.SILENT
        with (
            pytest.raises(BackboneUnreachable, match=r"not trusted .*: mqtt\.ca_certs"),
            DeliveryConnection(mistaken, MINE, wait_for_receipt=False),
        ):
            pass


def test_a_host_that_the_certificate_does_not_name_is_not_trusted(worker: Broker) -> None:
    with (
        pytest.raises(BackboneUnreachable, match=r"not trusted .*mqtt\.host a name in it"),
        # The same address, spelled as no certificate does.
        DeliveryConnection(replace(worker, host="127.1"), MINE, wait_for_receipt=False),
    ):
        pass


def test_plaintext_is_refused_and_the_client_is_told_of_tls(worker: Broker) -> None:
    assert not paho_gets_in(worker, None)
    plain = replace(worker, tls=False)
    assert login(plain) is LoginAnswer.SILENT
    with (
        pytest.raises(BackboneUnreachable, match=r"perhaps it wants TLS, then set mqtt\.tls"),
        DeliveryConnection(plain, MINE, wait_for_receipt=False),
    ):
        pass


def test_tls_1_2_is_refused(worker: Broker) -> None:
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        paho_gets_in(worker, trusting(worker.ca_certs, ssl.TLSVersion.TLSv1_2))


def test_nobody_gets_in_without_an_account_or_with_a_wrong_password(worker: Broker) -> None:
    assert try_login(worker, timeout_s=5) is LoginAnswer.REFUSED
    assert try_login(worker, MINE, mqtt_password("another", MINE), 5) is LoginAnswer.REFUSED
    assert login(worker) is LoginAnswer.LET_IN


def test_a_worker_neither_reads_nor_writes_what_is_anothers(settings: Settings, worker: Broker) -> None:
    operator = role_mqtt(settings, OPERATOR)
    with (
        listening(worker, "#") as all_of_it,
        listening(worker, f"{OTHER}/events") as others,
        listening(operator, "#") as heard,
    ):
        publish_all(worker, [(f"{OTHER}/events", b"forged")])
        publish_all(worker, [(f"{MINE}/receipts", b"forged")])
        publish_all(job_broker(settings.mqtt, OTHER, SECRET), [(f"{OTHER}/events", b"the other's")])
        publish_all(worker, [(f"{MINE}/events", b"its own")])
        publish_all(role_mqtt(settings, BRIDGE), [(f"{MINE}/receipts", b"for it")])
        wait_until(lambda: all_of_it and len(heard) == 3, what="its receipt, and what the others wrote")
    assert [one.payload for one in all_of_it] == [b"for it"]
    assert others == []
    assert [one.payload for one in heard] == [b"the other's", b"its own", b"for it"]


def test_a_delegator_reads_events_and_writes_nothing(settings: Settings, worker: Broker) -> None:
    delegator, operator = role_mqtt(settings, DELEGATOR), role_mqtt(settings, OPERATOR)
    with listening(delegator, "+/events") as read, listening(operator, "#") as heard:
        publish_all(delegator, [(f"{MINE}/events", b"forged")])
        publish_all(delegator, [(f"{MINE}/receipts", b"forged")])
        publish_all(worker, [(f"{MINE}/events", b"an event")])
        wait_until(lambda: read and heard, what="the event")
    assert [[one.payload for one in found] for found in (read, heard)] == [[b"an event"]] * 2


def test_an_agent_reads_only_its_inbox_and_writes_only_its_outbox(settings: Settings) -> None:
    folder, mqtt = settings.mqtt.accounts_dir, settings.mqtt
    users = [mqtt_user(name) for name in ("ann", "bob")]
    lines = read_lines(folder / PASSWORDS) | {u: password_line(u, mqtt_password(SECRET, u)) for u in users}
    write_acl(folder, mqtt, users)
    write_lines(folder / PASSWORDS, lines.values())
    assert reload_broker(folder)
    password = SecretStr(mqtt_password(SECRET, users[0]))
    as_job = mqtt.model_copy(update={"username": users[0], "password": password})
    wait_until(lambda: login(as_job) is LoginAnswer.LET_IN, what="the agent's account")
    ann, bridge, operator = (
        one.model_copy(update={"topic_prefix": mqtt.agents_prefix})
        for one in (as_job, role_mqtt(settings, BRIDGE), role_mqtt(settings, OPERATOR))
    )
    with (
        listening(ann, "#") as read,
        listening(operator, "#") as heard,
        listening(role_mqtt(settings, OPERATOR), "#") as of_jobs,
    ):
        for topic in ("bob/outbox", "ann/inbox", "bob/inbox"):
            publish_all(ann, [(topic, b"forged")])
        publish_all(as_job, [(f"{MINE}/events", b"forged")])
        publish_all(bridge, [("ann/outbox", b"forged")])
        publish_all(bridge, [("bob/inbox", b"not hers"), ("ann/inbox", b"hers")])
        publish_all(ann, [("ann/outbox", b"her word")])
        wait_until(lambda: read and len(heard) >= 3, what="what each may write")
    assert [one.payload for one in read] == [b"hers"]
    assert [one.payload for one in heard] == [b"not hers", b"hers", b"her word"]
    assert of_jobs == []


def test_a_rotated_secret_lets_in_beside_the_old_one_with_the_same_rights(
    settings: Settings, worker: Broker
) -> None:
    folder, secret = settings.mqtt.accounts_dir, "5e5e5e5e.a rotated secret"
    new = job_broker(settings.mqtt, MINE, secret)
    lines = read_lines(folder / PASSWORDS)
    lines[new.username] = password_line(new.username, new.password)
    write_acl(folder, settings.mqtt, [mqtt_user("ann"), mqtt_user("bob"), new.username])
    write_lines(folder / PASSWORDS, lines.values())
    assert reload_broker(folder)
    wait_until(lambda: login(new) is LoginAnswer.LET_IN, what="the account of the new secret")
    operator = role_mqtt(settings, OPERATOR)
    with listening(operator, "#") as heard, listening(new, "#") as read:
        publish_all(new, [(f"{OTHER}/events", b"forged")])
        for one, word in ((worker, b"by the old one"), (new, b"by the new one")):
            publish_all(one, [(f"{MINE}/events", word)])
        publish_all(
            role_mqtt(settings, BRIDGE), [(f"{OTHER}/receipts", b"not its"), (f"{MINE}/receipts", b"its")]
        )
        wait_until(lambda: read and len(heard) == 4, what="what it may")
    assert [one.payload for one in read] == [b"its"]
    assert [one.payload for one in heard] == [b"by the old one", b"by the new one", b"not its", b"its"]


def test_a_packet_beyond_the_limit_ends_the_connection(settings: Settings, worker: Broker) -> None:
    properties = Properties(PacketTypes.CONNECT)
    properties.UserProperty = [("x", "y" * 60_000)] * 2
    assert paho_gets_in(worker, trusting(worker.ca_certs), properties)
    properties.UserProperty = [("x", "y" * 60_000)] * 290
    assert not paho_gets_in(worker, trusting(worker.ca_certs), properties)


def test_the_doctor_looks_through_tls_and_says_which_setting_is_wrong(
    settings: Settings, tmp_path: Path
) -> None:
    assert (check_mqtt(settings).level, check_accounts(settings).level) == ("ok", "ok")
    stranger = create(tmp_path / "stranger").of("ca").certificate
    found = check_mqtt(with_mqtt(settings, ca_certs=stranger))
    assert found.level == "fail" and "mqtt.ca_certs" in found.found


def test_the_roles_passwords_go_out_under_tls_only_to_whom_our_authority_knows(settings: Settings) -> None:
    known = load_role_passwords(settings)
    assert role_mqtt(settings, OPERATOR).password == known[OPERATOR]
    assert role_mqtt(with_mqtt(settings, ca_certs=None), OPERATOR).username is None
    elsewhere = with_mqtt(settings, host="broker.example")
    assert role_mqtt(elsewhere, OPERATOR).username is None


def test_under_mutual_tls_a_password_alone_does_not_let_in(tmp_path: Path) -> None:
    folder = tmp_path / "mutual"
    settings, made = hardened_in(folder, require_client_cert=True)
    with pytest.raises(UsageError, match=r"mqtt\.certfile is not set"):
        LocalStack(settings, ("mosquitto",))
    ours = made.of(client_name("operator"))
    settings = with_mqtt(settings, certfile=ours.certificate, keyfile=ours.key)
    stranger = create(tmp_path / "stranger", mutual=True).of(client_name("operator"))
    with LocalStack(settings, ("mosquitto",)) as stack:
        # On the port: on the private socket nobody needs a certificate.
        operator = role_mqtt(stack.settings, OPERATOR).model_copy(update={"socket_dir": None})
        assert login(operator) is LoginAnswer.LET_IN
        assert try_login(operator, OPERATOR, "wrong", 5) is LoginAnswer.REFUSED
        naked = operator.model_copy(update={"certfile": None, "keyfile": None})
        assert login(naked) is LoginAnswer.SILENT
        with (
            pytest.raises(BackboneUnreachable, match=r"mqtt\.certfile"),
            DeliveryConnection(naked, MINE, wait_for_receipt=False),
        ):
            pass
        wrong = operator.model_copy(update={"certfile": stranger.certificate, "keyfile": stranger.key})
        assert login(wrong) is LoginAnswer.SILENT


def test_the_stack_says_what_is_missing_before_it_starts_a_broker(tmp_path: Path) -> None:
    bare = with_mqtt(settings_in(tmp_path / "data"), tls=True)
    with pytest.raises(UsageError, match=r"mqtt\.ca_certs is not set"):
        LocalStack(bare, ("mosquitto",))
    with (
        pytest.raises(UsageError, match=r"run \./trunkline tls create"),
        LocalStack(with_mqtt(bare, ca_certs=tmp_path / "ca.crt"), ("mosquitto",)),
    ):
        pass
    key = create(bare.tls_path).of("mosquitto").key
    key.chmod(0o640)
    with (
        pytest.raises(UsageError, match=f"run: chmod 600 {key}"),
        LocalStack(with_mqtt(bare, ca_certs=bare.tls_path / "ca.crt"), ("mosquitto",)),
    ):
        pass
    with pytest.raises(UsageError, match=r"mqtt\.listen_host is '0\.0\.0\.0': without mqtt\.tls"):
        LocalStack(with_mqtt(settings_in(tmp_path / "data"), listen_host="0.0.0.0"), ("mosquitto",))  # noqa: S104


def test_children_of_the_stack_read_the_same_settings(settings: Settings) -> None:
    environment = child_environment(settings)
    assert load_settings(environment, Path("/dev/null")).mqtt == settings.mqtt


@pytest.mark.requirement("HH-25")
def test_a_renewed_certificate_is_served_after_the_gateways_watch_has_seen_it(
    hardened: tuple[LocalStack, TlsFolder], worker: Broker
) -> None:
    """The last test of the file, because it replaces the certificates."""
    settings = hardened[0].settings
    (watch,) = certificate_watches(settings, None)
    before = serial_at(settings.mqtt.port)
    watch.look()
    assert serial_at(settings.mqtt.port) == before
    create(settings.tls_path, renew=True)
    watch.look()
    wait_until(lambda: serial_at(settings.mqtt.port) != before, what="the new certificate")
    assert login(worker) is LoginAnswer.LET_IN
