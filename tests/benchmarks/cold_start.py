"""How long the hub takes to start on the view tables of a long life, and how much memory it then holds.

With jobs alone: writes the tables of JOBS finished and running jobs and loads them as the live view does, in a
process of its own, without Kafka.

With `--registry` or `--messages`: appends all records of that life to a real Kafka, folds them, writes the view
tables as of the log's end, and starts the gateway program on both, from its start until it serves. Agents,
tasks, tokens and containers are the registry's rows; one task in ten runs, on another host. The files are in
the page cache. Of several starts the slowest and the largest count.

    ./trunkline bench cold_start --jobs 100000 --json
    ./trunkline bench cold_start --registry 100000 --messages 100000 --json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from deltalake import write_deltalake
from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition  # type: ignore[import-untyped]

from connectors.hub.live.live_view import LiveView
from connectors.log.kafka_topic import ensure_topic
from connectors.log.publisher import Publisher
from schemas.fold import life_cycles as states
from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring, ensure_keyring, job_secret_purpose
from schemas.log_access.kafka_clients import client_options
from schemas.settings.settings import PROJECT_ROOT, GatewaySettings, Settings, XmlPumpSettings
from schemas.streams.agents.agent_registry import REGISTRY_AGENTS, AgentDefined
from schemas.streams.container import container_registry as containers
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import REGISTRY_JOBS, JobRegistration
from schemas.streams.kinds import STREAM_ENTRIES, VIEWS
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_BODIES, Message
from schemas.streams.task import task_registry as tasks
from schemas.tables.view_arrow import VIEW_ARROW
from schemas.tables.view_progress import ViewProgress
from schemas.wire.partitions import partition_for
from schemas.wire.record import OutgoingRecord
from tests.benchmarks.bench_report import Bench, judged, teller
from tests.connectors.live.local_stores import entries_of, streams_of
from tests.jobs.topic_load import raw_event
from tests.schemas.job_records import signed
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.ids import AGENT, CONTAINER, JOB, MAILBOX, TASK, stream_key
from trunkline_agent.wire.strict_json import canonical

_SHELF = 4096
TableRow = tuple[object, ...]
_KINDS = ("started", *["progress"] * 8, "completed")
_SECRET = "a-secret"
_KEYRING = Keyring({"bench": b"k" * 32}, "bench")
# The hub's part: an agent for so many rows, how many starts, and how long one may take.
_ROWS_OF_AN_AGENT = 1000
_STARTS = 3
_START_S = 120.0
_BEFORE_THE_END = tuple(containers.CONTAINER_TRANSITIONS)[:5]
# The stream of a view's row, by the field that names it.
_STREAM_OF = {
    REGISTRY_JOBS: (JOB, "job_id"),
    REGISTRY_AGENTS: (AGENT, "agent_name"),
    tasks.REGISTRY_TASKS: (TASK, "task_id"),
    tasks.REGISTRY_TOKENS: (TASK, "task_id"),
    containers.REGISTRY_CONTAINERS: (CONTAINER, "container"),
}


say = teller("cold_start")


def _records(job: str, events: int, keyring: Keyring = _KEYRING) -> list[OutgoingRecord]:
    records = [
        JobRegistration(
            sealed_secret=keyring.seal(_SECRET.encode(), job_secret_purpose(job)),
            job_id=job,
            description=f"benchmark job {job}: read, change, test",
        ).record(door="cli", principal="operator")
    ]
    for seq in range(1, events + 1):
        body = signed(seq, _KINDS[seq - 1], _SECRET, job_id=job, detail=f"{seq}/{events} of {job}")
        records.append(raw_event(job, canonical(body)))
    return records


def _folded(job: str, events: int, offset: int) -> tuple[Sequence[TableRow], TableRow, int]:
    """Rows of `stream_entries` and the row of `registry_jobs` of one job, and the next offset."""
    entries, row = Entries(), None
    for outgoing in _records(job, events):
        row = settle(as_read(outgoing, offset, partition=0), entries, _KEYRING, Entries()).changes[0].row
        offset += 1
    assert row is not None
    stored = [("job", job, key, value, FOLD_VERSION, 0, offset - 1) for key, value in entries.stored().items()]
    return stored, (*(getattr(row, name) for name in row.__struct_fields__), 0, offset - 1), offset


def _write(settings: Settings, table: str, rows: Sequence[TableRow], offsets: dict[int, int]) -> None:
    schema = VIEW_ARROW[table]
    arrays = [
        pa.array(column, pa.int64()).cast(field.type) if pa.types.is_timestamp(field.type)
        else pa.array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]  # fmt: skip
    whole = pa.Table.from_arrays(arrays, schema=schema)
    write_deltalake(
        settings.table_path(table),
        whole.append_column("shelf", pa.array([n // _SHELF for n in range(len(rows))], pa.int32())),
        partition_by=["shelf"],
        commit_properties=ViewProgress(offsets, 0).commit_properties(),
    )


def write_tables(settings: Settings, jobs: int) -> None:
    """The tables of `jobs` jobs: nine of ten have ended after ten events, one runs."""
    entries: list[TableRow] = []
    offset, rows = 0, []
    for number in range(jobs):
        found, row, offset = _folded(secrets.token_hex(4), 10 if number % 10 else 3, offset)
        entries += found
        rows.append(row)
    _write(settings, REGISTRY_JOBS, rows, {0: offset})
    _write(settings, STREAM_ENTRIES, entries, {0: offset})


def load_once(folder: str) -> dict[str, float | int]:
    """Load the tables below `folder` as the live view does, in this process."""
    process = psutil.Process()
    before, began = process.memory_info().rss, time.monotonic()
    view = LiveView(Settings(data_dir=Path(folder)), _KEYRING)
    view.load()
    seconds = time.monotonic() - began
    rss = process.memory_info().rss
    found = {
        "jobs": len(view.rows(REGISTRY_JOBS)),
        "streams": len(streams_of(view._state)),
        "load_s": round(seconds, 2),
        "rss_mb": round(rss / 1e6),
        "loaded_mb": round((rss - before) / 1e6),
    }
    view.close()
    return found


def _agent(number: int) -> AgentDefined:
    return AgentDefined(
        agent_name=f"agent-{number}",
        image="bench/none",
        description="an agent of the benchmark",
        capabilities=["answer", "review"],
        hardened=False,
    )


def _task_records(number: int, agent: AgentDefined, is_running: bool) -> Iterator[OutgoingRecord]:
    """Yield a task's records in the log: its start, its container's states, and its end unless it runs."""
    task = str(uuid.UUID(int=number + 1, version=4))
    start = tasks.TaskStart(
        task_id=task,
        request_id=task,
        description=f"benchmark task {number}: read, change, test",
        agent_name=agent.agent_name,
        capabilities=agent.capabilities,
        token_sha256=hashlib.sha256(task.encode()).hexdigest(),
        expiry_ms=24 * 3600 * 1000,
    )
    yield start.record(door="http", principal="operator")
    for state in (*_BEFORE_THE_END, *(() if is_running else (containers.RECYCLING, containers.RECYCLED))):
        change = containers.ContainerChange(
            container=f"task-{task}",
            state=state,
            task_id=task,
            agent_name=agent.agent_name,
            backend="local-process",
            launcher="gateway-0123456789ab",
            host="another-host",
            handle=f"process/{number + 1}/1000" if state == states.RUNNING else None,
        )
        yield change.record(door="launcher", principal="another-host")
        if state == containers.MONITORING and not is_running:
            end = tasks.TaskCompletion(
                task_id=task, request_id=f"{task}-done", result="ok: 12 files, 340 lines"
            )
            yield end.record(door="http", principal=agent.agent_name)


def _message_record(number: int, mailboxes: int) -> OutgoingRecord:
    payload = {"number": number, "text": "please have a look at the change and say what you think of it"}
    sender = f"worker-{number * 7 % mailboxes}"
    message = {
        "message_id": str(uuid.UUID(int=number + 1, version=4)),
        "from": sender,
        "from_verified": True,
        "to": f"worker-{number % mailboxes}",
        "kind": "ask",
        "body": canonical(payload).decode(),
    }
    return Message.model_validate(message).record(door="http", principal=sender)


def history(args: argparse.Namespace, keyring: Keyring) -> Iterator[OutgoingRecord]:
    """All records of the life that is asked for, stream by stream in order."""
    for number in range(args.jobs):
        yield from _records(secrets.token_hex(4), 10 if number % 10 else 3, keyring)
    agents = [_agent(number) for number in range(-(-args.registry // _ROWS_OF_AN_AGENT))]
    for agent in agents:
        yield agent.record(cause="", door="hub", principal="hub")
    # A task has three rows: its own, its token's, its container's.
    for number in range(-(-(args.registry - len(agents)) // 3)):
        yield from _task_records(number, agents[number % len(agents)], number % 10 == 0)
    for number in range(args.messages):
        yield _message_record(number, args.mailboxes)


def append_all(settings: Settings, records: Iterator[OutgoingRecord]) -> int:
    """Append all records and wait for Kafka; how many there are."""
    with Publisher(settings, linger_ms=20) as publisher:
        waiting = [publisher.append(record) for record in records]
        for append in waiting:
            append.result(_START_S)
    return len(waiting)


def _stream_of(view: str, row: Row) -> str:
    if view in (MAILBOX_VIEW, MESSAGE_BODIES):
        return stream_key(MAILBOX, f"{row.realm}/{row.recipient}")  # type: ignore[attr-defined]
    kind, field = _STREAM_OF[view]
    return stream_key(kind, getattr(row, field))


def write_views(settings: Settings, keyring: Keyring) -> dict[str, int]:
    """Fold the whole log and write the tables as of its end, as the views' job does. Rows by table."""
    live_view, counts = LiveView(settings, keyring), {}
    live_view.open()
    try:
        offsets, partitions = live_view.next_offsets(), settings.kafka.partitions
        for name, view in VIEWS.items():
            rows = []
            for row in live_view.rows(name):
                partition = partition_for(_stream_of(name, row).encode(), partitions)
                fields = (getattr(row, column) for column in view.__struct_fields__)
                rows.append((*fields, partition, live_view.row_offset(name, row.key)))
            if rows:
                _write(settings, name, rows, offsets)
                counts[name] = len(rows)
        entries = []
        for stream, held in entries_of(live_view._state).items():
            kind, _, stream_id = stream.partition("/")
            partition = partition_for(stream.encode(), partitions)
            for key, value in held.items():
                entries.append((kind, stream_id, key, value, FOLD_VERSION, partition, offsets[partition] - 1))
        _write(settings, STREAM_ENTRIES, entries, offsets)
    finally:
        live_view.close()
    commit_reactor(settings, offsets)
    return counts


def commit_reactor(settings: Settings, offsets: dict[int, int]) -> None:
    """Say that the reactor has done all of the log, as one that was there would have."""
    kafka = settings.kafka
    group = settings.gateway.reactor_group
    consumer = KafkaConsumer(group_id=group, enable_auto_commit=False, **client_options(kafka))
    try:
        places = {TopicPartition(kafka.topic, number): offset for number, offset in offsets.items()}
        consumer.assign(list(places))
        consumer.commit({place: OffsetAndMetadata(offset, "", -1) for place, offset in places.items()})
    finally:
        consumer.close(autocommit=False)


def start_once(settings: Settings, folder: Path, counts: dict[str, int]) -> tuple[float, float, float]:
    """Start the gateway: seconds until it serves, resident and peak memory then, in MB."""
    # Here and below: what loads jobs alone does not carry what starts programs.
    from tests.connectors.gateway.hub_access import GatewayProcess

    began = time.monotonic()
    gateway = GatewayProcess(settings, folder)
    try:
        gateway.program.wait_ready(_START_S)
        seconds = time.monotonic() - began
        status = Path(f"/proc/{gateway.program.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        rss, peak = (int(fields[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))
        with gateway.client() as client:
            _check_started(client, counts)
    finally:
        gateway.program.stop()
    return seconds, rss, peak


def _check_started(client: Any, counts: dict[str, int]) -> None:
    """Fail when the gateway does not have all that the tables have, or has read the log again."""
    wanted = {name: count for name, count in counts.items() if name not in (REGISTRY_AGENTS, MESSAGE_BODIES)}
    shown = {
        name: client.get(f"/api/hub/{name.removeprefix('registry_')}", params={"limit": 1}).json()["total"]
        for name in wanted
        if name != MAILBOX_VIEW
    }
    metrics = client.get("/metrics").text.splitlines()
    waiting = [float(line.split()[1]) for line in metrics if line.startswith("trunkline_mailbox_messages ")]
    if {**shown, MAILBOX_VIEW: waiting[0]} != {MAILBOX_VIEW: 0, **wanted}:
        raise SystemExit(f"not all of the tables is there: {wanted} in them, {shown} and {waiting} shown")
    if any(line.startswith("trunkline_verdicts_total{") for line in metrics):
        raise SystemExit("the start has read the log again")


def start_gateway(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Write the life that is asked for to Kafka and the tables, and start the gateway on them."""
    from tests.broker_processes import kafka_at, make_kafka

    broker = make_kafka(work / "kafka")
    broker.start()
    try:
        (agents := work / "agents.d").mkdir()
        settings = Settings(
            data_dir=work / "data",
            kafka=kafka_at(broker.port),
            gateway=GatewaySettings(agents_dir=agents),
            xml_pump=XmlPumpSettings(organism_file=work / "none"),  # or the start loads the sample into the log
        )
        keyring = ensure_keyring(settings)
        ensure_topic(settings)
        records = append_all(settings, history(args, keyring))
        counts = write_views(settings, keyring)
        say(f"{records} records, rows: {counts}")
        # The definitions say what the registry says, so that the start changes nothing.
        for number in range(counts.get(REGISTRY_AGENTS, 0)):
            said = json.dumps({key.removeprefix("agent_"): value for key, value in _agent(number)})
            (agents / f"agent-{number}.json").write_text(said)
        starts = [start_once(settings, work, counts) for _ in range(_STARTS)]
    finally:
        broker.kill()
    for seconds, rss, peak in starts:
        say(f"serves after {seconds:.2f} s with {rss:.0f} MB, at most {peak:.0f} MB")
    return {
        "registry_rows": sum(found for name, found in counts.items() if name.startswith("registry_")),
        "messages": counts.get(MAILBOX_VIEW, 0),
        "mailboxes": min(args.mailboxes, args.messages),
        "records": records,
        "ready_s": round(max(seconds for seconds, _, _ in starts), 2),
        "rss_mb": round(max(rss for _, rss, _ in starts)),
        "peak_mb": round(max(peak for _, _, peak in starts)),
    }


def load_tables(args: argparse.Namespace, work: str) -> dict[str, Any]:
    """Write the tables of jobs alone and load them in a process of its own."""
    write_tables(Settings(data_dir=Path(work)), args.jobs)
    command = [sys.executable, "-m", "tests.benchmarks.cold_start", "--load", work]
    done = subprocess.run(command, cwd=PROJECT_ROOT, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any] | None:
    """Load tables, or start the gateway on them; None in the process that loads them for the other one."""
    if args.load:
        print(json.dumps(load_once(args.load)))
        return None
    is_hub = bool(args.registry or args.messages)
    args.jobs = (0 if is_hub else 100_000) if args.jobs is None else args.jobs
    result = start_gateway(args, work) if is_hub else load_tables(args, str(work))
    if args.registry == args.messages == 100_000:
        result |= judged(result, {"ready_s": 15, "peak_mb": 1000})
    return result


def main() -> int:
    """Run the benchmark; `--json` prints the result as one line."""
    bench = Bench("cold_start", __doc__)
    bench.add_argument("--jobs", type=int, metavar="N", help="jobs (100,000; 0 beside the options below)")
    bench.add_argument("--registry", type=int, default=0, metavar="N", help="rows about tasks and agents (0)")
    bench.add_argument("--messages", type=int, default=0, metavar="N", help="messages that wait (0)")
    bench.add_argument("--mailboxes", type=int, default=1000, metavar="N", help="where they are (1,000)")
    bench.add_argument("--load", metavar="DIR", help=argparse.SUPPRESS)
    return bench.run(measure)


if __name__ == "__main__":
    sys.exit(main())
