"""The doctor's check of tables that fall behind the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.cli.doctor.findings import OK, WARN, ok
from connectors.cli.doctor.tables import check_blobs, check_tables
from connectors.log.log_end import LogEnd
from jobs import build_views
from schemas.settings.settings import KafkaSettings, Settings, StorageSettings
from schemas.streams.blob.blobs import BlobStored
from tests.audited_ledger import AuditedLedger, ledger_row_at
from tests.broker_processes import wait_until
from tests.connectors.folded_log import FoldedLog
from tests.jobs.topic_load import append_all, registration
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
    away = settings.model_copy(update={"storage": StorageSettings(blobs="s3://bucket/blobs")})
    assert check_blobs(away).level == OK
