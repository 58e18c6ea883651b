"""The memory of the answers and streams that are under way at a gateway: one budget in bytes (LM-12).

A count of requests bounds no memory, because an answer may have any length up to `limits.answer_bytes`, and a
client may read it slowly. So whatever builds a long answer takes its bytes out of the budget first.

A principal may have as many bytes as it leaves free for all others (the dynamic threshold of Choudhury and
Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). One alone gets half of the
budget, two get a third each, and however many there are, none of them shuts out the next one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Message, Send

# The part of a body that is handed to the connection at once, because it copies the bytes that it cannot send.
PIECE_BYTES: Final = 256 * 1024


@dataclass(eq=False)
class Room:
    """The bytes that one answer or stream has taken. `ByteBudget.take` makes it.

    Attributes:
        principal: The principal that the bytes count for.
        size: The number of bytes.
    """

    principal: str
    size: int
    is_granted: asyncio.Future[None] = field(repr=False)


_ROOMS: ContextVar[list[Room] | None] = ContextVar("rooms_of_request", default=None)


class ByteBudget:
    """A budget in bytes that principals share. Not thread-safe: for one event loop.

    Args:
        limit: The number of bytes in all.

    Attributes:
        used: The number of bytes that are taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._of: Counter[str] = Counter()
        self._waiting: dict[Room, None] = {}

    @property
    def waiting(self) -> int:
        """The number of calls of `take` that wait."""
        return len(self._waiting)

    async def take(self, principal: str, size: int, wait_s: float) -> Room | None:
        """Take bytes out of the budget, in the order of the calls, and return them. Give them back at the end.

        Args:
            principal: The principal that the answer or stream is for. One that has its share waits, and does
                not hold up the others.
            size: The number of bytes. More than the whole budget counts as the whole budget.
            wait_s: How many seconds to wait at most. After that the result is None.
        """
        room = Room(principal, min(size, self.limit), asyncio.get_running_loop().create_future())
        self._waiting[room] = None
        self._grant()
        if room.is_granted.done():
            return room
        try:
            async with asyncio.timeout(wait_s):
                await room.is_granted
        except BaseException as error:
            if room in self._waiting:
                del self._waiting[room]
                self._grant()  # those behind it may fit
            else:
                self.give_back(room)
            if isinstance(error, TimeoutError):
                return None
            raise
        return room

    def give_back(self, room: Room) -> None:
        """Give back the bytes of a room. Call it once for each room that `take` has returned."""
        self._count(room.principal, -room.size)
        room.size = 0
        self._grant()

    def resize(self, room: Room, size: int) -> None:
        """Set the size of a room to what its answer really has. More is granted at once: it is in memory."""
        self._count(room.principal, size - room.size)
        room.size = size
        self._grant()

    async def reserve(self, principal: str, size: int, wait_s: float) -> bool:
        """Take bytes until the present request is answered, and return whether there were any within the time.

        Outside a request (`rooms_of_request`) nothing is taken, and the result is True.
        """
        rooms = _ROOMS.get()
        if rooms is None:
            return True
        room = await self.take(principal, size, wait_s)
        if room is not None:
            rooms.append(room)
        return room is not None

    def shrink_reserved(self, size: int) -> None:
        """Set the bytes that the present request has reserved to `size`. Does nothing if it reserved none."""
        rooms = _ROOMS.get()
        if rooms:
            self.resize(rooms[-1], size)

    def _count(self, principal: str, more: int) -> None:
        self.used += more
        self._of[principal] += more
        if self._of[principal] <= 0:
            del self._of[principal]

    def _grant(self) -> None:
        """Grant the waiting rooms that fit, in their order. One that the budget itself lacks ends the round."""
        for room in list(self._waiting):
            free = self.limit - self.used - room.size
            held = self._of.get(room.principal, 0)
            # One that is done was given up a moment ago.
            if room.is_granted.done() or (held and held + room.size > free):
                continue
            if free < 0 and self.used > 0:
                return
            del self._waiting[room]
            self._count(room.principal, room.size)
            room.is_granted.set_result(None)


def rooms_of_request() -> list[Room]:
    """Begin a request in the present task: return the list of the rooms that it will reserve.

    The caller gives them back when the request is answered.
    """
    rooms: list[Room] = []
    _ROOMS.set(rooms)
    return rooms


async def send_in_pieces(send: Send, message: Message) -> None:
    """Send the body of an ASGI message in pieces, each when the connection has taken the one before."""
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        await send(message)
        return
    whole = memoryview(body)
    for start in range(0, len(whole), PIECE_BYTES):
        is_last = start + PIECE_BYTES >= len(whole)
        more = message.get("more_body", False) or not is_last
        await send({**message, "body": whole[start : start + PIECE_BYTES], "more_body": more})
