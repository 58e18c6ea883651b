"""A TCP proxy that delays, holds or cuts connections, or loses an answer: a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import Final

from tests.broker_processes import LOOPBACK

PASS, CUT, SLOW, MUTE, LOSE = "pass", "cut", "slow", "mute", "lose"
_CHUNK: Final = 64 * 1024
_TICK_S: Final = 0.05
_CLOSE_S: Final = 10


class TcpProxy:
    """Passes connections on to a port of loopback, on a thread of its own. `close` stops it.

    Args:
        listener: The socket at which clients connect. The proxy closes it.
        target: The port. The attribute may be changed at any time, for connections from then on.
        delay_s: How long each piece of data waits in the mode `SLOW`.
        context: The TLS context for clients. None: without TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        target: int,
        *,
        delay_s: float = 0.15,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.port = int(listener.getsockname()[1])
        self.target = target
        self._listener, self._context = listener, context
        self._delay_s = delay_s
        self._mode = PASS
        self._open: set[asyncio.StreamWriter] = set()
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    @property
    def mode(self) -> str:
        """The mode, which may be set at any time, from any thread.

        `CUT` resets open connections, and new ones at once. In `SLOW`, each piece of data waits. `MUTE` keeps
        and accepts connections, and passes nothing on. `LOSE` cuts a connection instead of passing on the next
        piece from the target, and the mode is `PASS` from then on.
        """
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = mode
        if mode == CUT:
            self._loop.call_soon_threadsafe(self._cut)

    def close(self) -> None:
        """End it and all its connections."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accepted, sock=self._listener, ssl=self._context)
        await self._ended.wait()
        server.close()
        self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == CUT:
            writer.transport.abort()
            return
        self._open.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            back, onward = await asyncio.open_connection(LOOPBACK, self.target)
            self._open.add(onward)
            await asyncio.gather(self._pump(reader, onward), self._pump(back, writer, is_answer=True))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, onward):
                if one is not None:
                    self._open.discard(one)
                    one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        while data := await reader.read(_CHUNK):
            while self._mode == MUTE:
                await asyncio.sleep(_TICK_S)
            if self._mode == SLOW:
                await asyncio.sleep(self._delay_s)
            if self._mode == LOSE and is_answer:
                self._mode = PASS
                raise ConnectionResetError("the answer is lost")
            writer.write(data)
            await writer.drain()
        if not writer.can_write_eof():  # TLS ends both directions at once.
            writer.close()
            return
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
