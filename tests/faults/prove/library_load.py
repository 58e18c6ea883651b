"""Programs of the library that are killed and started again: an agent that answers, and a worker of jobs.

Whoever asks and registers is not killed, so it is known what must be there in the end: each question has one
answer and one message about it, and is claimed; each job has each of its events once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from connectors.programs.local_stack import child_process
from schemas.settings.settings import PROJECT_ROOT
from tests.faults.prove.comparison import DUPLICATE, LOST, MISBEHAVED, Finding, Line, Mail
from tests.faults.prove.crash_points import FOLDER_VARIABLE, is_armed
from tests.faults.prove.delivery_notes import ATTEMPTS_MOST
from tests.faults.prove.hub_client import Clock, GaveUp, HubClient, shown
from tests.faults.prove.library_program import ABOUT, EVENTS, detail_of, kind_of
from tests.faults.prove.oracle import ASKED, ENDED, Note, Oracle, content_hash
from tests.faults.prove.schedule import LIBRARY
from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.message import REPLY_TYPE

# The asker, the agent that is killed, the reader of its messages about the questions, and the killed worker.
UWE, LARS, OLGA = "uwe", "lars", "olga"
_MESSAGES, _JOBS = "/api/hub/messages", "/api/hub/jobs"
_PAUSE_S: Final = 0.4
_LEASE_S: Final = 5
_LOOK_S: Final = 0.1
# A job is cancelled by nobody, so the hub refuses no event of it.
_MAY_FAIL: Final = (-9, 5)


def _mailbox(name: str) -> str:
    return f"mailbox/default/{name}"


@dataclass
class LibraryNotes:
    """The texts of questions by their ids, the jobs that were registered, and how often a program died."""

    questions: dict[str, str] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)
    kills: int = 0


class Program:
    """A program of the library, which is started again whenever it has ended before its time.

    Args:
        kind: Its kind, `agent` or `job`.
        folder: The folder of its files, of its own.
        points: The folder of the crash points.
        config: Its configuration, to which the file `stop` is added.
        environment: More variables.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        points: Path,
        config: Mapping[str, object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        points.mkdir(parents=True, exist_ok=True)
        self._stop, path = folder / "stop", folder / "config.json"
        path.write_text(json.dumps({**config, "stop": str(self._stop)}))
        self._command = [sys.executable, "-P", "-m", "tests.faults.prove.crashing_library", kind, str(path)]
        paths = os.pathsep.join((str(PROJECT_ROOT), str(PROJECT_ROOT / "connectors" / "agent_sdk")))
        self._environment = {
            **os.environ,
            "PYTHONPATH": paths,
            FOLDER_VARIABLE: str(points),
            **(environment or {}),
        }
        self._points, self._kind = points, kind
        self._mark = child_process.mark_of(folder, kind)
        self.log = folder / "program.log"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = 0

    def look_after(self) -> bool:
        """Start it, again if need be. Return whether it has ended because it was to stop and nothing is left.

        For one thread, at whose end the program is killed. Raises AssertionError if it has failed.
        """
        code = None if self._process is None else self._process.poll()
        if self._process is not None and code is None:
            return False
        if code == 0:
            return True
        if code is not None and code not in _MAY_FAIL:
            raise AssertionError(f"the program ended with {code}: {self.log.read_text()[-400:]}")
        self.kills += code == -9
        self._process = child_process.start_child(
            self._command, cwd=PROJECT_ROOT, environment=self._environment, mark=self._mark, log=self.log
        )
        return False

    @property
    def is_to_die(self) -> bool:
        """True if it is to die at a point that it has not come to yet."""
        return is_armed(self._points, f"{LIBRARY}.{self._kind}_")

    def stop(self) -> None:
        """Let it end when nothing is left to do."""
        self._stop.touch()

    def end(self) -> None:
        """Kill it."""
        if self._process is not None:
            child_process.end_child(self._process, self._mark)


class LibraryLoad:
    """Asks the agent and registers jobs, and keeps both programs running. `token` is that of `boss`.

    Args:
        url: The gateway.
        asker: The client of UWE.
        boss: A client that may register jobs.
        token: Its token, with which the worker sends events.
        agents_token: The token of LARS.
        folder: For the files of the programs.
        points: The folder of the crash points.
        broker: The MQTT broker by fields of `Broker`, to which each other job sends its events.
        environment: More variables of the programs.
        lease_s: The duration of the leases of LARS.
    """

    def __init__(
        self,
        url: str,
        asker: HubClient,
        boss: HubClient,
        token: str,
        agents_token: str,
        folder: Path,
        points: Path,
        oracle: Oracle,
        clock: Clock,
        broker: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        lease_s: int = _LEASE_S,
    ) -> None:
        self._asker, self._boss, self._oracle, self._clock = asker, boss, oracle, clock
        self.notes = LibraryNotes()
        agent, jobs = folder / "library-agent", folder / "library-jobs"
        agent.mkdir()
        (jobs / "waiting").mkdir(parents=True)
        Credentials(LARS, HubAccess(url, agents_token)).save(agent / "credentials.json")
        self._waiting, self._acknowledged = jobs / "waiting", jobs / "acknowledged.jsonl"
        self._agent = Program(
            "agent",
            agent,
            points,
            {"credentials": str(agent / "credentials.json"), "about_to": OLGA, "lease_s": lease_s},
            environment,
        )
        config: dict[str, object] = {
            "jobs": str(self._waiting),
            "state": str(jobs / "state"),
            "acknowledged": str(self._acknowledged),
            "url": url,
            "token": token,
            "broker": broker,
        }
        self._doors = ("http", "mqtt") if broker else ("http",)
        self._worker = Program("job", jobs, points, config, environment)

    def runs(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield a name and a function for each thread."""
        yield "LibraryAgent", lambda: self._run(self._agent, self._ask)
        yield "LibraryWorker", lambda: self._run(self._worker, self._register)

    def _run(self, program: Program, give: Callable[[], None]) -> None:
        """Give it work until the load ends and it has died where it should, and let it end then."""
        given_at = 0.0
        try:
            while not program.look_after():
                # Faults at the hub may let a program come to its points late.
                if not self._clock.may_begin() and not program.is_to_die:
                    program.stop()
                elif time.monotonic() > given_at + _PAUSE_S:
                    give()
                    given_at = time.monotonic()
                if not self._clock.has_patience():
                    raise GaveUp(f"the work of {program.log}")
                time.sleep(_LOOK_S)
        finally:
            self.notes.kills += program.kills
            program.end()
            if program is self._worker:
                self._note_acknowledged()

    def _ask(self) -> None:
        key = uuid.uuid4().hex
        body = {"recipient": LARS, "type": "ask", "payload": {"text": key}}
        answer = self._asker.ask_known("POST", _MESSAGES, key=key, json=body)
        if answer.status != 200:
            raise AssertionError(f"a question was not sent: {shown(answer)}")
        message_id = str(answer.json()["message_id"])
        self.notes.questions[message_id] = key
        stored = json.dumps({"text": key}, separators=(",", ":"))
        self._oracle.acked("http", _mailbox(LARS), message_id, UWE, content_hash(UWE, LARS, stored))
        for name, kind in ((UWE, REPLY_TYPE), (OLGA, ABOUT)):
            told = {"recipient": _mailbox(name), "kind": kind, "body": key}
            self._oracle.note(Note(ASKED, "http", _mailbox(LARS), message_id, **told))

    def _register(self) -> None:
        key = f"library-{uuid.uuid4().hex}"
        answer = self._boss.ask("POST", _JOBS, key=key, json={"description": key})
        if answer.status != 201:
            raise AssertionError(f"a job was not registered: {shown(answer)}")
        told = answer.json()
        job_id = str(told["job_id"])
        self.notes.jobs.append(job_id)
        door = self._doors[len(self.notes.jobs) % len(self._doors)]
        fresh = self._waiting / f"{len(self.notes.jobs):06}.new"
        fresh.write_text(json.dumps({"job_id": job_id, "secret": told["secret"], "door": door}))
        fresh.rename(fresh.with_suffix(".json"))

    def _note_acknowledged(self) -> None:
        """Note what the worker was told: it may have been killed before it wrote down the last one."""
        lines = self._acknowledged.read_text().splitlines() if self._acknowledged.exists() else []
        for job_id, door, seq in map(json.loads, lines):
            said = content_hash(kind_of(seq), detail_of(job_id, seq))
            self._oracle.acked(door, f"job/{job_id}", str(seq), job_id, said)
            if seq == EVENTS:
                self._oracle.note(Note(ENDED, door, f"job/{job_id}", "end", status="completed"))


def check_library(
    notes: LibraryNotes,
    mail: Mapping[tuple[str, str], Mail],
    ledger: Sequence[Line],
    *,
    is_at_rest: bool,
) -> Iterator[Finding]:
    """Yield each question that is not answered and settled once, and each event that is not in the log once.

    Args:
        notes: The notes of questions and jobs.
        mail: The messages in the end.
        ledger: The ledger's rows.
        is_at_rest: False: what is not there yet may still come.
    """
    sent = Counter((one.stream, one.kind, one.body) for one in mail.values())
    for message_id, text in notes.questions.items():
        body = json.dumps({"text": text}, separators=(",", ":"))
        for name, kind in ((UWE, REPLY_TYPE), (OLGA, ABOUT)):
            what = f"messages {kind} to {name} about {message_id}, which an agent of the library took"
            yield from _once(sent[_mailbox(name), kind, body], what, is_at_rest)
        question = mail.get((_mailbox(LARS), message_id))
        # Kills and outages may have used up its leases, after the answer.
        is_settled = question is not None and (
            question.status == "claimed" or (question.status == "dead" and question.attempts >= ATTEMPTS_MOST)
        )
        if is_at_rest and not is_settled:
            yield Finding(MISBEHAVED, f"an agent of the library took {message_id}, and left it: {question}")
    events = Counter(
        (line.stream, line.hash)
        for line in ledger
        if line.verdict == "accepted" and line.type == "job.event" and line.stream.startswith("job/")
    )
    for job_id in notes.jobs:
        for seq in range(1, EVENTS + 1):
            said = content_hash(kind_of(seq), detail_of(job_id, seq))
            what = f"events {seq} of job {job_id}, which a worker of the library published"
            yield from _once(events[f"job/{job_id}", said], what, is_at_rest)


def _once(count: int, what: str, is_at_rest: bool) -> Iterator[Finding]:
    if count > 1 or (is_at_rest and not count):
        yield Finding(DUPLICATE if count else LOST, f"there are {count} {what}, not one")
