"""A small agent that uses the gateway's MCP tools: `python -m connectors.tools.samples.mcp_agent`.

It has no arguments: AGENT_ID, AGENT_KEY_PATH and MCP_SERVER_URL are in its environment. It reports that it is
idle, reads its messages and answers each with `<id> was told: <content>`; meanwhile it reports that it is
working. It ends when the operator sends `finish`.

**Delivers** an answer once, however often it is sent: its key is made from the id of the answered message.
**Loses** nothing when it is killed: a message is marked as read after it was answered.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, Final, Literal

import anyio
from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

from trunkline_agent.credentials import AGENT_ID_VARIABLE, AGENT_KEY_VARIABLE, MCP_URL_VARIABLE
from trunkline_agent.errors import BackboneUnreachable, TrunklineError, UsageError
from trunkline_agent.mcp import UNREACHABLE, agent_client, known_error
from trunkline_agent.terminal_text import escaped

OPERATOR: Final = "operator"
FINISH: Final = "finish"
TOLD: Final = "was told:"
# How long the gateway may be down, and how long the agent waits for `finish`.
GIVE_UP_S: Final = 60.0
LIFE_S: Final = 3600.0
# Between two looks at the mailbox: short after a message, longer while there are none.
_POLL_S: Final = (0.2, 2.0)
_BACKOFF_S: Final = (0.2, 5.0)
_TEXT_LIMIT: Final = 4000
# The reason of an error when the gateway runs, but its backbone does not.
_AWAY: Final = "unreachable"
# The codes of calls that another attempt may help.
_AGAIN: Final = (UNREACHABLE, REQUEST_TIMEOUT, CONNECTION_CLOSED)
# Two of these agents would otherwise answer each other for ever.
_ANSWER: Final = re.compile(rf"\S+ {TOLD}")


class _NotTaken(TrunklineError):
    """The server refused the call. Sending it again would not help."""


class McpAgent:
    """An agent that answers the messages in its mailbox through the gateway's MCP tools.

    `client` is a connected MCP client that signs the calls of the agent `agent_id`; the caller closes it.
    """

    def __init__(self, client: Client, agent_id: str) -> None:
        self._client = client
        self._agent_id = agent_id
        self._answered = 0
        self._handled: set[str] = set()

    async def run(self) -> None:
        """Answer messages until the operator sends `finish`, then return.

        Raises:
            Refused: the agent's key is no longer valid.
            BackboneUnreachable: the gateway has not answered for 60 s.
            TrunklineError: any other failure, such as no `finish` within an hour.
        """
        deadline = time.monotonic() + LIFE_S
        pause_s = _POLL_S[0]
        await self._report("idle")
        while time.monotonic() < deadline:
            # A message that could not be marked as read comes again, and is answered already.
            messages = [one for one in await self._unread() if one["id"] not in self._handled]
            if messages:
                await self._report("working")
                # Answer all messages, also those behind `finish`.
                finished = [await self._handle(message) for message in messages]
                await self._report("idle")
                if any(finished):
                    print(f"answered {self._answered}", flush=True)
                    return
            pause_s = _POLL_S[0] if messages else min(pause_s * 1.5, _POLL_S[1])
            await anyio.sleep(pause_s)
        raise TrunklineError(f"no {FINISH} came within {LIFE_S:.0f} s")

    async def _unread(self) -> list[dict[str, Any]]:
        given = await self._call("get_my_messages", {"unreadOnly": True})
        messages = given.get("messages")
        if isinstance(messages, list) and all(
            isinstance(message, dict) and {"id", "from", "content"} <= message.keys() for message in messages
        ):
            return messages
        raise TrunklineError("the server that answers is no agent MCP server of Trunkline's")

    async def _handle(self, message: Mapping[str, Any]) -> bool:
        """Answer a message and mark it as read. Returns whether it was `finish`."""
        identity, sender, content = str(message["id"]), str(message["from"]), str(message["content"])
        finishes = sender == OPERATOR and _says_finish(content)
        if not finishes and not _ANSWER.match(content):
            await self._answer(identity, sender, content)
        self._handled.add(identity)
        await self._call("mark_read", {"messageIds": [identity], "idempotencyKey": self._key("read", identity)})
        return finishes

    async def _answer(self, identity: str, sender: str, content: str) -> None:
        answer = {
            "targetAgentId": sender,
            "message": f"{self._agent_id} {TOLD} {content}"[:_TEXT_LIMIT],
            "idempotencyKey": self._key("answer", identity),
        }
        try:
            await self._call("send_to_agent", answer)
        except _NotTaken as error:
            print(f"an answer was not taken: {error}", file=sys.stderr, flush=True)
            return
        self._answered += 1

    async def _report(self, status: Literal["idle", "working", "blocked"]) -> None:
        await self._call("update_my_status", {"status": status})

    def _key(self, what: str, identity: str) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self._agent_id}/{what}/{identity}"))

    async def _call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool, again while the gateway is down, for at most `GIVE_UP_S` seconds."""
        give_up_at = time.monotonic() + GIVE_UP_S
        pause_s = _BACKOFF_S[0]
        while True:
            try:
                result = await self._client.call_tool(tool, arguments)
            except MCPError as error:
                if error.code not in _AGAIN:
                    raise known_error(error) from None
                problem = escaped(error.message)
            else:
                said = result.structured_content or {}
                if not result.is_error:
                    return said
                if said.get("reason") != _AWAY:
                    text = " ".join(getattr(part, "text", "") for part in result.content)
                    raise _NotTaken(f"{tool}: {escaped(text)[:300]}")
                problem = f"{tool}: {escaped(str(said.get('message')))[:300]}"
            if time.monotonic() + pause_s > give_up_at:
                raise BackboneUnreachable(f"{problem}, given up after {GIVE_UP_S:g} s")
            await anyio.sleep(pause_s)
            pause_s = min(pause_s * 2, _BACKOFF_S[1])


def _says_finish(content: str) -> bool:
    """Return whether the content is `finish`, as plain text or in an object with the field `text`."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return content.strip() == FINISH
    return isinstance(document, dict) and document.get("text") == FINISH


async def work(url: str, agent_id: str, key_path: str) -> None:
    """Connect to the gateway's MCP server at `url`, be the agent `agent_id`, and return after a `finish`.

    Tries for 60 s to connect. `key_path` is the file with the private key that signs the agent's calls. Raises
    BackboneUnreachable when the gateway does not answer for 60 s, and Refused when the key is not valid. Raises
    TrunklineError for any other failure, such as no `finish` within an hour.
    """
    give_up_at = time.monotonic() + GIVE_UP_S
    pause_s = _BACKOFF_S[0]
    while True:
        connected = False
        try:
            async with agent_client(url, agent_id, key_path) as client:
                connected = True
                return await McpAgent(client, agent_id).run()
        except BackboneUnreachable as error:
            if connected:
                raise
            if time.monotonic() + pause_s > give_up_at:
                raise BackboneUnreachable(f"{error}, given up after {GIVE_UP_S:g} s") from None
        await anyio.sleep(pause_s)
        pause_s = min(pause_s * 2, _BACKOFF_S[1])


def main() -> int:
    """Be the agent that environment variables describe, and return the exit code of the process.

    The variables are AGENT_ID, AGENT_KEY_PATH and MCP_SERVER_URL. The code is 0 after the operator's `finish`.
    After an error, which is printed to standard error, it is the error's own code.
    """
    try:
        needed = (AGENT_ID_VARIABLE, AGENT_KEY_VARIABLE, MCP_URL_VARIABLE)
        if missing := [name for name in needed if not os.environ.get(name)]:
            raise UsageError(f"set {', '.join(missing)}")
        if len(sys.argv) > 1:
            raise UsageError("it takes no arguments: it reads its environment")
        agent_id, key_path, url = (os.environ[name] for name in needed)
        anyio.run(work, url, agent_id, key_path)
    except TrunklineError as error:
        print(f"mcp agent: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
