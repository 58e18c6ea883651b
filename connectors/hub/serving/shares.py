"""Shares of what principals use at once: places of streams and connections (LM-22), and memory (LM-12).

A principal may have about as many places, or bytes, as it leaves free for all others (the dynamic threshold of
Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). One alone gets
half of the bytes, two get a third each, and however many there are, none of them shuts out the next one. Of the
places, one alone gets less than half, and two get a quarter each. Others find a few free then, too, and the
last ones are the operator's.

The memory is that of the answers and streams that are under way at a gateway. A count of requests bounds no
memory, because an answer may have any length up to `limits.answer_bytes`, and a client may read it slowly. So
whatever builds a long answer takes its bytes out of the budget first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Message, Send

# The parts of all places that are the operator's alone, that stay free for principals with few places, and that
# count as few.
_OPERATORS: Final = 32
_OF_MANY: Final = 8
_FEW: Final = 64


def may_have_one_more(limit: int, taken: int, own: int, *, is_operator: bool = False) -> bool:
    """Return whether a principal may take one more place.

    Args:
        limit: The number of all places.
        taken: The number of places that all principals have.
        own: The number of places that this principal has.
        is_operator: Whether the principal is an operator, who may have all that are free.
    """
    free = limit - taken
    if is_operator:
        return free > 0
    free -= limit // _OPERATORS
    return free > 0 and (own < max(1, limit // _FEW) or own < free - limit // _OF_MANY)


class Places:
    """Places for things that principals do at the same time, such as streams. Not thread-safe.

    Args:
        limit: The number of all places.
        most: The most places of one principal, in addition to the rule of this module. None: no such limit.
    """

    def __init__(self, limit: int, most: int | None = None) -> None:
        self._limit = limit
        self._most = limit if most is None else most
        self._held: Counter[str] = Counter()

    def take(self, principal: str, *, is_operator: bool = False) -> bool:
        """Take a place for a principal, and return whether it may have one more. Does not block.

        After True, the caller must call `give_back` once. After False, it must not.
        """
        own = self._held[principal]
        taken = self._held.total()
        if own >= self._most or not may_have_one_more(self._limit, taken, own, is_operator=is_operator):
            return False
        self._held[principal] += 1
        return True

    def give_back(self, principal: str) -> None:
        """Free the place of a principal. Call it once for each successful `take`."""
        self._held[principal] -= 1
        self._held += Counter()  # removes principals without a place


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


class Rooms:
    """The bytes that one request reserves, until `close`. `ByteBudget.begin_request` makes it.

    Args:
        budget: The budget.
        kept_in: The set that the object is in while it has rooms. It closes them if nothing else does.
    """

    def __init__(self, budget: ByteBudget, kept_in: set[Rooms] | None = None) -> None:
        self._budget = budget
        self._kept_in = kept_in
        self._rooms: list[Room] = []
        self.is_closed = False

    def add(self, room: Room) -> None:
        """Add bytes that were taken. After `close` they are given back at once."""
        if self.is_closed:
            self._budget.give_back(room)
            return
        self._rooms.append(room)
        if self._kept_in is not None:
            self._kept_in.add(self)

    def resize(self, size: int) -> None:
        """Set the bytes of the answer to those that it really has, if there are any."""
        if self._rooms:
            self._budget.resize(self._rooms[-1], size)

    def release(self) -> None:
        """Give all bytes back. The request may reserve others."""
        while self._rooms:
            self._budget.give_back(self._rooms.pop())
        if self._kept_in is not None:
            self._kept_in.discard(self)

    def close(self) -> None:
        """Give all bytes back, because the request is answered."""
        self.is_closed = True
        self.release()


_ROOMS: ContextVar[Rooms | None] = ContextVar("rooms_of_request", default=None)


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

    def begin_request(self, kept_in: set[Rooms] | None = None) -> Rooms:
        """Begin a request in the present task and in those that it starts. Close the result after its answer.

        `kept_in` is a set that has the result while it has bytes.
        """
        rooms = Rooms(self, kept_in)
        _ROOMS.set(rooms)
        return rooms

    async def reserve(self, principal: str, size: int, wait_s: float) -> bool:
        """Take bytes until the present request is answered, and return whether there were any within the time.

        Outside a request (`begin_request`), and after its answer, nothing is taken, and the result is True.
        """
        rooms = _ROOMS.get()
        if rooms is None or rooms.is_closed:
            return True
        room = await self.take(principal, size, wait_s)
        if room is not None:
            rooms.add(room)
        return room is not None

    def release(self) -> None:
        """Give back what the present request has reserved, because it has nothing to answer yet."""
        rooms = _ROOMS.get()
        if rooms is not None:
            rooms.release()

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
