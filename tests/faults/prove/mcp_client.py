"""A client of several agent MCP doors on the library's HTTP and signature. It calls until it is answered.

The library's own call of a tool takes one door, signs by the machine's clock and calls once. Here each attempt
takes another door, and the clock may be wrong.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from tests.agent_signatures import signed_headers
from tests.faults.prove.hub_client import Clock, GaveUp, HubClient, shown, single
from trunkline_agent.credentials import HubAccess
from trunkline_agent.hub import sync_client
from trunkline_agent.hub.plans import Answer, Request
from trunkline_agent.mcp.signing import load_private_key, new_key_pair

_CONNECT_S, _ANSWER_S = 2.0, 6.0
_PAUSE_S: Final = 0.15
_CLOCKS_APART_S: Final = 300
_ACCEPT: Final = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


def new_participant(operator: HubClient, name: str) -> RSAPrivateKey:
    """Register a participant of this name, and return its private key."""
    private, public = new_key_pair()
    body = {"agent_name": name, "public_key": public, "task": "takes part"}
    answer = operator.ask("POST", "/api/hub/participants", json=body)
    assert answer.status == 201, shown(answer)
    return load_private_key(private)


class McpClient:
    """One participant. `urls`: MCP doors, of which each call takes one; `sends` counts the requests that were
    sent, and `answered_by` is the door that has answered the last one. Its clock may be wrong by `skew_s`.
    """

    def __init__(self, urls: Sequence[str], name: str, key: RSAPrivateKey, clock: Clock, seed: int) -> None:
        self._urls, self._name, self._key, self._clock = urls, name, key, clock
        self._draw = random.Random(f"mcp/{name}/{seed}")
        self._doors = {
            url: sync_client.HubClient(HubAccess(url), connect_timeout_s=_CONNECT_S, answer_timeout_s=_ANSWER_S)
            for url in urls
        }
        self._numbers = itertools.count(1)
        self.skew_s = 0.0
        self.skewed = 0
        self.sends = 0
        self.answered_by = ""

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return a tool's result. Raises GaveUp, and AssertionError for an answer that no door may give."""
        skew_s = self.skew_s
        while True:
            answer = self._once(tool, arguments, skew_s)
            if answer is not None and answer.status == 200:
                if abs(skew_s) > _CLOCKS_APART_S + 30:
                    raise AssertionError(f"a call signed {skew_s:g} s off was taken")
                result = answer.json().get("result")
                if result is not None and not result.get("isError"):
                    return dict(result["structuredContent"])
                reason = json.dumps(answer.json())
                if not self._may_pass(reason):
                    raise AssertionError(f"{tool}: {reason}")
            elif answer is not None and answer.status in (401, 403):
                if abs(skew_s) < _CLOCKS_APART_S - 30 and len(self._urls) == 1:
                    raise AssertionError(f"{tool}, signed {skew_s:g} s off: {shown(answer)}")
                self.skewed += bool(skew_s)
                skew_s = 0.0
            if not self._clock.has_patience():
                raise GaveUp(tool)
            time.sleep(_PAUSE_S)

    def _may_pass(self, reason: str) -> bool:
        """True for an answer that another time, or at another door, is a better one."""
        # Where there are two, one may not have read of the recipient yet.
        is_not_read = len(self._urls) > 1 and "unknown_recipient" in reason
        return "unreachable" in reason or "503" in reason or is_not_read

    def _once(self, tool: str, arguments: dict[str, Any], skew_s: float) -> Answer | None:
        params = {"name": tool, "arguments": arguments}
        call = {"jsonrpc": "2.0", "id": next(self._numbers), "method": "tools/call", "params": params}
        body = json.dumps(call).encode()
        signed = signed_headers(self._name, self._key, body, str(int(time.time() + skew_s)))
        self.sends += 1
        url = self._draw.choice(list(self._urls))
        request = Request("POST", "/mcp", None, {**_ACCEPT, **signed}, body, is_repeatable=False)
        outcome = self._doors[url].run(single(request))
        if not isinstance(outcome, Answer):
            return None
        self.answered_by = url
        return outcome

    def close(self) -> None:
        """Close the connections."""
        for door in self._doors.values():
            door.close()
