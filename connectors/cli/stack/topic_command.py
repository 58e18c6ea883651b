"""Makes the topic of the log in a Kafka of your own, or checks the one that is there.

  trunkline topic create                        what the settings kafka.* say; harmless a second time
  trunkline topic create --json

This is the one topic of Kafka that all records are in. Messages for subscribers are published by another
command, 'trunkline topics'.

The topic gets kafka.partitions partitions, kafka.replication_factor copies and min.insync.replicas from
kafka.min_in_sync_replicas, and stores its partition count and epoch as its first record. All programs check it
before they start. The first records have a MAC, so the command makes the master keys if there are none: copy
their file to the other machines. A topic that another program made and filled first is refused, unless the
ledger has its records. The stack's own Kafka needs no such step: 'up' makes its topic.

Exit codes: 0; 1 the topic does not fit the settings, with both values; 2 wrong settings; 5 Kafka does not
answer or refuses the login.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Final

from connectors.cli.shared.actions import Actions
from connectors.cli.shared.call import Call

ACTIONS: Final = Actions()


@ACTIONS.add(example="TRUNKLINE__KAFKA__REPLICATION_FACTOR=3 trunkline topic create")
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
