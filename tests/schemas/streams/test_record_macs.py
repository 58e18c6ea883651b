"""MACs of records: from the switch of a partition on, a record without a valid one counts for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.record_macs import FILE_BRIDGE, GATEWAY, MQTT_BRIDGE, mac_headers
from schemas.keys.sealing import Keyring, MacKey, MissingKeyError, job_secret_purpose
from schemas.settings.settings import SettingsError
from schemas.streams.control.record_macs import (
    MACS_REQUIRED,
    MacKeyEnded,
    MacsRequired,
    mac_key_ended_records,
    macs_required_records,
    macs_stream,
)
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import JobRegistration
from schemas.streams.mailboxes.message import MESSAGE_POSTED, Message, verified_message
from schemas.streams.principal.principals import OPERATOR, PrincipalAddition, token_hash
from schemas.streams.refused.refusal import Refusal
from schemas.streams.schedule.schedule_registry import (
    ScheduleMissed,
    ScheduleSet,
)
from schemas.wire.record import OutgoingRecord, Record, oversized, partition_for
from tests.schemas.job_records import JOB_ID, SECRET, make_record, signed, written

KEYS = {"k1": bytes(range(32)), "k2": bytes(range(32, 64))}
KEYRING = Keyring(KEYS, "k1")
PARTITIONS = 4
NOW_US = 1_800_000_000_000_000


class Partitions:
    """The fold over a log, record by record."""

    def __init__(self, keyring: Keyring = KEYRING) -> None:
        self.keyring = keyring
        self.streams: dict[bytes | None, Entries] = {}
        self._offsets: Iterator[int] = itertools.count()

    def require(self) -> None:
        """Require MACs in all partitions."""
        for record in macs_required_records(PARTITIONS):
            assert self.told(record) == ("accepted", None)

    def settle(self, record: Record) -> Settled:
        macs = self.streams.setdefault(macs_stream(record.partition).encode(), Entries())
        return settle(record, self.streams.setdefault(record.key, Entries()), self.keyring, macs)

    def told(
        self, made: OutgoingRecord, key: MacKey | None = None, **changed: object
    ) -> tuple[str, str | None]:
        """Verdict and reason of a record that a publisher with the key appends; `changed` is forged later."""
        settled = self.settle(self.logged(made, key, **changed))
        return settled.verdict, settled.reason

    def logged(self, made: OutgoingRecord, key: MacKey | None = None, **changed: object) -> Record:
        """The record as Kafka has it."""
        headers = made.headers(mac=mac_headers(made, key or self.keyring.mac_key(GATEWAY)))
        partition = partition_for(made.key, PARTITIONS) if made.partition is None else made.partition
        names, values = zip(*headers, strict=True)
        record = Record("t", partition, next(self._offsets), NOW_US, made.key, made.value, names, values)
        return msgspec.structs.replace(record, **changed)


def principal(name: str = "mallory") -> OutgoingRecord:
    """A record that makes a principal."""
    return PrincipalAddition(principal=name, role="operator", token_sha256=token_hash("a token")).record(
        door="http", principal=OPERATOR
    )


def unsigned(made: OutgoingRecord, partition: int | None = None) -> Record:
    """The record as somebody appends it who has no key."""
    names, values = zip(*made.headers(), strict=True)
    where = partition_for(made.key, PARTITIONS) if partition is None else partition
    return Record("t", where, 900, NOW_US, made.key, made.value, names, values)


def said(message_id: str, **more: object) -> Message:
    """A message of which nobody says more than its file or its sender does."""
    plain = {"from": "a", "to": "b", "message_id": message_id, "kind": "k", "body": "hello"}
    return Message.model_validate({**plain, **more})


@pytest.fixture
def log() -> Partitions:
    """A log in which each partition requires MACs."""
    found = Partitions()
    found.require()
    return found


@pytest.mark.requirement("ST-04")
def test_a_record_without_a_mac_is_rejected_from_the_switch_of_its_partition_on() -> None:
    log = Partitions()
    assert log.settle(unsigned(principal("early"))).verdict == "accepted"
    log.require()
    settled = log.settle(unsigned(principal("late")))
    assert (settled.verdict, settled.reason) == ("rejected", "unauthenticated_record")
    assert log.told(principal("late")) == ("accepted", None)
    assert not settled.changes


@pytest.mark.requirement("ST-04")
def test_each_part_of_a_record_is_covered_by_its_mac(log: Partitions) -> None:
    good = log.logged(principal())
    for at, name in enumerate(good.header_names):
        if name in ("ce_id", "ce_source", "ce_type", "ce_mac", "ce_mackey"):
            values = list(good.header_values)
            values[at] = {
                "ce_id": b"another",
                "ce_source": b"http/somebody",
                "ce_type": b"principal.revoked",
                "ce_mac": b"0" * 32,
                "ce_mackey": values[at].replace(b"gateway", b"mqtt"),
            }[name]
            told = log.settle(msgspec.structs.replace(good, header_values=tuple(values)))
            assert (told.verdict, told.reason) == ("rejected", "unauthenticated_record"), name
    told = log.settle(msgspec.structs.replace(good, value=good.value.replace(b"operator", b"viewerrr")))
    assert told.reason == "unauthenticated_record"
    other = b"principal/mallorz"
    same_partition = next(
        key for n in range(99) if partition_for(key := other + b"%d" % n, PARTITIONS) == good.partition
    )
    values = tuple(same_partition if v == good.key else v for v in good.header_values)
    told = log.settle(msgspec.structs.replace(good, key=same_partition, header_values=values))
    assert told.reason == "unauthenticated_record"
    assert log.settle(good).verdict == "accepted"


@pytest.mark.requirement("ST-04")
def test_the_size_of_a_shortened_body_is_covered_too(log: Partitions) -> None:
    cut = oversized(principal(), 10)
    assert log.told(cut) == ("rejected", "too_large")
    bare = log.logged(principal())
    pairs = [*zip(bare.header_names, bare.header_values, strict=True), ("ce_bodysize", b"99999999")]
    names, values = zip(*pairs, strict=True)
    told = log.settle(msgspec.structs.replace(bare, header_names=names, header_values=values))
    assert told.reason == "unauthenticated_record"


def schedule_records() -> Iterator[OutgoingRecord]:
    """Return records that set a schedule and make it run, as each of the bridges would append them."""
    for door in ("mqtt", "file"):
        wanted = ScheduleSet(name="x", request_id="r", every_s=1, recipient="b", kind="k", body="{}")
        yield wanted.record(door=door, principal="a")
        ran = ScheduleMissed(name="x", revision=1, run_at=NOW_US)
        yield ran.record(door=door, principal="a")


@pytest.mark.requirement("ST-05")
def test_a_bridges_key_makes_no_principal_and_no_other_doors_message(log: Partitions) -> None:
    posted = verified_message("m1", "a", "b", "k", "hello", "text/plain")
    of_file = said("m1").record(door="file", principal="file")
    of_mqtt = posted.record(door="mqtt", principal="a")
    mqtt, file = KEYRING.mac_key(MQTT_BRIDGE), KEYRING.mac_key(FILE_BRIDGE)
    for made, key in (
        (principal(), mqtt),
        (principal(), file),
        (of_file, mqtt),
        (of_mqtt, mqtt),
        (of_mqtt, file),
        (
            JobRegistration(
                sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
                job_id=JOB_ID,
                description="",
            ).record(door="mqtt", principal="x"),
            mqtt,
        ),
        *((made, key) for made in schedule_records() for key in (mqtt, file)),
    ):
        assert log.told(made, key) == ("rejected", "unauthenticated_record"), (made.type, key.signer)
    assert log.told(of_file, file) == ("accepted", None)
    assert of_file.type == MESSAGE_POSTED


@pytest.mark.requirement("LM-05")
def test_the_mqtt_bridges_key_counts_for_the_refusals_of_its_door_alone(log: Partitions) -> None:
    refusal = Refusal(request_id="r", reason="rate_limited", why="too many", principal="a", route="MQTT outbox")
    key = KEYRING.mac_key(MQTT_BRIDGE)
    assert log.told(refusal.record(door="mqtt", principal=refusal.principal), key) == (
        "rejected",
        "rate_limited",
    )
    assert log.told(refusal.record(door="http", principal=refusal.principal), key) == (
        "rejected",
        "unauthenticated_record",
    )


@pytest.mark.requirement("ST-05")
def test_the_file_bridges_key_vouches_for_no_senders_name_no_task_and_no_conversation(log: Partitions) -> None:
    file = KEYRING.mac_key(FILE_BRIDGE)
    for at, more in enumerate(
        (
            {"from_verified": True},
            {"from_task": "t-1"},
            {"thread": "c-1", "parent_thread": "c-0", "root_thread": "c-0", "opens_thread": True},
            {"thread": "c-1", "root_thread": "c-1"},
            {"on_behalf_of": "operator"},
        )
    ):
        claimed = said(f"m{at}", **more)
        by_file = claimed.record(door="file", principal="file")
        assert log.told(by_file, file) == ("rejected", "unauthenticated_record"), more
        by_gateway = claimed.record(door="http", principal="a")
        assert log.told(by_gateway) == ("accepted", None), more


@pytest.mark.requirement("ST-04")
def test_what_its_author_signs_needs_no_mac(log: Partitions) -> None:
    assert log.told(
        JobRegistration(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
            job_id=JOB_ID,
            description="",
        ).record(door="cli", principal="operator")
    ) == ("accepted", None)
    where = partition_for(f"job/{JOB_ID}".encode(), PARTITIONS)
    record = msgspec.structs.replace(make_record(written(signed(1, "started"))), partition=where)
    assert log.settle(record).verdict == "accepted"


@pytest.mark.requirement("ST-04")
def test_a_stream_is_in_one_partition_alone(log: Partitions) -> None:
    assert log.told(
        JobRegistration(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
            job_id=JOB_ID,
            description="",
        ).record(door="cli", principal="operator")
    ) == ("accepted", None)
    where = partition_for(f"job/{JOB_ID}".encode(), PARTITIONS)
    event = make_record(written(signed(1, "started")))
    other = (where + 1) % PARTITIONS
    told = log.settle(msgspec.structs.replace(event, partition=other))
    assert (told.verdict, told.reason) == ("rejected", "unauthenticated_record")
    made = principal()
    elsewhere = (partition_for(made.key, PARTITIONS) + 1) % PARTITIONS
    assert log.told(made, partition=elsewhere) == ("rejected", "unauthenticated_record")


@pytest.mark.requirement("ST-06")
def test_a_key_ends_at_a_position_of_the_log_and_for_good() -> None:
    log = Partitions(Keyring(KEYS, "k2"))
    log.require()
    old = Keyring(KEYS, "k1").mac_key(GATEWAY)
    assert log.told(principal("before"), old) == ("accepted", None)
    for record in mac_key_ended_records(PARTITIONS, "k1"):
        assert log.told(record) == ("accepted", None)
        assert log.told(record) == ("duplicate", None)
    assert log.told(principal("after"), old) == ("rejected", "unauthenticated_record")
    assert log.told(principal("after")) == ("accepted", None)


@pytest.mark.requirement("ST-06")
def test_rules_are_set_by_authenticated_records_about_their_own_partition_alone(log: Partitions) -> None:
    fresh = Partitions()
    (first, second, *_) = macs_required_records(PARTITIONS)
    assert fresh.settle(unsigned(first, 0)).reason == "unauthenticated_record"
    assert fresh.told(first, KEYRING.mac_key(MQTT_BRIDGE)) == ("rejected", "unauthenticated_record")
    assert fresh.told(first, partition=1) == ("rejected", "malformed")
    (ended, *_) = mac_key_ended_records(PARTITIONS, "k2")
    assert fresh.told(ended) == ("rejected", "unknown_stream")
    assert log.told(first) == ("duplicate", None)
    assert log.told(ended, partition=second.partition) == ("rejected", "malformed")
    # A record cannot end the key of its own MAC.
    assert log.told(next(mac_key_ended_records(PARTITIONS, "k1"))) == ("rejected", "illegal_transition")
    body = MacKeyEnded(partition=0, key_id="k2").record(door="x", principal="x")
    assert log.told(msgspec.structs.replace(body, type=MACS_REQUIRED, partition=0)) == ("rejected", "malformed")
    other = MacsRequired(partition=0, partitions=99).record(door="x", principal="x")
    assert log.told(msgspec.structs.replace(other, partition=0)) == ("duplicate", None)


@pytest.mark.requirement("ST-06")
def test_a_reader_without_a_new_key_reads_its_keys_again_and_then_stops(log: Partitions) -> None:
    new = Keyring(KEYS, "k2").mac_key(GATEWAY)
    stale = Partitions(Keyring({"k1": KEYS["k1"]}, "k1"))
    stale.require()
    with pytest.raises(MissingKeyError, match="k2"):
        stale.told(principal(), new)
    again = Partitions(Keyring({"k1": KEYS["k1"]}, "k1", lambda: Keyring(KEYS, "k2")))
    again.require()
    assert again.told(principal(), new) == ("accepted", None)
    # A name that no key of this installation ever had stops nobody.
    for name in ("k9:0123456789abcdef/gateway", "k2:0123456789abcdef/gateway", "k2/gateway", "é", ""):
        forged = MacKey(name, "k9", GATEWAY, bytes(32))
        told = stale.told(principal(), forged)
        assert told in (("rejected", "unauthenticated_record"), ("rejected", "malformed")), name


@pytest.mark.requirement("ST-06")
def test_who_knows_a_key_that_has_ended_makes_nobody_stop() -> None:
    keys = {**KEYS, "k3": bytes(range(64, 96))}
    thief = Keyring({"k1": keys["k1"], "made-up": bytes(32)}, "made-up").mac_key(GATEWAY)
    log = Partitions(Keyring(KEYS, "k2"))
    log.require()
    with pytest.raises(MissingKeyError):
        log.told(principal("before"), thief)
    for record in mac_key_ended_records(PARTITIONS, "k1"):
        assert log.told(record) == ("accepted", None)
    assert log.told(principal("after"), thief) == ("rejected", "unauthenticated_record")
    # A key that was made later is known by the one between, which has not ended.
    with pytest.raises(MissingKeyError, match="k3"):
        log.told(principal(), Keyring(keys, "k3").mac_key(GATEWAY))


@pytest.mark.requirement("ST-06")
def test_any_older_key_proves_that_a_newer_one_exists_up_to_six_rotations_later() -> None:
    keys = {f"k{n}": bytes([n]) * 32 for n in range(1, 9)}
    newest = Keyring(keys, "k8").mac_key(GATEWAY)
    assert len(newest.name) < 256
    for known in ("k2", "k7"):
        with pytest.raises(MissingKeyError, match="k8"):
            Keyring({known: keys[known]}, known).known_mac_key(newest.name)
    assert Keyring({"k1": keys["k1"]}, "k1").known_mac_key(newest.name) is None


@pytest.mark.requirement("ST-06")
def test_the_order_of_the_keys_in_their_file_decides_on_no_record() -> None:
    turned = Keyring(dict(reversed(KEYS.items())), "k1")
    for active in KEYS:
        key = Keyring(KEYS, active).mac_key(GATEWAY)
        assert turned.known_mac_key(key.name) == key


@pytest.mark.requirement("ST-06")
@pytest.mark.parametrize("error", [SettingsError("readable by others"), PermissionError(13, "denied")])
def test_keys_that_cannot_be_read_again_stop_the_reader_and_reject_nothing(error: Exception) -> None:
    def reload() -> Keyring:
        raise error

    stale = Partitions(Keyring({"k1": KEYS["k1"]}, "k1", reload))
    stale.require()
    with pytest.raises(MissingKeyError, match=r"k2.*(readable by others|denied)"):
        stale.told(principal(), Keyring(KEYS, "k2").mac_key(GATEWAY))


@pytest.mark.requirement("ST-06")
def test_hostile_names_of_keys_take_a_bounded_memory(log: Partitions) -> None:
    known = KEYRING.mac_key(GATEWAY).name
    for letters in itertools.islice(itertools.product("abcdefghij", repeat=4), 3_000):
        forged = MacKey(known.replace("gateway", "".join(letters)), "k1", GATEWAY, bytes(32))
        assert log.told(principal(), forged) == ("rejected", "unauthenticated_record")
    assert len(KEYRING._mac_keys) <= 1_000
    assert log.told(principal()) == ("accepted", None)
