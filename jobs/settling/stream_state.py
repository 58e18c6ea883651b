"""Reads and writes the entries of many streams at once in Spark's state store.

PySpark's MapState requests one key at a time from the JVM and waits for each answer (75 to 110 µs for each
stream, twice in each micro-batch). Every answer contains its schema as JSON. This module sends the same
messages over the same socket in windows, which takes 15 to 25 µs. It uses names of pyspark 4.2.0 that are not
public. The version is pinned, and tests/jobs/test_settle_query.py fails if they change.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyspark.sql.streaming.proto.StateMessage_pb2 as messages
from pyspark.sql.streaming.stateful_processor import MapState

from schemas.fold.entries import APART

# The number of requests in a window. Requests and answers of a window easily fit into the socket's buffers, so
# that neither side waits for the other to read.
_WINDOW: Final = 64
_MISSING: Final = b""
# The key of the single entry in a row for an entry that is kept apart.
_ONLY: Final = ""
_HEADER: Final = struct.Struct("!ii")

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, bytes]).decode


class StateError(Exception):
    """Spark's JVM could not serve the state. The micro-batch fails, and Spark runs it again."""


class StreamState:
    """The entries of the current bucket's streams in Spark's state store. Not thread-safe.

    The store is a MapState `stream string -> entries binary`. A stream's entries are one row. An entry whose
    key begins with `schemas.fold.entries.APART` has a row of its own, `<stream> <entry>`, and is only read on
    demand.
    """

    def __init__(self, map_state: MapState) -> None:
        client = map_state._mapStateClient
        self._api = client._stateful_processor_api_client
        self._name = map_state._stateName

    def load(self, streams: Sequence[str]) -> dict[str, dict[str, bytes]]:
        """Return the entries of each of these streams from Spark's state store.

        Entries that are stored apart, whose keys begin with APART, are not included. A new stream has no
        entries.

        Raises:
            StateError: The JVM could not serve the state.
        """
        calls = (
            messages.MapStateCall(stateName=self._name, getValue=messages.GetValue(userKey=_row(stream)))
            for stream in streams
        )
        answers = self._exchange(calls)
        return {
            stream: {} if raw == _MISSING else _decode(_first_cell(raw))
            for stream, raw in zip(streams, answers, strict=True)
        }

    def load_apart(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], bytes | None]:
        """Return entries that are stored apart, whose keys begin with APART; None for one that does not exist.

        Args:
            wanted: Pairs of a stream and an entry's key. They are also the keys of the result.

        Raises:
            StateError: The JVM could not serve the state.
        """
        found = self.load([f"{stream} {key}" for stream, key in wanted])
        return {(stream, key): found[f"{stream} {key}"].get(_ONLY) for stream, key in wanted}

    def store(self, entries: Mapping[str, Mapping[str, bytes]]) -> None:
        """Replace the entries of these streams in Spark's state store.

        Entries that are stored apart, whose keys begin with APART, are only added or changed, and never
        deleted.

        Args:
            entries: For each stream its entries by key.

        Raises:
            StateError: The JVM could not serve the state.
        """
        rows: dict[str, Mapping[str, bytes]] = {}
        for stream, stored in entries.items():
            rows[stream] = {key: value for key, value in stored.items() if not key.startswith(APART)}
            for key, value in stored.items():
                if key.startswith(APART):
                    rows[f"{stream} {key}"] = {_ONLY: value}
        self._store(rows)

    def _store(self, entries: Mapping[str, Mapping[str, bytes]]) -> None:
        calls = (
            messages.MapStateCall(
                stateName=self._name,
                updateValue=messages.UpdateValue(userKey=_row(stream), value=_row(_encode(stored))),
            )
            for stream, stored in entries.items()
        )
        for _ in self._exchange(calls):
            pass

    def _exchange(self, calls: Iterator[Any]) -> Iterator[bytes]:
        socket = self._api.sockfile
        waiting = 0
        for call in calls:
            message = messages.StateRequest(
                stateVariableRequest=messages.StateVariableRequest(mapStateCall=call)
            ).SerializeToString()
            # The version of the protocol, the length, the message.
            socket.write(_HEADER.pack(0, len(message)) + message)
            waiting += 1
            if waiting == _WINDOW:
                socket.flush()
                for _ in range(waiting):
                    yield self._answer()
                waiting = 0
        socket.flush()
        for _ in range(waiting):
            yield self._answer()

    def _answer(self) -> bytes:
        status, error, value = self._api._receive_proto_message()
        if status != 0:
            raise StateError(f"state {self._name}: {error}")
        return bytes(value)


def _row(cell: str | bytes) -> bytes:
    # The same bytes as PySpark sends for a row of one cell, without its walk over the types.
    return pickle.dumps((cell,), protocol=5)


def _first_cell(raw: bytes) -> bytes:
    return bytes(_RowReader(io.BytesIO(raw)).load()[0])


def _cells(_schema: str) -> Callable[..., tuple[Any, ...]]:
    return lambda *cells: cells


class _RowReader(pickle.Unpickler):
    """A reader of the JVM's pickled rows as tuples, which does not parse the schema in each of them."""

    _KNOWN: Final = {
        "_parse_datatype_json_string": str,
        "_create_row_inbound_converter": _cells,
        "bytes": bytes,
        "bytearray": bytearray,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few callables that a row of binary cells needs. Raises StateError for others."""
        if name not in self._KNOWN:
            raise StateError(f"unexpected {module}.{name} in a state row")
        return self._KNOWN[name]
