"""A small agent of the hub, for experiments and for the demo: `python -m connectors.tools.samples.hub_agent`.

It has no arguments. A launcher passes the hub's address, its token, the id and description of its task, and its
own name in the environment (`connectors.hub.launcher.launch_spec`). It answers each message of type `ask` with
a message of type `answer`. For a message of type `greet` it asks the agent that the payload names in `to`. For
a message of type `finish` it reports to the hub that its task is completed, and ends. If the description of its
task contains `crash`, it kills itself after its first answer.

**Delivers** an answer once, however often it is sent: its key is made from the id of the answered message.
**Loses** nothing when it is killed: a message that it has not acknowledged is handed out again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Final

from connectors.hub.launcher.launch_spec import AGENT_NAME_VARIABLE, TASK_DESCRIPTION_VARIABLE, TASK_ID_VARIABLE
from schemas.streams.principal.principals import HUB
from trunkline_agent import Agent, Credentials
from trunkline_agent.errors import BackboneUnreachable, TrunklineError, UsageError
from trunkline_agent.message import Message
from trunkline_agent.terminal_text import escaped

ASK, ANSWER, GREET, FINISH, EVENT = "ask", "answer", "greet", "finish", "event"
TASK_COMPLETED: Final = "task.completed"
# How long the hub may be down, and how long the agent waits for a message of type `finish`.
GIVE_UP_S: Final = 60.0
LIFE_S: Final = 3600.0
_TEXT_LIMIT: Final = 4000


class HubAgent:
    """An agent that works on one task of the hub: it answers messages until it gets one of type `finish`.

    Args:
        agent: The agent at the hub, with the task's token. The caller closes it.
        task_id: The id of the task, to report its end.
        description: The text of the task. With the word `crash` the agent kills its process after the first
            answer.
    """

    def __init__(self, agent: Agent, task_id: str, description: str) -> None:
        self._agent = agent
        self._task_id = task_id
        self._crashes = "crash" in description.lower()
        self._answered = 0

    def run(self) -> None:
        """Answer messages until one of type `finish` comes; then report the task as completed and return.

        Blocks for about an hour at most. An error leaves the task as it is.

        Raises:
            Refused: The hub no longer accepts the token.
            BackboneUnreachable: The hub has not answered for 60 s.
            TrunklineError: Any other failure, such as no `finish` within an hour.
        """
        deadline, finished = time.monotonic() + LIFE_S, False
        # Answer all messages that are there, also those behind `finish`: no other agent will get them.
        while message := self._agent.receive(wait_s=0 if finished else max(0.0, deadline - time.monotonic())):
            with message:
                self._handle(message)
            finished |= message.type == FINISH
            if self._crashes and self._answered:
                print("about to crash", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        if not finished:
            raise TrunklineError(f"no message of type {FINISH} came within {LIFE_S:.0f} s")
        self._complete()

    def _handle(self, message: Message) -> None:
        if message.type == ASK:
            self._answer(message)
        elif message.type == GREET:
            self._greet(message)
        elif message.type == ANSWER:
            print(f"an answer from {escaped(message.sender)[:128]}", flush=True)
        elif message.type != FINISH:
            print(f"no answer to a message of type {escaped(message.type)[:128]}", flush=True)

    def _answer(self, message: Message) -> None:
        payload = message.payload
        asked = payload.get("text") if isinstance(payload, dict) else None
        if not isinstance(asked, str):
            asked = json.dumps(payload, ensure_ascii=False)
        text = f"{self._agent.name} was asked: {asked}"[:_TEXT_LIMIT]
        try:
            message.reply({"text": text, "in_reply_to": message.id}, ANSWER)
        except BackboneUnreachable:
            raise
        except TrunklineError as error:
            print(f"an answer was not taken: {error}", file=sys.stderr, flush=True)
            return
        self._answered += 1
        print(f"answered {self._answered}", flush=True)

    def _greet(self, message: Message) -> None:
        payload = message.payload
        colleague = payload.get("to") if isinstance(payload, dict) else None
        try:
            self._agent.send(colleague or "", ASK, {"text": f"{self._agent.name} says hello"})
        except BackboneUnreachable:
            raise
        except TrunklineError as error:
            print(f"a question was not taken: {error}", file=sys.stderr, flush=True)

    def _complete(self) -> None:
        result = f"answered {self._answered}"
        key = f"{self._task_id}/{TASK_COMPLETED}"
        self._agent.send(HUB, EVENT, {"event": TASK_COMPLETED, "result": result}, key=key)
        print(result, flush=True)


def main() -> int:
    """Work on the task that environment variables describe, and return the exit code of the process.

    The launcher sets these variables, such as TRUNKLINE_HUB_URL, TRUNKLINE_AGENT_TOKEN and TRUNKLINE_TASK_ID.
    The code is 0 after `finish`. After an error, which is printed to standard error, it is the error's own
    code.
    """
    try:
        if missing := [name for name in (TASK_ID_VARIABLE, AGENT_NAME_VARIABLE) if not os.environ.get(name)]:
            raise UsageError(f"set {', '.join(missing)}")
        if len(sys.argv) > 1:
            raise UsageError("it takes no arguments: it reads its environment")
        description = os.environ.get(TASK_DESCRIPTION_VARIABLE, "")
        with Agent(None, Credentials.from_environment(), patience_s=GIVE_UP_S) as agent:
            HubAgent(agent, os.environ[TASK_ID_VARIABLE], description).run()
    except TrunklineError as error:
        print(f"hub agent: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
