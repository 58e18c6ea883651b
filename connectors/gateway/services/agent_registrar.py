"""Keeps `registry_agents` as `conf/agents/` says (HH-01): read at the start, and when a file changes.

While a file is bad, no agent is removed: perhaps it is its file. Any number of gateways may say the same: the
fold takes the first.
"""

from __future__ import annotations

import threading
from typing import Final

import structlog

from connectors.gateway.services.log_appender import LogAppender
from connectors.live.live_view import LiveView
from connectors.organism.agent_definitions import AgentDefinition, Definitions, DefinitionWatch
from schemas.errors import TrunklineError
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import REGISTRY_AGENTS, REGISTRY_LISTENERS, AgentRow
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.agents.agent_registry import (
    DEFINED,
    AgentDefined,
    change_cause,
    definition_record,
    removal_record,
)

log = structlog.stdlib.get_logger(__name__)

DOOR: Final = "hub"
PRINCIPAL: Final = "hub"
_POLL_S: Final = 1.0
_CLOSE_S: Final = 10.0


class AgentRegistrar:
    """A companion of the gateway. `faults`: what is wrong with files that define no agent, by file name."""

    def __init__(self, settings: Settings, live_view: LiveView, appender: LogAppender) -> None:
        self._watch = DefinitionWatch(PROJECT_ROOT / settings.gateway.agents_dir)
        self._live_view = live_view
        self._appender = appender
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="agent-registrar", daemon=True)
        self.faults: dict[str, str] = {}

    def open(self) -> None:
        """Say what the files say now, as far as it is news, and follow them."""
        self._thread.start()

    def on_change(self, change: AppliedChange) -> None:
        """Nothing: only files matter here."""

    def registered(self, job_id: str) -> None:
        """Nothing: jobs are others' affair."""

    def close(self) -> None:
        """The end."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _follow(self) -> None:
        wanted: Definitions | None = None
        while not self._closing.is_set():
            wanted = self._watch.changed() or wanted
            if wanted is not None:
                self._note_faults(wanted.faults)
                try:
                    self._say(wanted)
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

    def _say(self, wanted: Definitions) -> None:
        rows = self._live_view.rows(REGISTRY_AGENTS)
        known = {row.agent_name: row for row in rows if isinstance(row, AgentRow)}
        for definition in wanted.agents.values():
            if self._live_view.row(REGISTRY_LISTENERS, definition.name) is not None:
                log.warning("agent_definition_skipped", file=definition.name, why="a listener has this name")
                continue
            row = known.get(definition.name)
            if row is None or not _says(row, definition):
                self._define(definition, row)
        if wanted.faults:
            return
        for name, row in known.items():
            if row.status == DEFINED and name not in wanted.agents:
                cause = change_cause(row)
                record = removal_record(name, cause=cause, door=DOOR, principal=PRINCIPAL)
                self._appender.settle_in_thread(record)
                log.info("agent_removed", agent=name)

    def _define(self, definition: AgentDefinition, row: AgentRow | None) -> None:
        body = AgentDefined(
            agent_name=definition.name,
            image=definition.image,
            description=definition.description,
            capabilities=definition.capabilities,
            hardened=definition.hardened,
        )
        record = definition_record(body, cause=change_cause(row), door=DOOR, principal=PRINCIPAL)
        self._appender.settle_in_thread(record)
        log.info("agent_defined", agent=definition.name)


def _says(row: AgentRow, definition: AgentDefinition) -> bool:
    return row.status == DEFINED and (row.image, row.description, row.capabilities, row.hardened) == (
        definition.image,
        definition.description,
        definition.capabilities,
        definition.hardened,
    )
