"""Repairs of kafka-python 3.0.12, without which its consumers do not survive what a log and a network hold.

Each is checked by a test that fails without it; look at them again with another version.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from kafka.net.inet import KafkaNetSocket  # type: ignore[import-untyped]
from kafka.record.default_records import DefaultRecordBatch  # type: ignore[import-untyped]

from schemas.errors import BackboneUnreachable

JOIN_MS: Final = 20_000


@cache
def repair_kafka_client() -> None:
    """Repair the library in this process, once."""
    _read_any_header_name()
    _close_refused_sockets()


def join_in_one_go(consumer: Any) -> None:
    """Let each joining of the group take the time it needs, whatever time-out `poll` was called with.

    The assignment is forgotten when a `poll` times out between JoinGroup and SyncGroup: the consumer then is
    a member without partitions, and spins. `poll` raises BackboneUnreachable when a join takes 20 s.
    """
    coordinator = consumer._coordinator
    join = coordinator.join_group_async

    async def join_to_the_end(timeout_ms: float | None = None) -> bool:
        if not await join(JOIN_MS):
            raise BackboneUnreachable(f"the group was not joined within {JOIN_MS / 1000:g} s")
        return True

    coordinator.join_group_async = join_to_the_end


class _Piece(bytearray):
    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, "replace")


class _TolerantBuffer(bytearray):
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return found if isinstance(found, int) else _Piece(found)


def _read_any_header_name() -> None:
    """Read header names that are not UTF-8 as Java does, with U+FFFD in them.

    `poll` would raise for such a record, for ever: one record would stop everything behind it.
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
    """Close the socket of a connection that failed; each attempt left one open, four a second while Kafka is
    away.
    """
    connect = KafkaNetSocket.sock_connect

    async def connect_or_close(factory: Any, net: Any, sock: Any, *rest: Any, **options: Any) -> Any:
        try:
            return await connect(factory, net, sock, *rest, **options)
        except BaseException:
            sock.close()
            raise

    KafkaNetSocket.sock_connect = connect_or_close
