"""Records of a gateway's start: what the files in `conf/` declare, and what a killed program could not append.

The agents that `conf/agents/` defines (HH-01) are registered at the start and whenever a file changes. While
any file is invalid, no agent is removed, because the invalid file may define it.

The listeners of `conf/organism.yaml` are loaded at the start, if the file has changed (XP-09). Changes by
signed commands stay as long as the file is the same. While the file is invalid, the listeners of the log stay.

A switch of the fold's version is a note in the ledger first, and then a record (`control.fold_switched`).
Auditors find the record, and it ends any gateway that still runs the previous version. A new topic, or a switch
to a version with MACs, is complete when each partition has the record `control.macs_required`.

Several gateways may append the same change; the fold accepts the first one.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from typing import Final, TypeVar

import structlog
from pydantic import ValidationError

from connectors.hub.live.live_view import LiveView
from connectors.hub.organism.declared_files import AgentDefinition, Definitions, DefinitionWatch
from connectors.hub.organism.organism_file import Organism, OrganismError, load_organism
from connectors.hub.services.log_appender import LogAppender
from connectors.plumbing.machine.background_service import ThreadedService
from schemas.effects.recipients import has_mailbox
from schemas.fold.view_rows import Row
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.agents.agent_registry import (
    DEFINED,
    AgentDefined,
    AgentRemoved,
    AgentRow,
    change_cause,
)
from schemas.streams.control.control_fold import FOLD_STREAM, FoldSwitched, is_recorded
from schemas.streams.control.organism import (
    ORGANISM_STREAM,
    ListenerRow,
    OrganismLoaded,
    loaded_digest,
    organism_version,
)
from schemas.streams.control.record_macs import macs_required_records, rules_of
from schemas.streams.principal.principals import RESERVED_PRINCIPALS
from schemas.tables.fold_version import noted_switch
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import REJECTED

log = structlog.stdlib.get_logger(__name__)

DOOR: Final = "hub"
PRINCIPAL: Final = "hub"
_POLL_S: Final = 1.0


class AgentRegistrar(ThreadedService):
    """The background service that registers the agents of `conf/agents/`.

    `faults` maps the name of each invalid file to the text of its fault. Errors are logged. While Kafka is
    unreachable, the service retries every second.
    """

    def __init__(self, settings: Settings, live_view: LiveView, appender: LogAppender) -> None:
        super().__init__("agent-registrar")
        self._watch = DefinitionWatch(PROJECT_ROOT / settings.gateway.agents_dir)
        self._live_view = live_view
        self._appender = appender
        self.faults: dict[str, str] = {}

    def _run(self) -> None:
        wanted: Definitions | None = None
        while not self._closing.is_set():
            wanted = self._watch.changed() or wanted
            if wanted is not None:
                self._note_faults(wanted.faults)
                try:
                    self._register(wanted)
                    wanted = None
                except TrunklineError as error:
                    log.warning("agent_definitions_wait", why=str(error))
                except Exception:
                    log.exception("agent_definitions_failed")
            self._closing.wait(_POLL_S)

    def _note_faults(self, faults: dict[str, str]) -> None:
        if faults != self.faults:
            for name, why in faults.items():
                log.warning("agent_definition_skipped", file=name, why=why)
        self.faults = dict(faults)

    def _register(self, wanted: Definitions) -> None:
        known = {row.agent_name: row for row in self._live_view.live(AgentRow)}
        for definition in wanted.agents.values():
            if self._live_view.get(ListenerRow, definition.name) is not None:
                log.warning("agent_definition_skipped", file=definition.name, why="a listener has this name")
                continue
            row, body = known.get(definition.name), _defined(definition)
            if row is None or not _is_registered_as(row, body):
                record = body.record(cause=change_cause(row), door=DOOR, principal=PRINCIPAL)
                self._appender.settle_in_thread(record)
                log.info("agent_defined", agent=definition.name)
        if wanted.faults:
            return
        for name, row in known.items():
            if row.status == DEFINED and name not in wanted.agents:
                record = AgentRemoved(agent_name=name).record(
                    cause=change_cause(row), door=DOOR, principal=PRINCIPAL
                )
                self._appender.settle_in_thread(record)
                log.info("agent_removed", agent=name)


def _defined(definition: AgentDefinition) -> AgentDefined:
    return AgentDefined(agent_name=definition.name, **definition.model_dump(exclude={"name"}))


def _is_registered_as(row: AgentRow, body: AgentDefined) -> bool:
    columns = ("image", "description", "capabilities", "hardened")
    return row.status == DEFINED and all(getattr(row, name) == getattr(body, name) for name in columns)


R = TypeVar("R", bound=Row)
_LOOK_S: Final = 10.0
_RETRY_S: Final = 1.0


class OrganismKeeper(ThreadedService):
    """The background service that loads the organism file once, at the start of the gateway.

    `fault` says why the file was not loaded. It is None if the file was loaded, or is still being loaded. While
    Kafka is unreachable, the service retries every second. A load that comes after the gateway is ready does
    not undo a command: if the listeners have changed since, the file is not loaded, and `fault` says so.
    """

    def __init__(self, settings: Settings, live_view: LiveView, appender: LogAppender) -> None:
        super().__init__("organism-keeper")
        file = settings.xml_pump.organism_file
        self._file = None if file is None else PROJECT_ROOT / file
        self._live_view = live_view
        self._appender = appender
        self._may_load, self._looked = threading.Event(), threading.Event()
        self._ready_at: int | None = None
        self.fault: str | None = None

    def read_ahead(self) -> None:
        """Start a thread that reads the organism file, while the live view opens. Returns at once.

        It takes about a second. If the settings name no file, or the file does not exist, nothing happens.
        """
        if self._file is not None and self._file.exists():
            self._thread.start()

    def open(self) -> None:
        """Let the thread load what it has read, and wait for that, up to 10 s.

        So a gateway that is ready has the listeners of its file.
        """
        self._may_load.set()
        if self._thread.is_alive() and not self._looked.wait(_LOOK_S):
            log.warning("organism_waits", why=f"{self._file} is not loaded after {_LOOK_S:g} s")
        self._ready_at = organism_version(self._live_view.entries(ORGANISM_STREAM))

    def close(self) -> None:
        """Ask the thread to end, and wait for it at most 10 s."""
        self._closing.set()
        self._may_load.set()
        super().close()

    def _run(self) -> None:
        try:
            self._read_and_load()
        finally:
            self._looked.set()

    def _read_and_load(self) -> None:
        assert self._file is not None  # noqa: S101  checked by read_ahead
        try:
            organism = load_organism(self._file)
        except OrganismError as error:
            self._note(str(error))
            return
        except Exception:
            log.exception("organism_not_loaded")
            self.fault = "the gateway failed; see its log"
            return
        self._may_load.wait()
        while not self._closing.is_set():
            try:
                self._load(organism)
                return
            except OrganismError as error:
                self._note(f"{self._file}: {error}")
                return
            except TrunklineError as error:
                log.warning("organism_waits", why=str(error))
            except Exception:
                log.exception("organism_not_loaded")
                self.fault = "the gateway failed; see its log"
                return
            self._looked.set()
            self._closing.wait(_RETRY_S)

    def _load(self, organism: Organism) -> None:
        check_names(self._live_view, [listener.name for listener in organism.listeners])
        entries = self._live_view.entries(ORGANISM_STREAM)
        previous = loaded_digest(entries)
        if previous == organism.digest:
            log.info("organism_unchanged")
            return
        if self._ready_at not in (None, organism_version(entries)):
            raise OrganismError(
                "the listeners were changed while it was read; load it by trunkline organism reload"
            )
        # The version makes a file that was loaded before, and comes back, a new request.
        cause = f"{organism_version(entries)}/{previous}/{organism.digest}"
        body = OrganismLoaded(
            request_id=f"file-{hashlib.sha256(cause.encode()).hexdigest()[:32]}",
            digest=organism.digest,
            listeners=organism.listeners,
        )
        settled = self._appender.settle_in_thread(body.record(door=DOOR, principal=PRINCIPAL))
        if settled.verdict == REJECTED:
            self._note(f"the log refuses {self._file}: {settled.why}")
            return
        log.info("organism_loaded", listeners=len(organism.listeners), verdict=settled.verdict)

    def _note(self, why: str) -> None:
        self.fault = why
        log.error("organism_not_loaded", why=why, listeners="those of the log stand")


def check_names(live_view: LiveView, names: Iterable[str]) -> None:
    """Raise OrganismError if a listener has a name that is reserved or belongs to a principal or an agent.

    The listener and the other owner of the name would share one mailbox. `names` are the names of the listeners
    to load. The error is about the first such name.
    """

    def others(row_type: type[R], key: str) -> R | None:
        return None if row_type is ListenerRow else live_view.get(row_type, key)

    for name in names:
        if name in RESERVED_PRINCIPALS or has_mailbox(others, name):
            raise OrganismError(
                f"listener {name}: a principal or an agent has this name; choose another, or remove "
                "that one first"
            )


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
