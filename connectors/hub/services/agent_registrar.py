"""Registers the agents that `conf/agents/` defines (HH-01), at the start and whenever a file changes.

While any file is invalid, no agent is removed, because the invalid file may define it. Several gateways may
append the same change; the fold accepts the first one.
"""

from __future__ import annotations

from typing import Final

import structlog

from connectors.hub.live.live_view import LiveView
from connectors.hub.organism.agent_definitions import AgentDefinition, Definitions, DefinitionWatch
from connectors.hub.services.log_appender import LogAppender
from connectors.plumbing.machine.background_service import ThreadedService
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.agents.agent_registry import (
    DEFINED,
    AgentDefined,
    AgentRemoved,
    AgentRow,
    change_cause,
)
from schemas.streams.control.organism import ListenerRow
from trunkline_agent.errors import TrunklineError

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
