"""Checks of Kafka: it answers, asks for a login, and has enough copies of the topic."""

from __future__ import annotations

from connectors.cli.doctor.findings import RESTART, START, Checks, Finding, fail, is_started, ok, warn
from connectors.local_stack.part_plan import KAFKA
from schemas.errors import TrunklineError
from schemas.settings.kafka_settings import missing_login
from schemas.settings.settings import Settings

CHECKS = Checks()


@CHECKS.add("kafka")
def check_kafka(settings: Settings) -> Finding:
    """Check that Kafka answers, and that the topic has the partitions and the epoch of the settings."""
    # Imported here, because Kafka's clients are slow to import and help must be quick.
    from schemas.log_access.event_topic import TopicMissingError, check_topic, reach_kafka

    where = settings.kafka.bootstrap_servers
    try:
        reach_kafka(settings.kafka, timeout_s=2.0)
    except TrunklineError as error:
        return fail(str(error), RESTART) if is_started(settings, KAFKA) else warn(str(error), START)
    try:
        check_topic(settings)
    except TopicMissingError as error:
        return fail(str(error), "./trunkline topic create")
    except TrunklineError as error:
        return fail(str(error), "the message says what to change")
    return ok(f"{where}, topic {settings.kafka.topic} with {settings.kafka.partitions} partitions")


@CHECKS.add("login")
def check_login(settings: Settings) -> Finding:
    """Check that Kafka asks its clients for a login."""
    kafka = settings.kafka
    unsafe = missing_login(kafka.security_protocol, kafka.ssl_certfile)
    if unsafe is None:
        return ok(f"{kafka.security_protocol} as {kafka.sasl_username}")
    return warn(f"unsafe: {unsafe}", "see docs/how-to/use_your_own_kafka_and_spark.md")


@CHECKS.add("replicas")
def check_replicas(settings: Settings) -> Finding:
    """Check that each partition has the copies of the settings, and that all are in sync."""
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
