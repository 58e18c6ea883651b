"""The doctor's check of tables that fall behind the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow.fs import FileSelector

from connectors.cli.doctor.findings import FAIL, OK, WARN, Finding, ok
from connectors.cli.doctor.tables import check_blobs, check_object_store, check_tables, check_views
from connectors.log.log_end import LogEnd
from jobs import build_views
from schemas.keys.sealing import Keyring
from schemas.settings.settings import KafkaSettings, Settings, StorageSettings
from schemas.streams.blob.blobs import BlobStored
from schemas.tables.delta_files import table_storage
from tests.audited_ledger import AuditedLedger, ledger_row_at
from tests.broker_processes import wait_until
from tests.connectors.folded_log import FoldedLog
from tests.jobs.topic_load import append_all, registration
from tests.s3_server import ObjectStore
from tests.schemas.hub_records import storing
from tests.schemas.stream_records import as_read


@pytest.mark.requirement("OP-23")
def test_tables_that_lack_old_records_are_a_warning_that_names_the_part(backbone_settings, keyring):
    append_all(backbone_settings, [registration(f"{number:08x}", keyring) for number in range(20)])
    ends = LogEnd(backbone_settings.kafka).offsets(10)
    # New records may be missing, however long ago the last micro-batch was.
    assert check_tables(backbone_settings).level == OK
    wait_until(lambda: check_tables(backbone_settings, 0.1).level == WARN, 10, "the records are old enough")
    ledger = AuditedLedger(backbone_settings.data_path)
    build_views.catch_up(backbone_settings)
    count = sum(ends.values())
    finding = check_tables(backbone_settings, 0.1)
    assert f"{count} are not in the ledger and {count} are not in the views" in finding.found
    assert "trunkline up" in finding.mend
    ledger.commit([ledger_row_at(p, at, entries=None) for p, end in ends.items() for at in range(end)])
    finding = check_tables(backbone_settings, 0.1)
    assert finding.level == WARN and f"{count} are not in the views; the newest micro-batch" in finding.found
    build_views.catch_up(backbone_settings)
    finding = check_tables(backbone_settings, 0.1)
    assert finding.level == OK and "the newest micro-batch was committed" in finding.found


@pytest.mark.requirement("OP-23")
def test_without_kafka_nobody_knows_how_far_the_tables_are(tmp_path):
    away = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    finding = check_tables(Settings(data_dir=tmp_path, kafka=away))
    assert finding.level == WARN and "not known" in finding.found


@pytest.mark.requirement("DL-25")
def test_a_stored_blob_without_its_object_is_a_warning_that_names_the_object(tmp_path, keyring):
    settings = Settings(data_dir=tmp_path)
    assert check_blobs(settings).level == OK
    log = FoldedLog(keyring)
    body = BlobStored.model_validate(storing())
    log.add(as_read(body.record(door="http", principal="ann")))
    log.write_rows(settings)
    finding = check_blobs(settings)
    assert (
        finding.level == WARN
        and f"1 of 1 blobs have no whole object below {settings.blobs_root}" in finding.found
    )
    assert body.object in finding.found
    Path(settings.blobs_root).mkdir()
    Path(settings.blobs_root, body.object).write_bytes(b"stars")
    assert check_blobs(settings) == ok(f"1 blobs below {settings.blobs_root}")


@pytest.mark.requirement("DP-17")
def test_an_object_store_is_looked_into(tmp_path: Path, keyring: Keyring, s3: ObjectStore):
    settings = Settings(data_dir=tmp_path, storage=StorageSettings(tables=f"s3://{s3.bucket}/tables"))
    assert check_object_store(settings) == ok(
        f"s3://{s3.bucket}/tables writes, lists, and refuses to write over an object"
    )
    assert not table_storage(settings.tables_root).get_file_info(FileSelector("", allow_not_found=True))
    assert check_views(settings).level == WARN
    log = FoldedLog(keyring)
    body = BlobStored.model_validate(storing())
    log.add(as_read(body.record(door="http", principal="ann")))
    log.write_rows(settings)
    assert "1 of 1 blobs have no whole object" in check_blobs(settings).found
    with table_storage(settings.blobs_root).open_output_stream(body.object) as stream:
        stream.write(b"stars")
    assert check_blobs(settings) == ok(f"1 blobs below {settings.blobs_root}")


@pytest.mark.requirement("DP-17")
def test_an_object_store_that_cannot_be_used_is_a_fault_that_says_what_to_do(tmp_path: Path, s3: ObjectStore):
    def found_at(bucket: str) -> Finding:
        return check_object_store(
            Settings(data_dir=tmp_path, storage=StorageSettings(tables=f"s3://{bucket}/x"))
        )

    missing = found_at("nowhere")
    assert missing.level == FAIL and "credentials" in missing.mend
    s3.fail(unconditional=1)
    careless = found_at(s3.bucket)
    assert careless.level == FAIL and "writes over what is there" in careless.found
    s3.fail(unlisted=1)
    assert "does not list" in found_at(s3.bucket).found and found_at(s3.bucket).level == FAIL
    s3.fail(ahead_s=600)
    wrong = found_at(s3.bucket)
    assert wrong.level == WARN and "clock" in wrong.found and "NTP" in wrong.mend
