"""Completes at the gateway's start the records of `control/…` that a killed program could not append.

A switch of the fold's version is a note in the ledger first, and then a record (`control.fold_switched`).
Auditors find the record, and it ends any gateway that still runs the previous version. A new topic, or a switch
to a version with MACs, is complete when each partition has the record `control.macs_required`.
"""

from __future__ import annotations

import structlog
from pydantic import ValidationError

from connectors.hub.live.live_view import LiveView
from connectors.hub.services.log_appender import LogAppender
from schemas.settings.settings import Settings
from schemas.streams.control.control_fold import FOLD_STREAM, FoldSwitched, is_recorded
from schemas.streams.control.record_macs import macs_required_records, rules_of
from schemas.tables.fold_version import noted_switch

log = structlog.stdlib.get_logger(__name__)


def append_noted_switch(settings: Settings, live_view: LiveView, appender: LogAppender) -> None:
    """Append the record `control.fold_switched` for the switch of the fold's version that the ledger notes.

    The gateway calls this function at its start. If the ledger notes no switch, or the log has the record
    already, nothing happens. An invalid note is only logged. The function does not wait for the verdict. If
    Kafka is unreachable, the record is dropped, and the next start tries again. Several gateways may append the
    record; the fold accepts only the first.
    """
    noted = noted_switch(settings)
    if noted is None:
        return
    try:
        body = FoldSwitched.model_validate_json(noted)
    except ValidationError:
        log.warning("fold_switch_not_said", why="the note in the ledger is not one of ours")
        return
    record = body.record(door="stack", principal="operator")
    if not is_recorded(record, live_view.entries(FOLD_STREAM)):
        log.info("fold_switch_said", from_version=body.from_version, to_version=body.to_version)
        appender.append_unattended(record)


def append_lacking_mac_rules(settings: Settings, live_view: LiveView, appender: LogAppender) -> None:
    """Append `control.macs_required` to each partition that does not require MACs.

    The gateway calls this function at its start. It does not wait for the verdicts, as `append_noted_switch`.
    """
    for record in macs_required_records(settings.kafka.partitions):
        if rules_of(live_view.entries(record.stream)) is None:
            log.warning("macs_required", partition=record.partition)
            appender.append_unattended(record)
