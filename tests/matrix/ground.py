"""Things and callers of requests, made on a gateway in memory."""

from __future__ import annotations

import itertools
import secrets
from typing import Any, Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from schemas.streams.agents.agent_registry import AgentDefined
from tests.matrix.memory_gateway import OPERATOR_TOKEN, Answer, MemoryGateway

HUB = "/api/hub"
ROLES: Final = {"o": "operator", "d": "delegator", "w": "worker", "v": "viewer", "a": "agent"}
"""The roles by their letters, as in `Sample.may`."""
ATTEMPTS = 2
_numbers = itertools.count(1)


class Caller(NamedTuple):
    """A principal, or the agent of a task."""

    name: str
    letter: str
    token: str
    task_id: str = ""


class Request(NamedTuple):
    """The request of a sample: the parameters of the path, the body, and the query."""

    path: dict[str, str]
    body: Any = None
    query: str = ""


def fresh(kind: str) -> str:
    """Return a name that nothing has yet."""
    return f"{kind}-{next(_numbers)}"


def new_key() -> str:
    """Return a public key that nobody has. It has no private part."""
    modulus = secrets.randbits(2048) | 1 << 2047 | 1
    key = RSAPublicNumbers(65537, modulus).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


class Ground:
    """A gateway with two callers of each role, and functions that make the things of requests."""

    def __init__(self, gateway: MemoryGateway) -> None:
        self.gateway = gateway
        self.operator = Caller("operator", "o", OPERATOR_TOKEN)
        agent = AgentDefined(agent_name="echo", image="x", description="x", capabilities=[], hardened=False)
        gateway.hub.appender.settle_in_thread(agent.record(door="hub", principal="hub"))
        self.known = self.joined()
        self._callers = {letter: (self.principal(letter), self.principal(letter)) for letter in "odwv"}

    def caller(self, letter: str, place: int = 0) -> Caller:
        """Return the first or second caller of a role. An agent is a new one, for a new task."""
        if letter != "a":
            return self._callers[letter][place]
        found = self.do("POST", "/tasks", {"agent_name": "echo", "description": "some work"})
        return Caller("echo", "a", found["token"], found["task"]["id"])

    def ask(self, caller: Caller, operation: str, request: Request, **more: Any) -> Answer:
        """Send the request of an operation."""
        declared = self.gateway.operations[operation]
        path = declared.PATH.format(**request.path) + request.query
        return self.gateway.ask(declared.METHOD, path, request.body, caller.token, **more)

    def do(self, method: str, path: str, body: Any = None, by: Caller | None = None, **headers: str) -> Any:
        """Return the document of a request that works, below `/api/hub` and by default of the operator."""
        token = (by or self.operator).token
        answer = self.gateway.ask(method, f"{HUB}{path}", body, token, **headers)
        assert answer.status in (200, 201), (method, path, answer)
        return answer.document

    def principal(self, letter: str) -> Caller:
        """Return a new principal."""
        name = fresh(ROLES[letter])
        made = self.do("POST", "/principals", {"principal": name, "role": ROLES[letter]})
        return Caller(name, letter, made["token"])

    def as_owner(self, caller: Caller, letters: str) -> Caller:
        """Return the caller if it can make things, as those of `letters` can, otherwise the operator."""
        return caller if caller.letter in letters else self.operator

    def job(self, owner: Caller, session: str | None = None) -> str:
        """Return a new job of a principal that delegates."""
        body = {"description": "some work", "session": session}
        return str(self.do("POST", "/jobs", body, self.as_owner(owner, "od"))["job_id"])

    def job_for(self, owner: Caller) -> str:
        """Return the session that picks next, with a job for it that is its only one."""
        session = owner.name if owner.letter == "w" else fresh("session")
        self.only_job_for(session)
        return session

    def no_job_for(self, session: str) -> None:
        """Let a session have no job, and no job wait for any session: it would be picked first."""
        pending = self.gateway.hub.pending
        if (held := pending.held_by(session)) is not None:
            self.do("POST", f"/jobs/{held.job_id}/cancel")
        while (free := pending.reserve(fresh("nobody"))) is not None:
            pending.release(free)
            self.do("POST", f"/jobs/{free}/cancel")

    def only_job_for(self, session: str) -> None:
        """Let a session have no job, and one wait for it that it picks next."""
        self.no_job_for(session)
        self.job(self.operator, session)

    def job_held(self, owner: Caller) -> str:
        """Return a job that the session of a worker has."""
        picked = self.do("POST", "/jobs/pick", {"session": self.job_for(owner)})
        return str(picked["job_id"])

    def session(self, owner: Caller, *ends: str) -> str:
        """Return a new session of a principal, after these ends."""
        name, by = fresh("session"), self.as_owner(owner, "od")
        self.do("POST", "/sessions", {"session": name}, by)
        for end in ends:
            self.do("POST", f"/sessions/{name}/{end}", {}, by)
        return name

    def task(self, owner: Caller) -> Any:
        """Return a new task of a principal that delegates, or the task of an agent."""
        if owner.letter == "a":
            return self.do("GET", f"/tasks/{owner.task_id}")
        body = {"agent_name": "echo", "description": "some work"}
        return self.do("POST", "/tasks", body, self.as_owner(owner, "od"))["task"]

    def mailbox(self, owner: Caller) -> Caller:
        """Return the owner of a mailbox. A viewer has none."""
        return self.as_owner(owner, "odwa")

    def message(self, owner: Caller) -> str:
        """Return a new message in the mailbox of a caller."""
        body = {"recipient": self.mailbox(owner).name, "type": "note"}
        return str(self.do("POST", "/messages", body)["message_id"])

    def leased(self, owner: Caller) -> dict[str, Any]:
        """Return lease and id of a new message that a caller has leased."""
        message_id = self.message(owner)
        found = self.do("GET", "/messages?lease=3600&limit=1000", by=self.mailbox(owner))
        return {"lease_id": found["lease_id"], "message_ids": [message_id]}

    def dead(self, owner: Caller) -> str:
        """Return a dead message in the mailbox of a caller."""
        leased = self.leased(owner)
        for attempt in range(ATTEMPTS):
            if attempt:
                taken = self.do("GET", "/messages?lease=3600&limit=1000", by=self.mailbox(owner))
                leased["lease_id"] = taken["lease_id"]
            self.do("POST", "/messages/nack", leased, self.mailbox(owner))
        return str(leased["message_ids"][0])

    def topic(self, owner: Caller) -> str:
        """Return a new topic to which a caller's mailbox is subscribed."""
        name = fresh("topic")
        self.do("POST", f"/topics/{name}/subscribe", {}, self.mailbox(owner))
        return name

    def schedule(self, owner: Caller) -> str:
        """Return a new schedule of a caller."""
        name, body = fresh("schedule"), {"recipient": "hub", "type": "x", "every_s": 3600}
        self.do("POST", f"/schedules/{name}", body, self.mailbox(owner))
        return name

    def webhook(self, owner: Caller, *ends: str) -> str:
        """Return the name of a caller's mailbox, whose webhook is set and then has these ends."""
        name = owner.name if owner.letter in "dwa" else self.principal("w").name
        for end in ends:
            body = {} if end else {"url": "https://example.org/first"}
            self.do("POST", f"/webhooks/{name}{end}", body)
        return name

    def joined(self) -> Any:
        """Return a new participant."""
        return self.do("POST", "/participants", {"agent_name": fresh("agent"), "public_key": new_key()})

    def by_mqtt(self) -> str:
        """Return a new agent over MQTT."""
        name = fresh("by-mqtt")
        self.do("POST", f"/agents/{name}/mqtt")
        return name
