"""Loads the listeners of `conf/organism.yaml` into the log at the start, if the file has changed (XP-09).

Changes by signed commands stay as long as the file is the same. While the file is invalid, the listeners of the
log stay. Several gateways may append the same file; the fold accepts the first one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, TypeVar

import structlog

from connectors.hub.live.live_view import LiveView
from connectors.hub.organism.organism_file import Organism, OrganismError, load_organism
from connectors.hub.services.log_appender import LogAppender
from connectors.plumbing.machine.background_service import ThreadedService
from schemas.effects.recipients import has_mailbox
from schemas.fold.view_rows import Row
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.control.organism import ORGANISM_STREAM, ListenerRow, OrganismLoaded
from schemas.streams.control.organism_fold import loaded_digest, organism_version
from schemas.streams.principal.principals import RESERVED_PRINCIPALS
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import REJECTED

log = structlog.stdlib.get_logger(__name__)

DOOR: Final = "hub"
R = TypeVar("R", bound=Row)
PRINCIPAL: Final = "hub"
_RETRY_S: Final = 1.0


class OrganismKeeper(ThreadedService):
    """The background service that loads the organism file once, at the start of the gateway.

    `fault` says why the file was not loaded. It is None if the file was loaded, or is still being loaded. While
    Kafka is unreachable, the service retries every second.
    """

    def __init__(self, settings: Settings, live_view: LiveView, appender: LogAppender) -> None:
        super().__init__("organism-keeper")
        file = settings.xml_pump.organism_file
        self._file = None if file is None else PROJECT_ROOT / file
        self._live_view = live_view
        self._appender = appender
        self.fault: str | None = None

    def open(self) -> None:
        """Start a thread that loads the organism file, which takes about a second. Returns at once.

        If the settings name no file, or the file does not exist, nothing happens.
        """
        if self._file is not None and self._file.exists():
            super().open()

    def _run(self) -> None:
        assert self._file is not None  # noqa: S101  checked by open
        try:
            organism = load_organism(self._file)
        except OrganismError as error:
            self._note(str(error))
            return
        except Exception:
            log.exception("organism_not_loaded")
            self.fault = "the gateway failed; see its log"
            return
        try:
            check_names(self._live_view, [listener.name for listener in organism.listeners])
        except OrganismError as error:
            self._note(f"{self._file}: {error}")
            return
        while not self._closing.is_set():
            try:
                self._load(organism)
                return
            except TrunklineError as error:
                log.warning("organism_waits", why=str(error))
            except Exception:
                log.exception("organism_not_loaded")
                return
            self._closing.wait(_RETRY_S)

    def _load(self, organism: Organism) -> None:
        entries = self._live_view.entries(ORGANISM_STREAM)
        previous = loaded_digest(entries)
        if previous == organism.digest:
            log.info("organism_unchanged")
            return
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
