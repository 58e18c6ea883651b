"""Helpers for tests of the live view's local store."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connectors.hub.live.live_state import LiveState
from connectors.hub.live.live_store import LiveStore
from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.state_store.gateway_store import GatewayStore, LogPlace, row_form
from schemas.streams.fold import VIEWS


@contextmanager
def loaded_state(settings: Settings, keyring: Keyring, folder: Path | None = None) -> Iterator[LiveState]:
    """The state of a live view that is loaded and does not follow the log."""
    failures: list[Exception] = []
    store = LiveStore(settings, keyring, folder, None, failures.append)
    try:
        yield store.state
    finally:
        store.close()
    assert not failures


def streams_of(state: LiveState) -> list[str]:
    """The names of all streams with entries, also of those that the store does not have yet."""
    unflushed = [one.entries for one in (state._unflushed, state._flushing) if one is not None]
    return sorted({*state._store.streams(), *(stream for found in unflushed for stream in found)})


def entries_of(state: LiveState) -> dict[str, dict[str, bytes]]:
    """The entries of all streams."""
    return {stream: stored(state.entries(stream)) for stream in streams_of(state)}


def stored(entries: Entries) -> dict[str, bytes]:
    """The entries of a stream by key, wherever they are stored."""
    return {key: value for key in entries.with_prefix("") if (value := entries.get(key)) is not None}


def rows_of(state: LiveState) -> dict[str, dict[str, tuple[int, object]]]:
    """The rows of all views with their offsets."""
    rows = {name: list(state.rows(name)) for name in VIEWS}
    return {name: {row.key: state.find(name, row.key) for row in found} for name, found in rows.items()}


def place_at(offsets: dict[int, int], **others: Any) -> LogPlace:
    """A place in a log of epoch 1 whose records nobody compares."""
    fields = {"epoch": 1, "digests": {}, "ahead": {}, "rows_until": {}, **others}
    return LogPlace(fold_version=FOLD_VERSION, form=row_form(), offsets=offsets, **fields)


def empty_state(keyring: Keyring) -> LiveState:
    """A state over an empty store, which is deleted together with the state."""
    folder = tempfile.TemporaryDirectory()
    store = GatewayStore(Path(folder.name), is_synced=False)
    store.finish_load(place_at({}))
    state = LiveState(keyring, store)
    weakref.finalize(state, folder.cleanup)
    return state
