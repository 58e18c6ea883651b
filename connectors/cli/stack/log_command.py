"""Makes the log's topic in a Kafka of your own, and rebuilds the log from the ledger after Kafka lost its data.

  trunkline log create                 what the settings kafka.* say; harmless a second time
  trunkline log rebuild --dry-run      what it would do: records, bytes, and lost records
  trunkline log rebuild                do it

The one topic has all records. 'create' makes it with kafka.partitions partitions, kafka.replication_factor
copies and min.insync.replicas from kafka.min_in_sync_replicas, and stores partition count and epoch in its
first record, which all programs check before they start. The first records have a MAC, so it makes the master
keys if there are none: copy their file to the other machines. A topic that another program made and filled
first is refused, unless the ledger has its records. The stack's own Kafka needs no such step: 'up' makes its
topic. Messages for subscribers are published by 'trunkline topics'.

'rebuild' gives every record of the ledger its topic, partition, offset and time again, reads it back and
compares. Events that were acknowledged and had not reached the ledger are lost; it prints their offsets. The
order: ./trunkline down; ./trunkline up --only kafka; ./trunkline log rebuild; ./trunkline down; ./trunkline
up. After an interruption, the same command goes on where it stopped; until it has finished, no program starts
on the topic. A topic with other records than the ledger is refused, and nothing is changed.
docs/how-to/back_up_and_restore.md has more.
Exit codes: 0, also when nothing had to be done; 1 the topic does not fit the settings, with both values;
2 wrong settings; 3 no ledger; 4 refused, with the reason; 5 Kafka does not answer, or refuses the login.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.actions import Actions, flag
from connectors.cli.shared.call import Call
from trunkline_agent.errors import BackboneUnreachable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from connectors.tools.log_rebuild.log_rebuild import RebuildPlan, Rebuilt
    from schemas.settings.settings import Settings

_EVERY_S = 2.0

ACTIONS: Final = Actions()


@ACTIONS.add(example="TRUNKLINE__KAFKA__REPLICATION_FACTOR=3 trunkline log create")
def _create(call: Call) -> int:
    """Make the topic if it is missing, then check it."""
    # Imported here, because Kafka's clients are slow to import and help must be quick.
    from connectors.log.kafka_topic import check_first_records, ensure_topic, replication
    from schemas.keys.sealing import ensure_keyring

    kafka = call.settings.kafka
    if call.settings.master_key is None and not call.settings.key_file.exists():
        ensure_keyring(call.settings)
        print(f"Made the master keys: {call.settings.key_file}; back the file up", file=sys.stderr)
    was_made = ensure_topic(call.settings)
    check_first_records(call.settings)
    found = replication(kafka)
    if call.json:
        made = {"topic": kafka.topic, "made": was_made, "partitions": kafka.partitions, "epoch": kafka.epoch}
        print(json.dumps(made | asdict(found)))
        return 0
    print(
        f"{'Made' if was_made else 'There already'}: topic {kafka.topic} at {kafka.bootstrap_servers}, "
        f"{kafka.partitions} partitions, epoch {kafka.epoch}, copies of each: {found.replicas}, of which "
        f"{found.min_in_sync} must have a record before it counts"
    )
    return 0


@ACTIONS.add(flag("--dry-run", "print what would be done, change nothing"))
def _rebuild(call: Call) -> int:
    """Make the log again from the ledger."""
    from connectors.cli.shared.text_output import print_json
    from connectors.cli.stack.fold_command import check_doors_closed
    from connectors.tools.log_rebuild.log_rebuild import LogRebuild
    from schemas.keys.sealing import load_keyring

    check_doors_closed(call.settings)
    work = LogRebuild(call.settings, load_keyring(call.settings), _Progress())
    try:
        plan = work.plan()
    except BackboneUnreachable as error:
        raise BackboneUnreachable(f"{error}; start Kafka alone: ./trunkline up --only kafka") from error
    if not call.json:
        _print_plan(call.settings, plan)
    done = None if call.dry_run else work.run(plan)
    if call.json:
        print_json(_fields(plan, done))
    elif done is not None:
        _print_done(call.settings, plan, done)
    return 0


class _Progress:
    """Prints on standard error, every two seconds, the progress, rate and remaining time of a step."""

    def __init__(self) -> None:
        self._step, self._began, self._printed_at = "", 0.0, 0.0

    def __call__(self, step: str, done: int, total: int) -> None:
        """Report that `done` of `total` records are done."""
        now = time.monotonic()
        if step != self._step:
            self._step, self._began, self._printed_at = step, now, now
        elif now - self._printed_at >= _EVERY_S:
            self._printed_at = now
            rate = done / max(now - self._began, 0.001)
            text = f"{done} of {total} records {step}, {rate:.0f} a second, {(total - done) / rate:.0f} s left"
            print(text, file=sys.stderr)


def _print_plan(settings: Settings, plan: RebuildPlan) -> None:
    size = f"{plan.records} records in {len(plan.ledger)} partitions, {plan.bytes / 1e6:.1f} MB"
    print(f"ledger   {size}, at version {plan.version}")
    topic, held = settings.kafka.topic, sum(plan.log.values())
    if plan.replaces_topology:
        text = "holds nothing but a new topology record: it is deleted and made again"
    elif not plan.log:
        text = "does not exist: it is made"
    elif plan.missing:
        text = f"holds {held} records, the ledger's; {plan.to_write} are missing"
    else:
        text = f"holds {held} records, and all that the ledger has"
    print(f"topic    {topic!r} {text}")
    if plan.missing:
        print(f"to write {_ranges(plan.missing)}")
        ends = "; ".join(f"partition {n} from offset {plan.ledger[n]} on" for n in sorted(plan.missing))
        print(f"lost     every record that was acknowledged beyond the ledger: {ends}")
        if plan.planned is None:
            print("unknown  what Spark had planned to settle: the checkpoint of its last run cannot be read")
    if plan.lost:
        print(f"lost     for certain, because Spark had planned to settle them: {_ranges(plan.lost)}")


def _print_done(settings: Settings, plan: RebuildPlan, done: Rebuilt) -> None:
    if done.written:
        speed = f"{done.seconds:.1f} s, {done.written / max(done.seconds, 0.001):.0f} a second"
        print(f"wrote    {done.written} records in {speed}, and compared them")
    print("The log has all that the ledger has. Start the rest: ./trunkline down; ./trunkline up")


def _ranges(ranges: Mapping[int, tuple[int, int]]) -> str:
    return "; ".join(
        f"partition {number} offset {first}" + (f" to {end - 1}" if end - first > 1 else "")
        for number, (first, end) in sorted(ranges.items())
    )


def _fields(plan: RebuildPlan, done: Rebuilt | None) -> dict[str, Any]:
    """Return plan and result as one JSON object. A range is its first offset and the one after its last."""
    names = ("records", "bytes", "ledger", "log", "replaces_topology", "missing", "to_write", "planned", "lost")
    return {
        "ledger_version": plan.version,
        **{name: getattr(plan, name) for name in names},
        "written": None if done is None else done.written,
        "seconds": None if done is None else round(done.seconds, 3),
    }
