"""A job and its events for programs with an event loop: the methods of `Job`, awaitable."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from trunkline_agent.jobs.job import PATIENCE_S, PAYLOAD_BYTES, Job
from trunkline_agent.outbox.delivery import Interruption
from trunkline_agent.wire.job_event import COMPLETED, ERROR, PERMISSION_REQUIRED, PROGRESS, STARTED
from trunkline_agent.wire.receipt import Receipt

if TYPE_CHECKING:
    from trunkline_agent.broker import BrokerAccess
    from trunkline_agent.credentials import Credentials, HubAccess, MqttAccess

T = TypeVar("T")


class AsyncJob:
    """A job whose events this process publishes. Use it with `async with`, or await its methods alone.

    Each method runs that of `Job` on a thread of its own, because it syncs the outbox to disk. The calls of
    several tasks follow each other. A cancelled call ends its network connection at once. Its event stays in
    the outbox, and is sent first with the next call, unless it was confirmed before.

    See `Job` for the arguments, for what the end of the block publishes, and for the errors.
    """

    def __init__(
        self,
        job_id: str,
        secret: str,
        *,
        hub: HubAccess | Credentials | None = None,
        mqtt: MqttAccess | BrokerAccess | Credentials | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        ca_certs: str | os.PathLike[str] | None = None,
        patience_s: float = PATIENCE_S,
        payload_bytes: int = PAYLOAD_BYTES,
    ) -> None:
        self._use(
            Job(
                job_id,
                secret,
                hub=hub,
                mqtt=mqtt,
                state_dir=state_dir,
                ca_certs=ca_certs,
                patience_s=patience_s,
                payload_bytes=payload_bytes,
            )
        )

    def _use(self, job: Job) -> None:
        self._job = job
        self._turn = asyncio.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **options: Any) -> Self:
        """Return the job that the environment names, see `Job.from_environment`."""
        made = cls.__new__(cls)
        made._use(Job.from_environment(environment, **options))
        return made

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._job.job_id

    def __repr__(self) -> str:
        return f"AsyncJob({self.job_id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The task is told only once that it is cancelled, so this wait is not cut short by the same request.
        await self._run(lambda stop: self._job.end_by(error, interruption=stop))

    async def started(self, detail: str = "", data: dict[str, Any] | None = None) -> Receipt:
        """Publish that the work has begun. It can only be the first event of the job. See `publish`."""
        return await self.publish(STARTED, detail, data)

    async def progress(self, detail: str = "", data: dict[str, Any] | None = None) -> Receipt:
        """Publish how far the work is. See `publish`."""
        return await self.publish(PROGRESS, detail, data)

    async def permission_required(self, detail: str, data: dict[str, Any] | None = None) -> Receipt:
        """Publish that the work waits for the permission that `detail` names. See `publish`."""
        return await self.publish(PERMISSION_REQUIRED, detail, data)

    async def completed(self, detail: str = "", data: dict[str, Any] | None = None) -> Receipt:
        """Publish that the work is done, which ends the job. See `publish`."""
        return await self.publish(COMPLETED, detail, data)

    async def error(self, detail: str, data: dict[str, Any] | None = None) -> Receipt:
        """Publish that the work has failed, which ends the job. See `publish`."""
        return await self.publish(ERROR, detail, data)

    async def publish(
        self,
        event: str,
        detail: str = "",
        data: dict[str, Any] | None = None,
        *,
        wait_for_receipt: bool = True,
    ) -> Receipt:
        """Publish one event, after earlier unconfirmed ones, and return its receipt. See `Job.publish`."""
        return await self._run(
            lambda stop: self._job.publish(
                event, detail, data, wait_for_receipt=wait_for_receipt, interruption=stop
            )
        )

    async def resend(self, *, wait_for_receipt: bool = True) -> int:
        """Send all events that are not confirmed yet, and return how many they were. See `Job.resend`."""
        return await self._run(
            lambda stop: self._job.resend(wait_for_receipt=wait_for_receipt, interruption=stop)
        )

    async def _run(self, call: Callable[[Interruption], T]) -> T:
        """Run a call of the sync job on a daemon thread, which does not keep the program from ending."""
        async with self._turn:
            loop, stop = asyncio.get_running_loop(), Interruption()
            done: asyncio.Future[T] = loop.create_future()

            def work() -> None:
                try:
                    result = call(stop)
                except BaseException as error:  # noqa: BLE001  raised in the task
                    _tell(loop, done, done.set_exception, error)
                else:
                    _tell(loop, done, done.set_result, result)

            threading.Thread(target=work, name=f"job {self.job_id}", daemon=True).start()
            try:
                return await done
            finally:
                stop.set()


def _tell(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[T], settle: Callable[[Any], None], value: object
) -> None:
    def tell() -> None:
        if not done.done():
            settle(value)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:
        # The loop was closed after a cancellation: nothing waits for the result.
        return
