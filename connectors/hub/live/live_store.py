"""The local store of a live view: its start, a new one from the tables, and rows from memory and store.

At the start, a store that does not fit the log is replaced. Live rows are in memory, and the others in the
store.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar, cast

import lmdb

from connectors.hub.live.live_state import LiveState, digest_of
from connectors.hub.live.store_writer import StoreFolder, StoreWriter
from connectors.hub.live.table_reader import load_views
from connectors.log.topic_consumer import LogTail, OffsetsGoneError
from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring
from schemas.settings.settings import KafkaSettings, Settings
from schemas.state_store.ended_lists import WHOLE, Span
from schemas.state_store.gateway_store import GatewayStore, LogPlace, row_form
from schemas.state_store.local_store import StoreDamaged
from trunkline_agent.errors import BackboneUnreachable, TrunklineError

_POLL_S: Final = 0.2
_READ_WITHIN_S: Final = 30.0


class LiveStore:
    """The open local store of a live view, the state in it, and the thread that writes it.

    The store is made from the view tables if there is none that fits the log.

    Args:
        settings: The settings of Kafka and of the tables.
        keyring: The master keys.
        folder: The folder of the store, for this view alone. None: a temporary folder.
        ends: The log's end by partition. None: there is no log, so the store is not compared with it.
        on_failure: Called with the error after which the view must stop; the store is then deleted.

    Attributes:
        state: The state in the store.
        began_at: The first offset that the store did not have at the start, by partition.

    Raises:
        BackboneUnreachable: Kafka does not answer.
        TrunklineError: Another process has the folder, it cannot be written, or the tables are unreadable,
            incomplete or of a newer fold version.
    """

    def __init__(
        self,
        settings: Settings,
        keyring: Keyring,
        folder: Path | None,
        ends: Mapping[int, int] | None,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._on_failure = on_failure
        self._folder = StoreFolder(folder)
        self._store: GatewayStore | None = None
        # No loaded object is garbage, and most of them stay. So the collector need not look at them, now or
        # later.
        gc.disable()
        try:
            self._store = _opened_store(settings, self._folder, ends)
            self.state = LiveState(keyring, self._store)
            self._store.reopen()
        except BaseException as error:
            if isinstance(error, StoreDamaged):
                self._folder.discard(str(error))
            self._close_files()
            if isinstance(error, lmdb.Error | OSError):
                raise TrunklineError(
                    f"the state store {self._folder.path} cannot be written ({error}): free space on its disk, "
                    "or set storage.state to a folder on another one"
                ) from error
            raise
        finally:
            gc.enable()
        gc.freeze()
        self.began_at = dict(self.state.place.offsets)
        self._store.on_damage = self.fail
        self._writer = StoreWriter(self.state, self._store, self._folder.prove, self.fail)
        self._writer.start()

    @property
    def trouble(self) -> str | None:
        """The reason why the last write failed, such as a full disk; None after a write that succeeded."""
        return self._writer.trouble

    def keep_up(self) -> None:
        """Wait while too many changes wait to be written.

        Raises:
            TrunklineError: They cannot be written, and do not fit into memory any more.
        """
        self._writer.keep_up()

    def fail(self, error: Exception) -> None:
        """Delete the store, because it is damaged, and report the error."""
        self._folder.discard(str(error))
        self._on_failure(error)

    def close(self) -> None:
        """Write what waits, within ten seconds, and close the files."""
        self._writer.close()
        self._close_files()
        # Give the frozen objects back to the collector.
        gc.unfreeze()

    def _close_files(self) -> None:
        if self._store is not None:
            self._store.close()
        self._folder.close()


def _opened_store(settings: Settings, folder: StoreFolder, ends: Mapping[int, int] | None) -> GatewayStore:
    """Return the open store of `folder`, as of a place in the log. It is made from the tables if need be."""
    store = folder.open()
    try:
        why = _unfit(settings, store, ends)
    except StoreDamaged as error:
        why = str(error)
    except BaseException:
        store.close()
        raise
    if why is None:
        return store
    store.close()
    if why:
        folder.discard(why)
    return _from_tables(settings, folder, has_log=ends is not None)


def _unfit(settings: Settings, store: GatewayStore, ends: Mapping[int, int] | None) -> str | None:
    """Return why a store cannot be used, None if it can, and an empty text if it is new."""
    place = store.position()
    if place is None:
        return ""
    kafka = settings.kafka
    found = (place.epoch, place.fold_version, place.form, len(place.offsets))
    wanted = (kafka.epoch, FOLD_VERSION, row_form(), kafka.partitions)
    if found != wanted:
        return f"it is of epoch, fold version, form and partitions {found}, this gateway has {wanted}"
    if ends is None:
        return None
    beyond = {number: offset for number, offset in place.offsets.items() if offset > ends.get(number, 0)}
    if beyond:
        return f"it has offsets {beyond}, but the log ends at {dict(ends)}"
    digests = digests_before(kafka, place.offsets)
    other = [number for number, digest in place.digests.items() if digests.get(number) != digest]
    return f"the log has other records in partitions {other}" if other else None


def _from_tables(settings: Settings, folder: StoreFolder, *, has_log: bool) -> GatewayStore:
    """Make a store from the view tables, and return it open."""
    kafka, opened = settings.kafka, list[GatewayStore]()

    def new_store() -> GatewayStore:
        for one in opened:
            one.close()
        opened[:] = [folder.open_new()]
        return opened[0]

    try:
        new_store()
        loaded = load_views(settings, new_store)
        offsets = {**dict.fromkeys(range(kafka.partitions), 0), **loaded.offsets}
        opened[0].finish_load(
            LogPlace(
                epoch=kafka.epoch,
                fold_version=FOLD_VERSION,
                form=row_form(),
                offsets=offsets,
                digests=digests_before(kafka, offsets) if has_log else {},
                ahead=loaded.ahead,
                rows_until=loaded.rows_until,
            )
        )
    finally:
        for one in opened:
            one.close()
    # Opened again, so that transactions are synced and the memory for the load is free.
    return folder.open_loaded()


def digests_before(kafka: KafkaSettings, offsets: Mapping[int, int]) -> dict[int, str]:
    """Return for each partition the digest of the record before an offset, empty if there is no such record.

    Partitions with the offset 0 are not in the result. It is empty if the log does not have the offsets.

    Raises:
        BackboneUnreachable: Kafka does not answer.
    """
    wanted = {number: offset - 1 for number, offset in offsets.items() if offset > 0}
    found: dict[int, str] = {}
    deadline = time.monotonic() + _READ_WITHIN_S
    try:
        with LogTail(kafka, wanted) as tail:
            while found.keys() != wanted.keys():
                for record in tail.poll(_POLL_S):
                    if record.partition in wanted and record.partition not in found:
                        is_there = record.offset == wanted[record.partition]
                        found[record.partition] = digest_of(record) if is_there else ""
                for number, offset in tail.reached.items():
                    if number in wanted and number not in found and offset > wanted[number]:
                        found[number] = ""
                if time.monotonic() > deadline:
                    raise BackboneUnreachable(f"Kafka did not return the records at {wanted} in time")
    except OffsetsGoneError:
        return {}
    return found


R = TypeVar("R", bound=Row)


class LiveRows:
    """The methods of a LiveView that read. Thread-safe.

    Each may raise StoreDamaged, a TrunklineError. The view then stops, and the next start makes a new store.
    """

    _state: LiveState

    def get(self, row_type: type[R], key: str) -> R | None:
        """Return the row of type `row_type` with this key, such as a job id; None without such a row."""
        return cast("R | None", self.row(row_type.VIEW, key))

    def live(self, row_type: type[R]) -> list[R]:
        """Return the live rows of type `row_type`, in no order. They are in memory (`Row.is_live`)."""
        return cast("list[R]", self._state.live(row_type.VIEW))

    def all(self, row_type: type[R]) -> list[R]:
        """Return all rows of type `row_type`, in no order. This is slow: it reads all ended rows."""
        return cast("list[R]", self.rows(row_type.VIEW))

    def newest_ended(self, row_type: type[R], listed: str, span: Span = WHOLE) -> Iterator[R]:
        """Yield the ended rows of type `row_type` in a list, the newest first. Reads as many as are taken.

        Args:
            row_type: The type of the rows.
            listed: The name of the list, such as a status (`Row.lists`).
            span: The part of the list, by the moment in the column `Row.ORDER`.
        """
        return cast("Iterator[R]", self._state.newest_ended(row_type.VIEW, listed, span))

    def oldest_ended(self, row_type: type[R], listed: str) -> R | None:
        """Return the ended row in a list that `newest_ended` yields last, None without one."""
        return cast("R | None", self._state.oldest_ended(row_type.VIEW, listed))

    def count_ended(self, row_type: type[Row], listed: str, span: Span = WHOLE) -> int:
        """Return the number of ended rows of type `row_type` in a part of a list.

        The numbers of a whole list and of blocks of time are stored, so this takes some milliseconds at most.
        """
        return self._state.count_ended(row_type.VIEW, listed, span)

    def row(self, view: str, key: str) -> Row | None:
        """Return the row with this key in the view named `view`, or None. Raises KeyError without that view."""
        found = self._state.find(view, key)
        return None if found is None else found[1]

    def rows(self, view: str) -> list[Row]:
        """Return all rows of the view named `view`, in no order. Raises KeyError for an unknown view."""
        return list(self._state.rows(view))

    def row_offset(self, view: str, key: str) -> int | None:
        """Return the offset of the record that last changed the row; None for a key that never had a row."""
        found = self._state.find(view, key)
        return None if found is None else found[0]

    def entries(self, stream: str) -> Entries:
        """Return the state of `stream`, such as `job/0a1b2c3d`; it is empty for an unknown stream.

        An entry is read when it is asked for, as it is then. A change of the returned object changes no other.
        """
        return self._state.entries(stream)
