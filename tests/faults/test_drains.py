"""Many drains of one mailbox, two gateways, kills: each message is handed out once, and the record shows it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import httpx
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from connectors.hub.serving.identities import request_uuid
from connectors.programs.local_stack import LocalStack
from jobs.build_views import catch_up
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring, load_keyring
from schemas.settings.settings import Settings
from schemas.streams.fold import settle
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_CLAIMED
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_POSTED, MessageRow
from schemas.tables.ledger import COLUMNS, LedgerRow, record_of_row
from tests.broker_processes import BrokerProcess, wait_until
from tests.faults.backbone_states import differences, ledger_in_order, state_of_refold, state_of_tables
from tests.faults.drain_load import (
    DRAINER,
    MESSAGES,
    PATIENCE_S,
    Drainer,
    Sender,
    Traffic,
    drain_request,
    killed_under_load,
    payload_of,
    tokens_of,
)
from tests.faults.killed_gateways import Gateways
from tests.faults.test_agreement import end_offsets, views_are_at
from tests.jobs.conftest import settle_all
from tests.own_settings import own_settings

REPEATED_MOST = 300
MANY_KILLS = 10


def assert_each_was_handed_out_once(senders: list[Sender], drainers: list[Drainer]) -> dict[str, str]:
    """Each message in the answer to exactly one request id, as it was sent; returns that id by message id."""
    sent = {
        message_id: (sender.principal, number)
        for sender in senders
        for message_id, number in sender.delivered.items()
    }
    handed: dict[str, str] = {}
    for drainer in drainers:
        for request_id, (_, messages) in drainer.answered.items():
            for message in messages:
                message_id = message["id"]
                assert message_id not in handed, f"handed to {handed[message_id]} and {request_id}"
                assert message_id in sent, f"{request_id} was handed what was not delivered"
                handed[message_id] = request_id
                principal, number = sent[message_id]
                said = {key: value for key, value in message.items() if key != "timestamp"}
                assert said == {
                    "id": message_id,
                    "sender": principal,
                    "recipient": DRAINER,
                    "type": "note",
                    "payload": payload_of(number),
                }
    assert handed.keys() == sent.keys(), "delivered, and not handed out"
    return handed


def assert_repeated_drains_get_the_same(gateways: Gateways, token: str, drainers: list[Drainer]) -> None:
    """Some of the drains once more at each gateway, old ones and those that were cut among them."""
    drains = [drain for drainer in drainers for drain in drainer.answered.items() if drain[1][1]]
    chosen = random.Random(len(drains)).sample(drains, min(len(drains), REPEATED_MOST))
    for settings in gateways.settings:
        with httpx.Client(headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=15) as http:
            for request_id, (limit, messages) in chosen:
                answer = http.get(settings.gateway_url + MESSAGES, **drain_request(request_id, limit))
                assert answer.json() == {"messages": messages, "left": 0}, request_id


def _first_digits(request_id: object) -> str:
    """The part of a claim's id that all claims of one drain share.

    If others were faster, a drain asks again under an id with another last byte.
    """
    return str(request_id)[:-2]


def claims_in(ledger: pa.Table, keyring: Keyring) -> dict[str, list[str]]:
    """By message, each request that its mailbox's stream in the ledger handed it to, told by a refold."""
    found: dict[str, list[str]] = {}
    entries = Entries()
    for column in ("logged_at", "sent_at"):
        moments = ledger[column].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        ledger = ledger.set_column(ledger.schema.get_field_index(column), column, moments)
    for values in ledger.select(list(COLUMNS)).to_pylist():
        row = LedgerRow(**values)
        settled = settle(record_of_row(row, keyring), entries, keyring, Entries())
        assert settled.verdict == row.verdict, row
        for change in settled.changes:
            if row.type == MESSAGE_CLAIMED and isinstance(change.row, MessageRow):
                found.setdefault(change.row.message_id, []).append(_first_digits(change.row.request_id))
    return found


def assert_the_record(
    settings: Settings, keyring: Keyring, handed: dict[str, str], ends: dict[int, int], kills: int
) -> None:
    """Check ledger and views for each message that was handed to a request; `ends`: before any repeat."""
    whole = ledger_in_order(settings)
    ledger = whole.filter(pa.compute.equal(whole["stream_id"], f"default/{DRAINER}"))
    columns = ("partition", "offset", "type", "verdict", "ce_id")
    rows = ledger.select(list(columns)).to_pylist()
    posted = [row for row in rows if row["type"] == MESSAGE_POSTED and row["verdict"] == "accepted"]
    assert Counter(row["ce_id"] for row in posted) == Counter(handed.keys()), "not each in the ledger once"
    assert {row["verdict"] for row in rows} == {"accepted", "duplicate"}
    again = [row for row in rows if row["verdict"] == "duplicate" and row["offset"] < ends[row["partition"]]]
    assert {row["type"] for row in again} <= {MESSAGE_POSTED, MESSAGE_CLAIMED}
    # A few kills may miss that moment.
    is_hit = MESSAGE_CLAIMED in {row["type"] for row in again}
    assert is_hit or kills < MANY_KILLS, "no kill came between a drain and its answer"
    requests = {
        message_id: _first_digits(request_uuid(DRAINER, f"drain/{request_id}"))
        for message_id, request_id in handed.items()
    }
    assert claims_in(ledger, keyring) == {message_id: [request] for message_id, request in requests.items()}
    table = DeltaTable(settings.table_path(MAILBOX_VIEW)).to_pyarrow_table()
    shown = [row for row in table.to_pylist() if row["recipient"] == DRAINER]
    assert {row["status"] for row in shown} == {"claimed"}
    assert {row["message_id"]: _first_digits(row["request_id"]) for row in shown} == requests
    assert len(shown) == len(requests), "a message has two rows"
    assert {row["handed_to"] for row in shown} == {f"http/{DRAINER}"}
    assert differences(state_of_tables(settings), state_of_refold(whole, keyring)) == []


class Drained(NamedTuple):
    """A log after the load and the kills: who was handed what, and where the log ended before any repeat."""

    settings: Settings
    senders: list[Sender]
    drainers: list[Drainer]
    ends: dict[int, int]
    kills: int


def run_drains(
    settings: Settings, folder: Path, total: int, victims: list[tuple[int, ...]], seed: int
) -> Drained:
    """The messages, the drains, the kills, and the repeats."""
    gateways = Gateways(settings, folder)
    try:
        tokens = tokens_of(gateways)
        senders, drainers = killed_under_load(gateways, tokens, Traffic(total), victims, seed)
        ends = end_offsets(settings)
        assert_repeated_drains_get_the_same(gateways, tokens[DRAINER], drainers)
    finally:
        gateways.stop()
    return Drained(settings, senders, drainers, ends, len(victims))


@pytest.fixture(scope="module")
def drained(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Drained:
    """Some messages and two kills."""
    folder = tmp_path_factory.mktemp("drained")
    settings = own_settings(kafka_broker, mosquitto_broker, folder)
    return run_drains(settings, folder, 240, [(0,), (0, 1)], seed=20261122)


@pytest.mark.requirement("HH-06")
@pytest.mark.timeout(300)
def test_each_message_goes_to_one_of_eight_drains_though_gateways_are_killed(drained: Drained) -> None:
    assert len(assert_each_was_handed_out_once(drained.senders, drained.drainers)) == 240


@pytest.mark.requirement("HH-06")
@pytest.mark.timeout(300)
def test_ledger_and_views_have_each_message_once_with_the_drain_that_it_went_to(
    drained: Drained, spark: SparkSession
) -> None:
    settle_all(spark, drained.settings)
    catch_up(drained.settings)
    handed = assert_each_was_handed_out_once(drained.senders, drained.drainers)
    assert_the_record(drained.settings, load_keyring(drained.settings), handed, drained.ends, drained.kills)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_drains_share_twenty_thousand_messages_at_two_gateways_that_are_killed(
    backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    draw = random.Random(20261123)
    victims = [draw.choice([(0,), (1,), (0, 1)]) for _ in range(12)]
    with LocalStack(backbone_settings, parts=("streams",)):
        drained = run_drains(backbone_settings, tmp_path, 20_000, victims, seed=20261123)
        ends = end_offsets(backbone_settings)
        wait_until(lambda: views_are_at(backbone_settings, ends), PATIENCE_S, "the views are at the log's end")
    handed = assert_each_was_handed_out_once(drained.senders, drained.drainers)
    assert len(handed) == 20_000
    assert_the_record(backbone_settings, keyring, handed, drained.ends, drained.kills)
