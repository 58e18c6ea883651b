"""A Kafka of the user's own, with an authorizer: each login, with the rights that the documentation names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from pydantic import SecretStr

from connectors.log.kafka_topic import ensure_topic, replication
from connectors.log.log_end import LogEnd
from connectors.log.publisher import Publisher
from connectors.log.topic_consumer import GroupTail, LogTail
from connectors.plumbing.tls_keys.tls_files import TlsFolder, create
from schemas.keys.sealing import ensure_keyring
from schemas.log_access import kafka_clients
from schemas.log_access.kafka_clients import OAuthTokens, client_options
from schemas.settings.settings import PROJECT_ROOT, KafkaSettings, Settings, SettingsError
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import (
    BrokerProcess,
    free_port,
    kafka_at,
    make_kafka,
    program_environment,
    wait_until,
    with_kafka,
)
from tests.programs import run_program
from tests.token_server import SCOPE, TokenServer, token_server
from trunkline_agent.errors import BackboneUnreachable, TrunklineError

pytestmark = [pytest.mark.requirement("DP-12"), pytest.mark.kafka]

PAGE = PROJECT_ROOT / "docs" / "how-to" / "use_your_own_kafka_and_spark.md"
PASSWORD = "canary-5b4a3928"
USER = "paula"
WITHIN_S = 20.0
# The broker's own user is the one that the storage was formatted with; a controller's listener has no login.
_PROPERTIES = """
listeners=SASL_PLAINTEXT://127.0.0.1:{port},SASL_SSL://127.0.0.1:{sasl_ssl},SSL://127.0.0.1:{ssl},\
CONTROLLER://127.0.0.1:{controller}
advertised.listeners=SASL_PLAINTEXT://127.0.0.1:{port},SASL_SSL://127.0.0.1:{sasl_ssl},SSL://127.0.0.1:{ssl}
controller.quorum.voters=1@127.0.0.1:{controller}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL
sasl.enabled.mechanisms=SCRAM-SHA-512,SCRAM-SHA-256,PLAIN,OAUTHBEARER
sasl.oauthbearer.jwks.endpoint.url={tokens}
sasl.oauthbearer.expected.audience=kafka
sasl.oauthbearer.expected.issuer=https://tokens.test
ssl.keystore.type=PEM
ssl.keystore.location={keys}/kafka.pem
ssl.truststore.type=PEM
ssl.truststore.location={keys}/ca.crt
listener.name.ssl.ssl.client.auth=required
ssl.principal.mapping.rules=RULE:^.*CN=([^,]+).*$/$1/
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:trunkline
"""
_PLAIN = (
    "listener.name.{listener}.plain.sasl.jaas.config="
    "org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}={password};\n"
    "listener.name.{listener}.scram-sha-256.sasl.jaas.config="
    "org.apache.kafka.common.security.scram.ScramLoginModule required;\n"
    "listener.name.{listener}.oauthbearer.sasl.jaas.config="
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;\n"
    "listener.name.{listener}.oauthbearer.sasl.server.callback.handler.class="
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler\n"
)


class Cluster(NamedTuple):
    """A broker with all logins, its administrator, and the certificates of its clients."""

    broker: BrokerProcess
    admin: KafkaAdminClient
    keys: TlsFolder
    ports: dict[str, int]
    tokens: TokenServer


@pytest.fixture(scope="module")
def tokens() -> Iterator[TokenServer]:
    """A token server whose tokens are asked for anew after some seconds."""
    with token_server(USER, PASSWORD, lasts_s=20) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tokens: TokenServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Such a broker. By PLAIN only `paula` is known; by SCRAM the tests make users."""
    folder = tmp_path_factory.mktemp("own")
    keys = create(folder / "keys", mutual=True)
    broker = make_kafka(folder)
    ports = {"SASL_PLAINTEXT": broker.port, "SASL_SSL": free_port(), "SSL": free_port()}
    more = _PROPERTIES.format(
        port=broker.port,
        sasl_ssl=ports["SASL_SSL"],
        ssl=ports["SSL"],
        controller=free_port(),
        keys=keys.folder,
        tokens=tokens.keys_url,
    )
    more += "".join(
        _PLAIN.format(listener=one, user=USER, password=PASSWORD) for one in ("sasl_plaintext", "sasl_ssl")
    )
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;\n"
    more += f"listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={scram}"
    properties = folder / "server.properties"
    properties.write_text(properties.read_text() + more)
    broker.command.insert(1, f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={tokens.keys_url}")
    broker.start()
    admin = KafkaAdminClient(**client_options(kafka_at(broker.port)))
    for kind in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        admin.alter_user_scram_credentials([UserScramCredentialUpsertion(USER, kind, PASSWORD)])
    yield Cluster(broker, admin, keys, ports, tokens)
    admin.close()
    broker.kill()


LOGINS = [
    *(
        (protocol, mechanism)
        for protocol in ("SASL_PLAINTEXT", "SASL_SSL")
        for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
    ),
    ("SSL", ""),
]


def settings_with(cluster: Cluster, folder: Path, protocol: str, mechanism: str) -> Settings:
    """Settings of a client with this login, and a topic and a group of its own."""
    client = cluster.keys.of("clients/worker")
    login: dict[str, Any] = {"security_protocol": protocol, "topic": f"own.{folder.name}"}
    if protocol.endswith("SSL"):
        login["ssl_ca_certs"] = cluster.keys.of("ca").certificate
    if mechanism:
        login |= {"sasl_mechanism": mechanism, "sasl_username": USER, "sasl_password": SecretStr(PASSWORD)}
        login |= {"oauth_token_url": cluster.tokens.token_url, "oauth_scope": SCOPE}
    else:
        login |= {"ssl_certfile": client.certificate, "ssl_keyfile": client.key}
    kafka = kafka_at(cluster.ports[protocol], partitions=2, delivery_timeout_s=5)
    settings = Settings(data_dir=folder / "data", kafka=kafka.model_copy(update=login))
    ensure_keyring(settings)
    return settings


def documented_rights(settings: Settings, principal: str) -> list[ACL]:
    """The rights of the table in the documentation, for this principal and these settings."""
    names = {
        "the topic": (ResourceType.TOPIC, settings.kafka.topic, ACLResourcePatternType.LITERAL),
        "the group of `gateway.reactor_group`": (
            ResourceType.GROUP,
            settings.gateway.reactor_group,
            ACLResourcePatternType.LITERAL,
        ),
    }
    table = PAGE.read_text().partition("| resource | rights |")[2].partition("\n\n")[0]
    found = re.findall(r"^ *\| (the .*?) \| (.*?) \|$", table, re.MULTILINE)
    assert {resource for resource, _ in found} == names.keys()
    return [
        ACL(
            f"User:{principal}",
            "*",
            ACLOperation[right.upper().replace(" ", "_")],
            ACLPermissionType.ALLOW,
            ResourcePattern(*names[resource]),
        )
        for resource, rights in found
        for right in rights.split(", ")
    ]


def give(cluster: Cluster, rights: Iterable[ACL]) -> None:
    """Take all rights from everybody, and give these."""
    everything = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
    cluster.admin.delete_acls([ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, everything)])
    found = cluster.admin.create_acls(list(rights))
    assert not found["failed"], found


def principal_of(mechanism: str) -> str:
    """The name by which the broker knows the client."""
    return USER if mechanism else "worker"


def use(settings: Settings) -> None:
    """Do with the log what our programs do, but for Spark. Raises TrunklineError when a right is missing."""
    kafka = settings.kafka
    ensure_topic(settings)
    replication(kafka)
    with Publisher(settings) as publisher:
        record = OutgoingRecord("job/0a1b2c3d", "id-1", "mqtt", "unverified", "job.event", b"{}")
        position = publisher.append(record).result(2 * WITHIN_S)
    with closing(LogEnd(kafka)) as log_end:
        assert log_end.offsets(WITHIN_S)[position.partition] > position.offset
    with LogTail(kafka, {}) as tail:
        wait_until(lambda: tail.poll(0.5), WITHIN_S, "a record of the tail")
    with closing(GroupTail(kafka, settings.gateway.reactor_group)) as group:
        wait_until(lambda: group.poll(0.5, 10), WITHIN_S, "a record of the group")


@pytest.mark.parametrize(("protocol", "mechanism"), LOGINS)
def test_each_login_works_with_the_documented_rights(
    cluster: Cluster, tmp_path: Path, protocol: str, mechanism: str
) -> None:
    settings = settings_with(cluster, tmp_path, protocol, mechanism)
    give(cluster, documented_rights(settings, principal_of(mechanism)))
    use(settings)


NEEDED = {
    ("TOPIC", "CREATE"): "lacks a right on the topic",
    ("TOPIC", "DESCRIBE_CONFIGS"): "lacks the right to describe configs",
    ("TOPIC", "READ"): "lacks a right on the topic",
    ("TOPIC", "WRITE"): "(Topic|Cluster) authorization failed",
    ("GROUP", "READ"): "Group authorization failed",
}


@pytest.mark.parametrize(("resource", "operation"), NEEDED)
def test_each_documented_right_is_needed_and_its_lack_is_said(
    cluster: Cluster, tmp_path: Path, resource: str, operation: str
) -> None:
    settings = settings_with(cluster, tmp_path, "SASL_PLAINTEXT", "PLAIN")
    rights = documented_rights(settings, USER)
    assert {(one.resource_pattern.resource_type.name, one.operation.name) for one in rights} == NEEDED.keys()
    missing = (ResourceType[resource], ACLOperation[operation])
    give(cluster, [one for one in rights if (one.resource_pattern.resource_type, one.operation) != missing])
    with pytest.raises(TrunklineError, match=NEEDED[resource, operation]):
        use(settings)


def test_a_token_is_kept_for_most_of_its_time_and_a_refusal_names_the_settings(
    cluster: Cluster, tmp_path: Path
) -> None:
    kafka = settings_with(cluster, tmp_path, "SASL_PLAINTEXT", "OAUTHBEARER").kafka
    given, tokens = cluster.tokens.given, OAuthTokens(kafka, PASSWORD)
    assert len({tokens.token() for _ in range(5)}) == 1 and cluster.tokens.given == given + 1
    for changes in ({"secret": "wrong"}, {"url": f"http://127.0.0.1:{free_port()}/token"}):
        at = kafka.model_copy(update={"oauth_token_url": changes.get("url", kafka.oauth_token_url)})
        with pytest.raises(BackboneUnreachable, match=r"gives no token .*kafka\.oauth_token_url") as caught:
            OAuthTokens(at, changes.get("secret", PASSWORD)).token()
        assert PASSWORD not in str(caught.value)


def test_a_token_server_may_leave_out_how_long_its_token_lasts(tmp_path: Path) -> None:
    with token_server(USER, PASSWORD, lasts_s=None) as server:
        login = {"sasl_mechanism": "OAUTHBEARER", "oauth_token_url": server.token_url, "oauth_scope": SCOPE}
        tokens = OAuthTokens(kafka_at(9092, sasl_username=USER, **login), PASSWORD)
        assert tokens.token() == tokens.token()


def test_a_token_serves_until_its_end_while_the_token_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(kafka_clients.time, "clock_gettime", lambda _: now[0])
    with token_server(USER, PASSWORD, lasts_s=100) as server:
        login = {"sasl_mechanism": "OAUTHBEARER", "oauth_token_url": server.token_url, "oauth_scope": SCOPE}
        tokens = OAuthTokens(kafka_at(9092, sasl_username=USER, **login), PASSWORD)
        first = tokens.token()
    now[0] += 99
    assert tokens.token() == first
    now[0] += 2
    with pytest.raises(BackboneUnreachable, match="gives no token"):
        tokens.token()


@pytest.mark.parametrize("character", "+/=% :")
def test_ids_and_secrets_that_clients_send_in_different_ways_are_refused(
    tmp_path: Path, character: str
) -> None:
    login = {"sasl_mechanism": "OAUTHBEARER", "oauth_token_url": "https://tokens.test/token"}
    bad = f"before{character}after"
    for name in ("sasl_username", "sasl_password"):
        with pytest.raises(ValueError, match=f"{name} must consist of"):
            KafkaSettings.model_validate({**login, name: bad})
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text(bad)
    kafka = KafkaSettings.model_validate({**login, "sasl_username": USER, "sasl_password_file": file})
    with pytest.raises(SettingsError, match="must consist of"):
        client_options(kafka)
    with pytest.raises(ValueError, match="user or a password"):
        KafkaSettings.model_validate(
            login | {"oauth_token_url": f"https://{USER}:{PASSWORD}@tokens.test/token"}
        )


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "mechanism"), LOGINS)
def test_spark_reads_by_each_login_with_the_documented_rights(
    cluster: Cluster, tmp_path: Path, protocol: str, mechanism: str
) -> None:
    settings = settings_with(cluster, tmp_path, protocol, mechanism)
    rights = documented_rights(settings, principal_of(mechanism))
    if not mechanism:  # Java wants certificate and key in one file
        pem = tmp_path / "client.pem"
        pem.touch(mode=0o600)
        client = cluster.keys.of("clients/worker")
        pem.write_bytes(client.key.read_bytes() + client.certificate.read_bytes())
        settings = with_kafka(settings, ssl_certfile=pem, ssl_keyfile=None)
    give(cluster, rights)
    use(settings)
    command = [sys.executable, "-m", "tests.jobs.sasl_reader", str(tmp_path)]
    done = run_program(command, timeout_s=120, env=program_environment(settings))
    assert done.returncode == 0, done.stderr[-3000:]
    with closing(LogEnd(settings.kafka)) as log_end:
        there = sum(log_end.offsets(WITHIN_S).values())
    assert json.loads(done.stdout.splitlines()[-1])["records"] == there
