"""Checks of `trunkline doctor` on Kafka and the MQTT broker. Each returns ok, or a fault and its repair."""

from __future__ import annotations

import secrets
import socket
import ssl
from contextlib import closing
from typing import Final

from connectors.cli.doctor.findings import (
    OK,
    RESTART,
    START,
    Checks,
    Finding,
    fail,
    is_started,
    ok,
    private_file,
    warn,
)
from connectors.plumbing.mqtt_link.broker_settings import (
    DELEGATOR,
    OPERATOR,
    load_role_passwords,
    role_file,
    role_mqtt,
)
from connectors.plumbing.mqtt_link.payloads import dropped_messages
from connectors.programs.local_stack.part_plan import KAFKA, MOSQUITTO
from connectors.programs.local_stack.ports import mqtt_answers
from schemas.settings.kafka_settings import missing_login
from schemas.settings.settings import MqttSettings, Settings
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.mqtt.mqtt_client import LoginAnswer, try_login
from trunkline_agent.mqtt.mqtt_connection import MqttConnection
from trunkline_agent.mqtt.mqtt_tls import explained, mqtt_context

CHECKS: Final = Checks()
_WAIT_S: Final = 1.0


@CHECKS.add("kafka")
def check_kafka(settings: Settings) -> Finding:
    """Check that Kafka answers within 2 s, and that the topic has the partitions and epoch of the settings.

    A Kafka that does not answer is a failure if this stack has started it, else a warning. A missing or wrong
    topic is a failure, and so are nodes of this stack of which most do not answer. Other addresses that do not
    answer are a warning.
    """
    # Imported here, because Kafka's clients are slow to import and help must be quick.
    from schemas.log_access.event_topic import TopicMissingError, check_topic, reach_kafka, servers_away
    from schemas.log_access.kafka_clients import bootstrap_addresses

    where = settings.kafka.bootstrap_servers
    try:
        reach_kafka(settings.kafka, timeout_s=2.0)
    except TrunklineError as error:
        return fail(str(error), RESTART) if is_started(settings, KAFKA) else warn(str(error), START)
    away, brokers = servers_away(settings.kafka, timeout_s=2.0), len(bootstrap_addresses(settings.kafka))
    lacking = f"{len(away)} of the {brokers} brokers do not answer: {', '.join(away)}"
    if 2 * len(away) > brokers and is_started(settings, KAFKA):
        return fail(f"{lacking}; Kafka takes no records", "start the missing brokers")
    try:
        count = check_topic(settings)
    except TopicMissingError as error:
        return fail(str(error), "./trunkline log create")
    except TrunklineError as error:
        return fail(str(error), "the message says what to change")
    found = f"{where}, topic {settings.kafka.topic} with {settings.kafka.partitions} partitions"
    if count > settings.kafka.partitions:
        surplus = f"{found}; Kafka has {count}, and the added ones stay empty and do no harm"
        return warn(surplus, f"leave kafka.partitions at {settings.kafka.partitions}: Kafka cannot remove them")
    if away:
        return warn(f"{found}; {lacking}", "start the missing brokers")
    return ok(found)


@CHECKS.add("login")
def check_login(settings: Settings) -> Finding:
    """Check that clients log in to Kafka, by SASL or a client certificate; otherwise it is a warning.

    Only the settings are read. No connection is made.
    """
    kafka = settings.kafka
    unsafe = missing_login(kafka.security_protocol, kafka.ssl_certfile)
    if unsafe is None:
        return ok(f"{kafka.security_protocol} as {kafka.sasl_username}")
    return warn(f"unsafe: {unsafe}", "see docs/how-to/use_your_own_kafka_and_spark.md")


@CHECKS.add("replicas")
def check_replicas(settings: Settings) -> Finding:
    """Check that the topic has as many replicas as the settings want, and that all are in sync.

    A difference is a warning, and so is a Kafka that does not answer. It is a failure if Kafka refuses records
    because too few replicas are in sync.
    """
    from connectors.log.kafka_topic import replication
    from schemas.log_access.event_topic import reach_kafka

    kafka = settings.kafka
    try:
        reach_kafka(kafka, timeout_s=2.0)
        found = replication(kafka)
    except TrunklineError:
        return warn("not looked at: see the check of kafka")
    what = f"{found.replicas} of each partition, {found.min_in_sync} must have a record before it counts"
    if found.missing:
        where = ", ".join(f"partition {number}: {in_sync}" for number, in_sync in found.missing.items())
        what = f"{what}; in sync are only: {where}"
        if found.refusing:
            return fail(f"{what}; Kafka refuses records", "start the missing brokers")
        return warn(what, "start the missing brokers: kafka-topics --describe names them")
    if found.replicas < kafka.replication_factor:
        return warn(
            f"{what}; kafka.replication_factor is {kafka.replication_factor}",
            "raise the topic's replicas with kafka-reassign-partitions, or lower the setting",
        )
    if found.min_in_sync != kafka.wanted_in_sync_replicas:
        return warn(
            f"{what}; the settings want {kafka.wanted_in_sync_replicas}",
            f"kafka-configs --alter --entity-type topics --entity-name {kafka.topic} --add-config "
            f"min.insync.replicas={kafka.wanted_in_sync_replicas}",
        )
    return ok(what)


@CHECKS.add("mqtt")
def check_mqtt(settings: Settings) -> Finding:
    """Check that the MQTT broker answers within 2 s.

    No answer is a failure if this stack has started the broker, else a warning. A failing TLS connection is a
    failure.
    """
    mqtt = settings.mqtt
    where = f"{mqtt.host}:{mqtt.port}"
    context = mqtt_context(mqtt)
    if mqtt_answers(mqtt.host, mqtt.port, timeout_s=2.0, context=context):
        return ok(where if context is None else f"{where}, TLS")
    if context is not None and (why := _why_no_tls(mqtt, context)) is not None:
        return fail(f"{where}: {why}", "./trunkline tls create says what to set")
    found = f"{where} does not answer"
    return fail(found, RESTART) if is_started(settings, MOSQUITTO) else warn(found, START)


def _why_no_tls(mqtt: MqttSettings, context: ssl.SSLContext) -> str | None:
    """Return why the TLS connection fails; None when no broker is there."""
    try:
        with socket.create_connection((mqtt.host, mqtt.port), timeout=2.0) as plain:
            try:
                context.wrap_socket(plain, server_hostname=mqtt.host).close()
            except OSError as error:
                return explained(error, mqtt)
    except OSError:
        return None
    return "it takes TLS and gives no answer: perhaps it wants mqtt.certfile and mqtt.keyfile"


@CHECKS.add("accounts")
def check_accounts(settings: Settings) -> Finding:
    """Check that the MQTT broker refuses clients without an account, and accepts the operator's account.

    At the stack's own broker, a fault is a failure. At another broker, or without an answer, it is a warning.
    """
    mqtt, path = settings.mqtt, role_file(settings)
    nobody = try_login(mqtt)
    if nobody is LoginAnswer.SILENT:
        return warn("the MQTT broker does not answer", START)
    ours = is_started(settings, MOSQUITTO)
    if nobody is LoginAnswer.LET_IN:
        mend = RESTART if ours else "give it a password_file and an acl_file, as conf/mosquitto.conf does"
        found = "the MQTT broker lets anybody in"
        return fail(found, mend) if ours else warn(found, mend)
    if not ours or not path.exists():
        return ok("the MQTT broker refuses clients without an account")
    if mqtt.username is not None:
        found = f"mqtt.username is {mqtt.username!r}, but the local broker knows only its own accounts"
        return warn(found, "unset MQTT_USERNAME or TRUNKLINE__MQTT__USERNAME")
    private = private_file(path)
    if private.level != OK:
        return private
    passwords = load_role_passwords(settings)
    assert passwords is not None  # noqa: S101  the file exists, and only `up` writes it
    if try_login(mqtt, OPERATOR, passwords[OPERATOR].get_secret_value()) is not LoginAnswer.LET_IN:
        return fail(f"the MQTT broker refuses the operator's password of {path}", RESTART)
    return ok(f"no client without an account; the roles' passwords are in {private.found}")


@CHECKS.add("mqtt_queue")
def check_queue(settings: Settings) -> Finding:
    """Check that the MQTT broker has dropped no message since its start. Dropped ones are a warning.

    A broker that does not publish the figure is no fault: it is then unknown.
    """
    try:
        dropped = dropped_messages(role_mqtt(settings, OPERATOR), _WAIT_S)
    except BackboneUnreachable:
        return warn("the MQTT broker does not answer", START)
    if dropped is None:
        return ok("unknown: the MQTT broker does not publish how many messages it has dropped")
    if not dropped:
        return ok("the MQTT broker has dropped no message since its start")
    return warn(
        f"the MQTT broker has dropped {dropped} messages since its start, after their PUBACK: a queue was full",
        "trunkline logs mosquitto names the client that was away: start it. Publishers that wait for receipts "
        "send again, others have lost events",
    )


@CHECKS.add("client_ids")
def check_client_ids(settings: Settings) -> Finding:
    """Check whether the MQTT broker lets one account take over the client id of another one.

    It tries that with an id of its own, so no other connection is disturbed. A broker that does is no fault,
    because nobody can guess the ids of the bridge and of the agents. Without two accounts it is not tried.
    """
    first, second = (
        role_mqtt(settings, role).model_copy(update={"socket_dir": None}) for role in (DELEGATOR, OPERATOR)
    )
    if first.username == second.username:
        return ok("not tried: the settings have one account for the broker; Trunkline's own ids are secret")
    probe = f"trunkline-doctor-{secrets.token_hex(16)}"
    try:
        with closing(MqttConnection(first, client_id=probe)) as victim:
            victim.open()
            with closing(MqttConnection(second, client_id=probe)) as other:
                other.open()
                is_taken = victim.lost.wait(_WAIT_S)
    except BackboneUnreachable:
        return warn("the MQTT broker does not answer", START)
    if not is_taken:
        return ok("the MQTT broker binds client ids to accounts")
    return ok(
        "the MQTT broker hands a client id over to any account; those of Trunkline's sessions are secret, and "
        "mqtt.user_is_client_id binds all"
    )
