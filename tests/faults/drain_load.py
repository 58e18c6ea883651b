"""Senders to one mailbox and many drains of it, at work while gateways are killed."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import Any

import httpx

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import PRINCIPALS, TIMEOUT_S
from tests.faults.killed_gateways import Asking, Gateways

MESSAGES = "/api/hub/messages"
DRAINER = "drainer"
# By thread; the two of one name are one principal.
SENDERS = ("operator", "sender-1", "sender-2", "sender-2")
DRAINS_AT_ONCE = 8
LIMIT_MOST = 4
PATIENCE_S = 120.0


class Traffic:
    """How many messages are sent and handed out, and how many may be before the next kill is over."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._next = 0
        self._limit = 0
        self._open_at = 0
        self._sent = 0
        self._handed = 0
        self._changed = threading.Condition()

    def allow(self, limit: int, open_at: int = 0) -> None:
        """Let the senders go on up to this number of messages, and the drains when so many are sent."""
        with self._changed:
            self._limit = limit
            self._open_at = open_at
            self._changed.notify_all()

    def next_number(self) -> int | None:
        """Return the next message when it may be sent; None when there is none left."""
        with self._changed:
            may_go = self._changed.wait_for(lambda: self._next < self._limit or self._is_used_up(), PATIENCE_S)
            assert may_go, "the kill is not over"
            if self._is_used_up():
                return None
            self._next += 1
            return self._next - 1

    def _is_used_up(self) -> bool:
        return self._next == self.total

    def add(self, sent: int = 0, handed: int = 0) -> None:
        """So many more were answered as delivered, and handed out."""
        with self._changed:
            self._sent += sent
            self._handed += handed
            self._changed.notify_all()

    @property
    def all_sent(self) -> bool:
        """True if each message was answered as delivered."""
        return self._sent == self.total

    def wait_handed(self, count: int) -> None:
        """Wait until so many are handed out."""
        with self._changed:
            is_so = self._changed.wait_for(lambda: self._handed >= count, PATIENCE_S)
            assert is_so, f"{self._handed} of {count} handed out, {self._sent} sent"

    def wait_open(self) -> None:
        """Wait, as a drain, until drains may go on, and then a moment at most for something to drain."""
        with self._changed:
            is_open = self._changed.wait_for(lambda: self._sent >= self._open_at, PATIENCE_S)
            assert is_open, f"{self._sent} of {self._open_at} sent"
            self._changed.wait_for(lambda: self._sent > self._handed or self.all_sent, 0.5)


class Client:
    """Asks one of the gateways, and repeats what was not answered at any of them until it is."""

    def __init__(self, gateways: Gateways, token: str, seed: int) -> None:
        self._urls = [settings.gateway_url for settings in gateways.settings]
        self._choice = random.Random(seed)  # the same choices in each run
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=15, trust_env=False)
        self.asking = Asking()
        self.cut = 0

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(self, method: str, **request: Any) -> dict[str, Any]:
        """Return the answer to one request about messages."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            url = self._choice.choice(self._urls)
            try:
                with self.asking.of(url):
                    answer = self._http.request(method, url + MESSAGES, **request)
            except (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError):
                # It was asked, and has not answered.
                self.cut += 1
            except (httpx.ConnectError, httpx.ConnectTimeout):
                pass
            else:
                if answer.status_code == 200:
                    return dict(answer.json())
                assert answer.status_code == 503, answer.text
            assert time.monotonic() < deadline, f"no answer in {PATIENCE_S} s"
            time.sleep(0.05)


class Worker(threading.Thread):
    """A client that works until its work is done; what fails it is told to the test."""

    def __init__(self, client: Client, traffic: Traffic) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.traffic = traffic
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Work to the end."""
        try:
            self.work()
        except BaseException as error:  # told to the test, which would not see it in a thread
            self.failure = error
        finally:
            self.client.close()

    def work(self) -> None:
        """Do the work of this kind of client."""
        raise NotImplementedError


class Sender(Worker):
    """Sends each message under a key of its own. `delivered`: its number by its id."""

    def __init__(self, client: Client, traffic: Traffic, name: str) -> None:
        super().__init__(client, traffic)
        self.principal = name
        self.delivered: dict[str, int] = {}

    def work(self) -> None:
        """Send until there is nothing left to send."""
        while (number := self.traffic.next_number()) is not None:
            envelope = {"recipient": DRAINER, "type": "note", "payload": payload_of(number)}
            key = {"Idempotency-Key": f"message-{number}"}
            answer = self.client.ask("POST", json=envelope, headers=key)
            assert answer["delivered"] is True
            self.delivered[answer["message_id"]] = number
            self.traffic.add(sent=1)


class Drainer(Worker):
    """Drains under one request id after the other. `answered`: what each was handed, with its limit."""

    def __init__(self, client: Client, traffic: Traffic, number: int) -> None:
        super().__init__(client, traffic)
        self._number = number
        self._limits = random.Random(number)
        self.answered: dict[str, tuple[int, list[dict[str, Any]]]] = {}

    def work(self) -> None:
        """Drain until all is sent and nothing is left."""
        for turn in range(100_000):
            is_all_sent = self.traffic.all_sent
            request_id, limit = f"drain-{self._number}-{turn}", self._limits.randint(1, LIMIT_MOST)
            messages = self.client.ask("GET", **drain_request(request_id, limit))["messages"]
            self.answered[request_id] = (limit, messages)
            self.traffic.add(handed=len(messages))
            if not messages and is_all_sent:
                return
            self.traffic.wait_open()


def payload_of(number: int) -> dict[str, Any]:
    """Return the payload of the message of this number."""
    return {"number": number, "text": f"message {number} für {DRAINER}"}


def drain_request(request_id: str, limit: int) -> dict[str, Any]:
    """Return parameters and headers of a drain."""
    return {"params": {"limit": limit}, "headers": {"X-Request-ID": request_id}}


def tokens_of(gateways: Gateways) -> dict[str, str]:
    """Add the principals; return their tokens when both gateways know them."""
    roles = {DRAINER: "worker", **dict.fromkeys(SENDERS, "delegator")}
    tokens = {"operator": gateways.token}
    operator = {"Authorization": f"Bearer {gateways.token}"}
    here, there = (settings.gateway_url for settings in gateways.settings)
    for name in sorted(roles.keys() - tokens.keys()):
        body = {"principal": name, "role": roles[name]}
        answer = httpx.post(f"{here}{PRINCIPALS}", json=body, headers=operator, timeout=TIMEOUT_S)
        assert answer.status_code == 201, answer.text
        tokens[name] = answer.json()["token"]
        asked = partial(
            httpx.get, there + MESSAGES, headers={"Authorization": f"Bearer {tokens[name]}"}, timeout=TIMEOUT_S
        )
        wait_until(lambda asked=asked: asked().status_code == 200, what=name)
    return tokens


def killed_under_load(
    gateways: Gateways, tokens: dict[str, str], traffic: Traffic, victims: list[tuple[int, ...]], seed: int
) -> tuple[list[Sender], list[Drainer]]:
    """Send and drain while gateways are killed; each kill comes between messages that wait to be sent."""
    senders = [
        Sender(Client(gateways, tokens[name], seed + number), traffic, name)
        for number, name in enumerate(SENDERS)
    ]
    drainers = [
        Drainer(Client(gateways, tokens[DRAINER], seed + 100 + number), traffic, number)
        for number in range(DRAINS_AT_ONCE)
    ]
    workers: list[Worker] = [*senders, *drainers]
    for worker in workers:
        worker.start()
    draw, step = random.Random(seed), traffic.total // (len(victims) + 1)
    for number, together in enumerate(victims):
        # On a quick machine nothing would be left to send at the last kill, so each waits for the one before.
        at = step * number + draw.randint(step // 2, step)
        # At most kills messages wait for all drains, so that drains are under way; at some the drains wait.
        traffic.allow(at + step // 3, open_at=0 if number % 4 == 3 else at + step // 6)
        traffic.wait_handed(at)
        held = gateways.hold(*together)
        # Now those who have waited ask, too.
        traffic.allow(at + step // 2)
        for some in (senders, drainers):
            wait_until(
                lambda some=some, held=held: any(one.client.asking.is_sent(held) for one in some),
                what="a request to be cut",
            )
        gateways.kill(*together)
    traffic.allow(traffic.total)
    for worker in workers:
        worker.join(PATIENCE_S)
    assert [worker.failure for worker in workers if worker.failure] == []
    assert not any(worker.is_alive() for worker in workers)
    assert sum(sender.client.cut for sender in senders) > 0, "no message was cut by a kill"
    assert sum(drainer.client.cut for drainer in drainers) > 0, "no drain was cut by a kill"
    return senders, drainers
