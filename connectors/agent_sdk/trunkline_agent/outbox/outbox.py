"""The outbox: the messages that a job or an agent has stored on disk until they are confirmed (JE-16, JE-26).

Each job and each agent has one JSON file, mode 0600, which is replaced as a whole and fsynced before a message
is sent. A lock file next to it keeps two processes from using the same sequence number (seq). A seq is on disk
together with the signed bytes that carry it. After a crash a publisher therefore sends the same bytes again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar, cast

from trunkline_agent.errors import OutboxBusy, TrunklineError, UsageError
from trunkline_agent.private_files import replace_file
from trunkline_agent.wire.ids import is_job_id, is_name
from trunkline_agent.wire.job_event import TERMINAL_EVENTS
from trunkline_agent.wire.strict_json import INT_MAX, MalformedJsonError, canonical, decode

_LOCK_TICK_S: Final = 0.02


def content_fault(fields: dict[str, Any], secret: str) -> str | None:
    """Return the reason why a message must not be sent, or None if it may be sent.

    There are two reasons: `fields`, the fields of the message, are not valid JSON, or they contain `secret`,
    the sender's own secret. The reason is a text for an error message. It never has the secret.
    """
    try:
        wire = canonical(fields)
        decode(wire)
    except (ValueError, TypeError, RecursionError) as error:
        why = error if isinstance(error, MalformedJsonError) else type(error).__name__
        return f"it is not JSON that the backbone takes: {why}"
    return "it contains the sender's own secret" if secret in wire.decode("utf-8") else None


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A message in the outbox: numbered and signed, and not confirmed yet."""

    seq: int
    payload: str

    @property
    def wire_bytes(self) -> bytes:
        """The bytes to publish over MQTT, the same at every attempt to send the message."""
        return self.payload.encode("utf-8")


@dataclass(frozen=True, slots=True)
class PendingEvent(OutboxMessage):
    """A job's event in the outbox. `event` is its type, such as `started`."""

    event: str

    @property
    def is_terminal(self) -> bool:
        """True if this event ends the job."""
        return self.event in TERMINAL_EVENTS

    def fields(self) -> dict[str, Any]:
        """Return the event's fields by name, such as `seq` and `detail`, decoded from its payload."""
        found: dict[str, Any] = json.loads(self.payload)
        return found


@dataclass
class _AgentState:
    agent_name: str
    secret_sha256: str
    last_seq: int = 0
    outbox: list[OutboxMessage] = field(default_factory=list)

    @classmethod
    def read(cls, found: dict[str, Any]) -> Self:
        """Return the state with the fields of a file's JSON. Raises KeyError, TypeError."""
        messages = [OutboxMessage(_int(one["seq"]), _text(one["payload"])) for one in found.get("outbox", ())]
        name, digest = _text(found["agent_name"]), _text(found["secret_sha256"])
        return cls(name, digest, _int(found.get("last_seq", 0)), messages)


@dataclass
class _JobState:
    job_id: str
    last_seq: int = 0
    ended_seq: int | None = None
    outbox: list[PendingEvent] = field(default_factory=list)

    @classmethod
    def read(cls, found: dict[str, Any]) -> Self:
        """Return the state with the fields of a file's JSON. Raises KeyError, TypeError."""
        events = [
            PendingEvent(_int(one["seq"]), _text(one["payload"]), _text(one["event"]))
            for one in found.get("outbox", ())
        ]
        ended = found.get("ended_seq")
        ended_seq = None if ended is None else _int(ended)
        return cls(_text(found["job_id"]), _int(found.get("last_seq", 0)), ended_seq, events)


def _int(value: object) -> int:
    if type(value) is not int:
        raise TypeError("expected an integer")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


Message = TypeVar("Message", bound=OutboxMessage)
State = TypeVar("State", bound=_AgentState | _JobState)


class _Outbox(Generic[State, Message]):
    """An outbox, locked while it is open. Use it as a context manager.

    In error messages, `whose` names the state, `busy` describes the other process, and `foreign` is the advice
    about a file with other content.

    Entering raises OutboxBusy after `lock_timeout_s` seconds, and TrunklineError when the file cannot be
    read or written.
    """

    def __init__(
        self, path: Path, fresh: State, lock_timeout_s: float, *, whose: str, busy: str, foreign: str
    ) -> None:
        self._path = path
        self._fresh = fresh
        self._lock_timeout_s = lock_timeout_s
        self._whose, self._busy, self._foreign = whose, busy, foreign
        self._lock_fd = -1
        self._state = fresh

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_fd = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise TrunklineError(f"cannot keep {self._whose}: {error}") from error
        try:
            self._lock()
            self._state = self._load()
        except BaseException:
            os.close(self._lock_fd)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock_fd)  # which also unlocks

    @property
    def last_seq(self) -> int:
        """The highest seq in use, 0 before the first."""
        return self._state.last_seq

    @property
    def pending(self) -> tuple[Message, ...]:
        """The unconfirmed messages, in the order of seq."""
        found: list[Any] = self._state.outbox
        return tuple(found)

    def confirm(self, message: Message) -> None:
        """Remove a confirmed message from the outbox, also on disk."""
        outbox: list[Any] = self._state.outbox
        outbox.remove(message)
        self._save()

    def _append(self, make: Callable[[int], Message]) -> Message:
        """Add the message that `make(seq)` returns for the next seq. It is on disk when this returns."""
        seq = self._state.last_seq + 1
        if seq > INT_MAX:
            raise UsageError(f"all sequence numbers are used up in {self._whose}")
        message = make(seq)
        self._state.last_seq = seq
        outbox: list[Any] = self._state.outbox
        outbox.append(message)
        self._save()
        return message

    def _save(self) -> None:
        try:
            text = json.dumps(asdict(self._state), separators=(",", ":"), ensure_ascii=False)
            replace_file(self._path, text.encode("utf-8"))
        except OSError as error:
            raise TrunklineError(f"cannot write {self._whose}: {error}") from error

    def _lock(self) -> None:
        deadline = time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OutboxBusy(
                        f"{self._busy} for more than {self._lock_timeout_s:.0f} s",
                        advice="wait for it or end it",
                    ) from None
                time.sleep(_LOCK_TICK_S)
            else:
                return

    def _load(self) -> State:
        try:
            found = json.loads(self._path.read_bytes())
            state = cast("State", self._fresh.read(found)) if isinstance(found, dict) else None
        except FileNotFoundError:
            return self._fresh
        except OSError as error:
            raise TrunklineError(f"cannot read {self._whose}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            state = None
        if state is None or not self._is_own(state):
            raise TrunklineError(
                f"{self._path} is not {self._whose}. It is always written as a whole, so another program has "
                f"changed it: restore it, or {self._foreign}"
            )
        return state

    def _is_own(self, state: State) -> bool:
        """Return whether the state belongs to the outbox that the file is named after."""
        return True


class AgentOutbox(_Outbox[_AgentState, OutboxMessage]):
    """The outbox of one agent. Use it as a context manager, which locks the outbox against other processes.

    If the stored messages were signed with another secret, because the agent was registered anew, the outbox
    starts empty. Entering raises TrunklineError if the file cannot be read.

    Args:
        state_dir: The folder with the outbox's file.
        agent_name: The agent's name. UsageError is raised for an invalid one.
        secret: The agent's secret, of which only a hash is stored.
        lock_timeout_s: The longest time in seconds to wait for another process, before OutboxBusy is
            raised.
    """

    def __init__(self, state_dir: Path, agent_name: str, secret: str, lock_timeout_s: float) -> None:
        if not is_name(agent_name):
            raise UsageError(f"not an agent's name: {agent_name!r}")
        super().__init__(
            state_dir / f"{agent_name}.json",
            _AgentState(agent_name, hashlib.sha256(secret.encode("utf-8")).hexdigest()),
            lock_timeout_s,
            whose=f"the state of the agent {agent_name}",
            busy="another process has been sending for this agent",
            foreign="register the agent anew and remove it",
        )

    def add(self, build: Callable[[int], bytes]) -> OutboxMessage:
        """Store a new message with the next seq in the outbox, and return the message.

        `build` is called with the seq and returns the signed bytes of the message. The message is on disk when
        this returns. Raises TrunklineError if the file cannot be written.
        """
        return self._append(lambda seq: OutboxMessage(seq, build(seq).decode("utf-8")))

    def _load(self) -> _AgentState:
        found = super()._load()
        return found if found.secret_sha256 == self._fresh.secret_sha256 else self._fresh


class JobOutbox(_Outbox[_JobState, PendingEvent]):
    """The outbox of one job. Use it as a context manager, which locks the outbox against other processes.

    Entering raises TrunklineError if the file cannot be read.

    Args:
        state_dir: The folder with the outbox's file.
        job_id: The job. UsageError is raised for an invalid id.
        lock_timeout_s: The longest time in seconds to wait for another process, before OutboxBusy is
            raised.
    """

    def __init__(self, state_dir: Path, job_id: str, lock_timeout_s: float) -> None:
        if not is_job_id(job_id):
            raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
        super().__init__(
            state_dir / f"{job_id}.json",
            _JobState(job_id),
            lock_timeout_s,
            whose=f"the state of job {job_id}",
            busy=f"another process has been publishing for job {job_id}",
            foreign="remove it if this job has published nothing yet",
        )

    @property
    def ended_seq(self) -> int | None:
        """The seq of the event that ends the job; None while no such event was stored."""
        return self._state.ended_seq

    def add(self, event: str, build: Callable[[int], bytes]) -> PendingEvent:
        """Store a new event with the next seq in the outbox, and return the event.

        `event` is its type, such as `started`. `build` is called with the seq and returns the signed bytes of
        the event. The event is on disk when this returns. Raises TrunklineError if the file cannot be written.
        """

        def made(seq: int) -> PendingEvent:
            payload = build(seq).decode("utf-8")
            if event in TERMINAL_EVENTS:
                self._state.ended_seq = seq
            return PendingEvent(seq, payload, event)

        return self._append(made)

    def renew(self, build: Callable[[PendingEvent], bytes | None]) -> None:
        """Replace the bytes of unconfirmed events, as after a rotation of the secret. The seq stays the same.

        `build` is called with each event and returns the event's new bytes, or None to leave the event
        unchanged. The new bytes are on disk when this returns.
        """
        made = [(pending, build(pending)) for pending in self._state.outbox]
        if any(new is not None for _, new in made):
            self._state.outbox = [
                pending if new is None else replace(pending, payload=new.decode("utf-8"))
                for pending, new in made
            ]
            self._save()

    def confirm(self, message: PendingEvent, *, rejected: bool = False) -> None:
        """Remove a confirmed event, one of `pending`, from the outbox, also on disk.

        Set `rejected` if Trunkline rejected the event. If a rejected event would have ended the job, the job
        counts as not ended. Raises TrunklineError if the file cannot be written.
        """
        if rejected and self._state.ended_seq == message.seq:
            self._state.ended_seq = None
        super().confirm(message)

    def _is_own(self, state: _JobState) -> bool:
        return state.job_id == self._fresh.job_id
