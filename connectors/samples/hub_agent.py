"""A small agent of the hub, for experiments and for the demo: `python -m connectors.samples.hub_agent`.

It has no arguments. A launcher passes the hub's address, its token, the id and description of its task, and its
own name in the environment (`connectors.launcher.protocol`). It answers each message of type `ask` with a
message of type `answer`. For a message of type `greet` it asks the agent that the payload names in `to`. For a
message of type `finish` it reports to the hub that its task is completed, and ends. If the description of its
task contains `crash`, it kills itself after its first answer.

**Delivers** an answer once, however often it is sent: its key is made from the id of the answered message.
**Loses** the messages that it has drained and not answered when it is killed: a drain is acknowledged at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from connectors.gateway_client.gateway_tls import CA_VARIABLE, trust
from connectors.launcher.protocol import (
    AGENT_NAME_VARIABLE,
    AGENT_TOKEN_VARIABLE,
    HUB_URL_VARIABLE,
    TASK_DESCRIPTION_VARIABLE,
    TASK_ID_VARIABLE,
)
from connectors.terminal.terminal_text import escaped
from schemas.streams.principal.principals import HUB
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError, UsageError

MESSAGES: Final = "/api/hub/messages"
ASK, ANSWER, GREET, FINISH, EVENT = "ask", "answer", "greet", "finish", "event"
TASK_COMPLETED: Final = "task.completed"
# How long the hub may be down, and how long the agent waits for a message of type `finish`.
GIVE_UP_S: Final = 60.0
LIFE_S: Final = 3600.0
_REQUEST_S: Final = 30.0
# Between two drains: short after a message, longer while there are none.
_POLL_S: Final = (0.2, 2.0)
_BACKOFF_S: Final = (0.2, 5.0)
_TEXT_LIMIT: Final = 4000
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class _NotTaken(TrunklineError):
    """The hub refused the request. Sending it again would not help."""


class HubAgent:
    """An agent that works on one task of the hub: it answers messages until it gets one of type `finish`.

    Args:
        hub: an HTTP client with the hub's address and the task's token, such as `hub_client` returns.
        name: the agent's name, for the answers.
        task_id: the id of the task, to report its end.
        description: the text of the task. With the word `crash` the agent kills its process after the first
            answer.
    """

    def __init__(self, hub: httpx2.Client, name: str, task_id: str, description: str) -> None:
        self._hub = hub
        self._name = name
        self._task_id = task_id
        self._crashes = "crash" in description.lower()
        self._answered = 0

    def run(self) -> None:
        """Answer messages until one of type `finish` comes; then report the task as completed and return.

        Blocks for about an hour at most. An error leaves the task as it is.

        Raises:
            Refused: the hub no longer accepts the token.
            BackboneUnreachable: the hub has not answered for 60 s.
            TrunklineError: any other failure, such as no `finish` within an hour.
        """
        deadline = time.monotonic() + LIFE_S
        pause_s = _POLL_S[0]
        while time.monotonic() < deadline:
            messages = self._drain()
            # Answer all drained messages, also those behind `finish`: no other agent will get them.
            for message in messages:
                if message["type"] == ASK:
                    self._answer(message)
                elif message["type"] == GREET:
                    self._greet(message)
                elif message["type"] == ANSWER:
                    print(f"an answer from {escaped(str(message['sender']))[:128]}", flush=True)
                elif message["type"] != FINISH:
                    print(f"no answer to a message of type {escaped(str(message['type']))[:128]}", flush=True)
            if any(message["type"] == FINISH for message in messages):
                return self._complete()
            pause_s = _POLL_S[0] if messages else min(pause_s * 1.5, _POLL_S[1])
            time.sleep(pause_s)
        raise TrunklineError(f"no message of type {FINISH} came within {LIFE_S:.0f} s")

    def _drain(self) -> list[dict[str, Any]]:
        # The same id for each attempt: the hub repeats a drain whose answer was lost.
        answer = self._ask("GET", {"X-Request-ID": str(uuid.uuid4())})
        try:
            messages = answer.json()["messages"]
            if all({"id", "sender", "type", "payload"} <= message.keys() for message in messages):
                return list(messages)
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise TrunklineError("the server that answers is no hub of Trunkline's")

    def _answer(self, message: Mapping[str, Any]) -> None:
        payload = message["payload"]
        asked = payload.get("text") if isinstance(payload, dict) else None
        if not isinstance(asked, str):
            asked = json.dumps(payload, ensure_ascii=False)
        text = f"{self._name} was asked: {asked}"[:_TEXT_LIMIT]
        body = {"text": text, "in_reply_to": message["id"]}
        try:
            self._post(message["sender"], ANSWER, body, f"{ANSWER}/{message['id']}")
        except _NotTaken as error:
            print(f"an answer was not taken: {error}", file=sys.stderr, flush=True)
            return
        self._answered += 1
        print(f"answered {self._answered}", flush=True)
        if self._crashes:
            print("about to crash", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def _greet(self, message: Mapping[str, Any]) -> None:
        payload = message["payload"]
        colleague = payload.get("to") if isinstance(payload, dict) else None
        try:
            self._post(colleague, ASK, {"text": f"{self._name} says hello"}, f"{GREET}/{message['id']}")
        except _NotTaken as error:
            print(f"a question was not taken: {error}", file=sys.stderr, flush=True)

    def _complete(self) -> None:
        payload = {"event": TASK_COMPLETED, "result": f"answered {self._answered}"}
        self._post(HUB, EVENT, payload, TASK_COMPLETED)
        print(payload["result"], flush=True)

    def _post(self, recipient: object, kind: str, payload: dict[str, Any], what: str) -> None:
        key = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self._task_id}/{what}"))
        body = {"recipient": recipient, "type": kind, "payload": payload}
        self._ask("POST", {"Idempotency-Key": key}, body)

    def _ask(self, method: str, headers: dict[str, str], body: object = None) -> httpx2.Response:
        """Send one request, again while the hub is down, for at most `GIVE_UP_S` seconds."""
        give_up_at = time.monotonic() + GIVE_UP_S
        pause_s = _BACKOFF_S[0]
        while True:
            try:
                answer = self._hub.request(method, MESSAGES, headers=headers, json=body)
            except httpx2.RequestError as error:
                problem = f"the hub does not answer ({type(error).__name__})"
            else:
                if answer.is_success:
                    return answer
                if answer.status_code == 401:
                    raise Refused("the hub refuses the token: it has expired, or the task is over")
                problem = f"the hub answers {answer.status_code}: {escaped(answer.text)[:300]}"
                if answer.status_code < 500:
                    raise _NotTaken(problem)
            if time.monotonic() + pause_s > give_up_at:
                raise BackboneUnreachable(f"{problem}, given up after {GIVE_UP_S:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _BACKOFF_S[1])


def hub_client(environment: Mapping[str, str]) -> httpx2.Client:
    """Return an HTTP client with the hub's address and the task's token. The caller closes it.

    `environment` has the variables TRUNKLINE_HUB_URL and TRUNKLINE_AGENT_TOKEN, and perhaps TRUNKLINE_CA_CERTS.
    Raises KeyError when one of the first two is missing. Raises UsageError, which does not show the token, when
    one of them is invalid, and SettingsError for a certificate file that cannot be read.
    """
    url, token = environment[HUB_URL_VARIABLE], environment[AGENT_TOKEN_VARIABLE]
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"{HUB_URL_VARIABLE}: expected http://host:port")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(f"{AGENT_TOKEN_VARIABLE} holds no token")
    return httpx2.Client(
        base_url=url.rstrip("/"),
        headers={"Authorization": f"Bearer {token}"},
        timeout=_REQUEST_S,
        # Connections to this machine must not use a proxy of the environment.
        trust_env=parts.hostname not in _LOOPBACK,
        verify=trust(url, environment.get(CA_VARIABLE)) or False,
    )


def main() -> int:
    """Work on the task that environment variables describe, and return the exit code of the process.

    The launcher sets these variables, such as TRUNKLINE_HUB_URL, TRUNKLINE_AGENT_TOKEN and TRUNKLINE_TASK_ID.
    The code is 0 after `finish`. After an error, which is printed to standard error, it is the error's own
    code.
    """
    try:
        needed = (HUB_URL_VARIABLE, AGENT_TOKEN_VARIABLE, TASK_ID_VARIABLE, AGENT_NAME_VARIABLE)
        if missing := [name for name in needed if not os.environ.get(name)]:
            raise UsageError(f"set {', '.join(missing)}")
        if len(sys.argv) > 1:
            raise UsageError("it takes no arguments: it reads its environment")
        description = os.environ.get(TASK_DESCRIPTION_VARIABLE, "")
        with hub_client(os.environ) as hub:
            HubAgent(hub, os.environ[AGENT_NAME_VARIABLE], os.environ[TASK_ID_VARIABLE], description).run()
    except TrunklineError as error:
        print(f"hub agent: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
