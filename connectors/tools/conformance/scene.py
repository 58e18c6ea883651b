"""One check of the kit, and the things that it uses: principals, jobs, proxies, processes of the client.

A check has a name, what it says, the features that it needs, and its function. All that it uses ends with it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from connectors.plumbing.gateway_client.event_stream import SETTLED, EventStream
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.tools.conformance.client_process import PROTOCOL, ClientProcess, ClientRefused
from connectors.tools.conformance.http_proxy import HttpProxy
from connectors.tools.conformance.mqtt_proxy import MqttProxy
from connectors.tools.conformance.target import Target
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import ACCEPTED

DELEGATOR: Final = "delegator"
WORKER: Final = "worker"
PATIENCE_S: Final = 8.0
RECEIPT_S: Final = 3.0
# A request of the client, with all its repetitions.
CALL_S: Final = 20.0
_TICK_S: Final = 0.02
_HIT_S: Final = 15.0


class CheckFailed(Exception):
    """The client does not do what a check asks for. The message says what was expected and found."""


class Principal(NamedTuple):
    """A principal of the hub."""

    name: str
    token: str


@dataclass(frozen=True)
class Registered:
    """A job that the kit has registered, with the token of its delegator."""

    job_id: str
    secret: str
    token: str
    stream: EventStream

    def settled(self, wanted: int, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """Return the accepted events of the job, as their `seq`, `event` and `detail`, in the order of the log.

        It waits for `wanted` events, and then a moment for another one that must not be there.
        """
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            event = self.stream.next(min(left_s, 0.3) if len(found) >= wanted else left_s)
            if event is None:
                if len(found) >= wanted:
                    break
                continue
            record = event.data
            if event.name == SETTLED and record["type"] == "job.event" and record["verdict"] == ACCEPTED:
                found.append({name: record["body"][name] for name in ("seq", "event", "detail")})
        return found


class Scene:
    """The things of one check. `close` ends and removes them all.

    Args:
        target: The stack.
        command: The command of the client under test.
        folder: An empty folder for the client's state.
    """

    def __init__(self, target: Target | None, command: Sequence[str], folder: Path) -> None:
        self._target = target
        self._command = command
        self.folder = folder
        self._ends = ExitStack()
        self._operator: GatewayClient | None = None
        self._http: HttpProxy | None = None
        self._mqtt: MqttProxy | None = None
        self.clients: list[ClientProcess] = []

    @property
    def target(self) -> Target:
        """The stack."""
        if self._target is None:
            raise ValueError("this check was run without a stack")
        return self._target

    @property
    def operator(self) -> GatewayClient:
        """The hub as the operator sees it."""
        if self._operator is None:
            self._operator = self._ends.enter_context(self.target.hub())
        return self._operator

    @property
    def http(self) -> HttpProxy:
        """The proxy in front of the hub."""
        if self._http is None:
            self._http = HttpProxy(self.target.settings.gateway_url, self.target.hub_context())
            self._ends.callback(self._http.close)
        return self._http

    @property
    def mqtt(self) -> MqttProxy:
        """The proxy in front of the MQTT broker."""
        if self._mqtt is None:
            broker = self.target.settings.mqtt
            self._mqtt = MqttProxy(broker.host, broker.port, self.target.mqtt_context())
            self._ends.callback(self._mqtt.close)
        return self._mqtt

    def client(self) -> ClientProcess:
        """Start a process of the client and greet it."""
        client = ClientProcess(self._command)
        self.clients.append(client)
        self._ends.callback(client.close)
        client.call("hello", protocol=PROTOCOL)
        return client

    def principal(self, role: str = WORKER) -> Principal:
        """Add a principal with a name of its own. It is revoked with the scene."""
        name = f"conformance-{uuid.uuid4().hex[:12]}"
        answer = self.operator.post(path_of("principals"), {"principal": name, "role": role})
        self._ends.callback(self._revoke, name)
        return Principal(name, answer["token"])

    def hub(self, principal: Principal) -> GatewayClient:
        """Return the hub as a principal sees it, without the proxy."""
        return self._ends.enter_context(self.target.hub(principal.token))

    def agent(self, principal: Principal, patience_s: float = PATIENCE_S) -> ClientProcess:
        """Start a process of the client as an agent, whose requests go through the proxy."""
        client = self.client()
        hub = {"url": self.http.url, "token": principal.token}
        client.call("open", name=principal.name, hub=hub, patience_s=patience_s)
        return client

    def job(self) -> Registered:
        """Register a job."""
        delegator = self.principal(DELEGATOR)
        hub = self.hub(delegator)
        answer = hub.post(path_of("jobs"), {"description": "conformance"})
        job_id = answer["job_id"]
        stream = self._ends.enter_context(EventStream(hub, path_of("jobs", job_id, "events")))
        stream.first(_HIT_S)
        self._ends.callback(self.cancel, job_id)
        return Registered(job_id, answer["secret"], delegator.token, stream)

    def job_client(
        self, job: Registered, via: str, patience_s: float = PATIENCE_S, receipt_timeout_s: float = RECEIPT_S
    ) -> ClientProcess:
        """Start a process of the client that publishes for a job, through a proxy. Its state is in `folder`."""
        client = self.client()
        settings = self.target.settings.mqtt
        doors: dict[str, Any] = {
            "http": {"hub": {"url": self.http.url, "token": job.token}},
            "mqtt": {
                "mqtt": {
                    "host": "127.0.0.1",
                    "port": self.mqtt.port if via == "mqtt" else 0,
                    "tls": False,
                    "prefix": settings.topic_prefix,
                }
            },
        }
        client.call(
            "job_open",
            job_id=job.job_id,
            secret=job.secret,
            state_dir=str(self.folder / "state"),
            via=via,
            patience_s=patience_s,
            receipt_timeout_s=receipt_timeout_s,
            **doors[via],
        )
        return client

    def cancel(self, job_id: str) -> None:
        """Cancel a job, if it has not ended."""
        with suppress(TrunklineError):
            self.operator.post(path_of("jobs", job_id, "cancel"), {})

    def close(self) -> None:
        """End the processes and proxies, and revoke the principals."""
        self._ends.close()

    def _revoke(self, name: str) -> None:
        with suppress(TrunklineError):
            self.operator.post(path_of("principals", name, "revoke"), {})


def wait_hit(event: threading.Event, what: str) -> None:
    """Wait until a proxy has met a request. Raises CheckFailed when it does not come."""
    if not event.wait(_HIT_S):
        raise CheckFailed(f"the client did not send {what} within {_HIT_S:g} s")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait until a condition is true. Raises CheckFailed that names it when it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise CheckFailed(f"not within {timeout_s:g} s: {what}")
        time.sleep(_TICK_S)


def expect(found: object, wanted: object, what: str) -> None:
    """Raise CheckFailed if two values differ."""
    if found != wanted or type(found) is not type(wanted):
        raise CheckFailed(f"{what}: expected {wanted!r}, found {found!r}")


def expect_error(kind: str, call: Callable[[], Any], what: str) -> ClientRefused:
    """Run a call that must fail with an error of this kind, and return the error."""
    try:
        answer = call()
    except ClientRefused as error:
        if error.kind != kind:
            raise CheckFailed(f"{what}: expected the error {kind}, found: {error}") from None
        return error
    raise CheckFailed(f"{what}: expected the error {kind}, found the answer {answer!r}")


FEATURES: Final = (
    "canonical",
    "signing",
    "hub",
    "extend",
    "keeps_leases",
    "ends_long_handlings",
    "ask",
    "topics",
    "handlings",
    "discovery",
    "schedules",
    "blobs",
    "job_http",
    "job_mqtt",
)
_WITHOUT_STACK: Final = {"canonical", "signing"}

Run = Callable[[Scene], None]


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: Its name, which `--only` takes.
        says: One sentence about what must hold.
        needs: The features of the client without which it is not supported.
        run: Runs it in a scene of its own. Raises CheckFailed, ClientRefused or ClientMisbehaved if it fails.
    """

    name: str
    says: str
    needs: frozenset[str]
    run: Run

    @property
    def needs_stack(self) -> bool:
        """True if it needs a live stack."""
        return bool(self.needs - _WITHOUT_STACK)


class Checks(list[Check]):
    """Checks, in the order in which they are shown."""

    def add(self, *needs: str) -> Callable[[Run], Run]:
        """Return a decorator that adds a function as a check, and returns it unchanged.

        The function's name is the name of the check, and the first line of its docstring the sentence.
        """
        unknown = set(needs) - set(FEATURES)
        if unknown:
            raise ValueError(f"no such features: {unknown}")

        def decorate(run: Run) -> Run:
            says = (run.__doc__ or "").partition("\n")[0].rstrip(".")
            self.append(Check(run.__name__, says, frozenset(needs), run))
            return run

        return decorate
