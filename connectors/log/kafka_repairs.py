"""Patches of kafka-python 3.0.12, so that its consumers survive odd header names and an unreachable broker.

A test fails without each patch. Check them again with another version of the library.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kafka.net.inet import KafkaNetSocket  # type: ignore[import-untyped]
from kafka.record.default_records import DefaultRecordBatch  # type: ignore[import-untyped]


@cache
def repair_kafka_client() -> None:
    """Patch the library in this process, once."""
    _read_any_header_name()
    _close_refused_sockets()


class _Piece(bytearray):
    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, "replace")


class _TolerantBuffer(bytearray):
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return found if isinstance(found, int) else _Piece(found)


def _read_any_header_name() -> None:
    """Decode header names that are not UTF-8 as Java does, with U+FFFD in them.

    Otherwise `poll` raises for such a record again and again, and no later record is read.
    """
    read = DefaultRecordBatch._read_msg

    def read_tolerantly(batch: Any) -> Any:
        try:
            return read(batch)
        except UnicodeDecodeError:  # raised before the batch moves on
            batch._buffer = _TolerantBuffer(batch._buffer)
            return read(batch)

    DefaultRecordBatch._read_msg = read_tolerantly


def _close_refused_sockets() -> None:
    """Close the socket of a failed connection; the library leaks one for each attempt, four a second."""
    connect = KafkaNetSocket.sock_connect

    async def connect_or_close(factory: Any, net: Any, sock: Any, *rest: Any, **options: Any) -> Any:
        try:
            return await connect(factory, net, sock, *rest, **options)
        except BaseException:
            sock.close()
            raise

    KafkaNetSocket.sock_connect = connect_or_close
