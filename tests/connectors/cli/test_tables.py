"""`trunkline tables`: the tables in a catalog, where Spark SQL finds them by name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from connectors.programs.local_stack.java_programs import java_home
from connectors.programs.local_stack.part_plan import JVM_LOCALE, spark_home
from jobs import build_views
from schemas.settings.settings import PROJECT_ROOT, KafkaSettings, Settings, StorageSettings
from schemas.streams.fold import VIEW_TABLES
from tests.audited_ledger import AuditedLedger, ledger_row_at
from tests.broker_processes import free_port, program_environment
from tests.connectors.programs.local_stack.conftest import run_cli
from tests.jobs.settled_backbone import Backbone
from tests.jobs.topic_load import event, registration
from tests.notebook_run import run_in_kernel
from tests.s3_server import ObjectStore

pytestmark = pytest.mark.requirement("DP-20")


def ask_by_name(answer: dict[str, Any], *statements: str) -> list[str]:
    """The lines that `spark-sql` prints, started as docs/how-to/query_the_tables.md says."""
    program = [str(spark_home() / "bin" / "spark-sql"), "--properties-file", answer["properties"]]
    environment = {**os.environ, **JVM_LOCALE, "JAVA_HOME": str(java_home()), "SPARK_HOME": str(spark_home())}
    done = subprocess.run(
        [*program, "-e", "; ".join(statements)], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def with_tables(settings: Settings) -> Settings:
    """A ledger of five rows, and its views."""
    AuditedLedger(settings).commit([ledger_row_at(0, at, entries=None) for at in range(5)])
    build_views.catch_up(settings)
    return settings


def register(settings: Settings) -> dict[str, Any]:
    """Register, and return the answer."""
    done = run_cli(settings, "tables", "register", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(400)
def test_spark_finds_the_registered_tables_by_name_with_the_descriptions_of_their_columns(
    tmp_path: Path,
) -> None:
    settings = Settings(data_dir=tmp_path / "dä ta")
    nothing = run_cli(settings, "tables", "register")
    assert nothing.returncode == 3 and "'streams' makes them" in nothing.stderr
    with_tables(settings)
    wrong = run_cli(settings, "tables", "register", "--database", "trünkline")
    assert wrong.returncode == 2 and "expected letters" in wrong.stderr
    wrong = run_cli(settings, "tables", "register", "--metastore", "metastore:9083")
    assert wrong.returncode == 2 and "expected thrift://HOST:PORT" in wrong.stderr
    away = run_cli(settings, "tables", "register", "--metastore", "thrift://127.0.0.1:1")
    assert away.returncode == 5 and "the metastore thrift://127.0.0.1:1 does not answer" in away.stderr
    answer = register(settings)
    assert set(answer["new"]) == {"ledger", *VIEW_TABLES}
    said = ask_by_name(answer, "SELECT count(*) FROM trunkline.ledger", "DESCRIBE trunkline.ledger")
    assert said[0] == "5"
    rows = [[cell.strip() for cell in line.split("\t")] for line in said[1:]]
    comments = {row[0]: row[-1] for row in rows}
    assert len(comments["offset"]) > 10 and len(comments["verdict"]) > 10
    elsewhere = StorageSettings(tables=str(tmp_path / "elsewhere"))
    refused = run_cli(with_tables(settings.model_copy(update={"storage": elsewhere})), "tables", "register")
    assert refused.returncode == 4 and "drop it there first" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_reads_tables_in_an_object_store_by_name_and_in_a_notebook_once_set_up_has_its_jars(
    tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = StorageSettings(tables=f"s3://{s3.bucket}/tables")
    unheard = KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}")
    backbone = Backbone(tmp_path / "data")
    backbone.settings = backbone.settings.model_copy(update={"storage": storage, "kafka": unheard})
    settings, job = backbone.settings, "0badcafe"
    backbone.settle(registration(job, backbone.keyring), event(job, 1, "started"), event(job, 2, "completed"))
    build_views.catch_up(settings)
    environment = program_environment(settings)
    assert subprocess.run(["./trunkline", "set-up"], cwd=PROJECT_ROOT, env=environment).returncode == 0
    register(settings)
    again = register(settings)
    assert (again["new"], len(again["tables"])) == ([], 1 + len(VIEW_TABLES))
    assert ask_by_name(again, "SELECT count(*) FROM trunkline.ledger")[0] == "3"
    monkeypatch.setenv("TRUNKLINE_AUDIT_JOB", job)
    text = run_in_kernel("job_audit", settings, tmp_path, monkeypatch).text
    assert "1 of 1 registry rows stand at the ledger's end and agree with it" in text
