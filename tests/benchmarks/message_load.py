"""Messages over HTTP at a steady rate, for benchmarks that ask when they can be read."""

from __future__ import annotations

import sys
import threading
import time

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.settings.settings import Settings
from trunkline_agent import Agent, Credentials, HubAccess
from trunkline_agent.errors import TrunklineError

RECIPIENTS = 20


class MessageSender(threading.Thread):
    """Posts `rate` messages a second to some recipients until `stop`. `sent`: id to the moment before its POST
    (seconds since 1970), of those that were answered.
    """

    def __init__(self, settings: Settings, rate: int, label: str) -> None:
        super().__init__(daemon=True)
        self._rate, self._url = rate, settings.gateway_url
        self._token = settings.operator_token_file.read_text().strip()
        self._names = [f"{label}{number}" for number in range(RECIPIENTS)]
        self.sent: dict[str, float] = {}
        self.stop = threading.Event()
        with GatewayClient(settings) as gateway:
            for name in self._names:
                gateway.post(path_of("principals"), {"principal": name, "role": "worker"})

    def run(self) -> None:
        """Post until `stop` is set."""
        began = time.monotonic()
        with Agent(None, Credentials("", hub=HubAccess(self._url, self._token)), patience_s=0) as agent:
            number = 0
            while not self.stop.wait(max(0.0, began + number / self._rate - time.monotonic())):
                payload = {"text": "step 7 of 12 done, reading the index", "n": number}
                moment = time.time()
                try:
                    sent = agent.send(self._names[number % RECIPIENTS], "note", payload)
                except TrunklineError as error:
                    print(f"messages: the load ended: {error}", file=sys.stderr)
                    return
                self.sent[str(sent.message_id)] = moment
                number += 1
