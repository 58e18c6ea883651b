"""A TCP proxy that can be told to cut its connections, to be slow, or to let nothing through: a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Final

from tests.broker_processes import LOOPBACK

PASS, CUT, SLOW, MUTE = "pass", "cut", "slow", "mute"
_CHUNK: Final = 64 * 1024
_TICK_S: Final = 0.05


class TcpProxy:
    """Listens on a port and passes everything on to another, on a thread of its own.

    `mode` may be set at any time, from any thread. `cut`: what is open is reset, what comes is refused at once;
    `slow`: every piece waits `delay_s`; `mute`: connections are kept and taken, and nothing gets through.
    """

    def __init__(self, port: int, target: int, delay_s: float = 0.15) -> None:
        self.port = port
        self._target = target
        self._delay_s = delay_s
        self._mode = PASS
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._ended: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"proxy-{port}", daemon=True)
        self._thread.start()
        self._started.wait(10)
        if self._failure is not None:
            raise self._failure

    @property
    def mode(self) -> str:
        """The proxy's current mode."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = mode
        if mode == CUT:
            self._loop.call_soon_threadsafe(self._cut)

    def close(self) -> None:
        """End it and all its connections."""
        if self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # told to who made it
            self._failure = error
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server = await asyncio.start_server(self._accepted, LOOPBACK, self.port)
        self._started.set()
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
            back, onward = await asyncio.open_connection(LOOPBACK, self._target)
            self._open.add(onward)
            await asyncio.gather(self._pump(reader, onward), self._pump(back, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, onward):
                if one is not None:
                    self._open.discard(one)
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            while self._mode == MUTE:
                await asyncio.sleep(_TICK_S)
            if self._mode == SLOW:
                await asyncio.sleep(self._delay_s)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
