"""Listeners come, go and are reloaded by signed commands while messages flow (XP-11, XP-12)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.doors.out_of_band.client import give_command
from connectors.doors.out_of_band.signed_commands import AddListener, HotReload, RemoveListener
from tests.broker_processes import BrokerProcess, wait_until
from tests.connectors.doors.xml_pump.pump_stack import PumpStack, document, element, listener, pump_stack

# Messages a second that are posted together, where the machine answers as fast.
RATE = 100
SENDERS = 24
_HANDLERS = """
from connectors.doors.xml_pump.handlers import handles
from connectors.plumbing.xml_payloads.payload_types import to_xml
from tests.connectors.doors.xml_pump.pump_handlers import Work, Worked, note

RELEASE = {release}


@handles(Work)
async def count(message, context):
    note(context.listener, number=message.payload.number, release=RELEASE)
    return to_xml(Worked(message.payload.number))
"""
_MODULE = "handlers_under_load"


class Flow:
    """Senders that post for every listener of the tag, and know what was taken for whom."""

    def __init__(self, stack: PumpStack) -> None:
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._post, args=(stack, number), daemon=True) for number in range(SENDERS)
        ]
        self.taken: list[tuple[float, float, dict[str, str]]] = []
        self.refused: list[tuple[int, str]] = []

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Post no more."""
        self._ending.set()
        for thread in self._threads:
            thread.join(30)

    def _post(self, stack: PumpStack, sender: int) -> None:
        poster, number = stack.poster(), sender
        due = time.monotonic()
        while not self._ending.wait(max(0.0, due - time.monotonic())):
            due += SENDERS / RATE
            begun = time.monotonic()
            answer = poster.post(document(element("work", number=number)))
            number += SENDERS
            if answer.status_code != 202:
                self.refused.append((answer.status_code, answer.text))
                continue
            found = re.findall(r'<message id="([^"]+)" to="([^"]+)"', answer.text)
            self.taken.append((begun, time.monotonic(), {name: one for one, name in found}))


@pytest.fixture(scope="module")
def stack(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PumpStack]:
    """A gateway with one listener, and a pump."""
    folder = tmp_path_factory.mktemp("load")
    (folder / f"{_MODULE}.py").write_text(_HANDLERS.format(release=1))
    steady = {**listener("steady", "work", "count"), "handler": f"{_MODULE}:count"}
    with pump_stack(kafka_broker, folder, {"listeners": [steady]}) as found:
        found.start_pump()
        yield found


@pytest.mark.requirement("XP-11")
@pytest.mark.requirement("XP-12")
def test_nothing_is_lost_and_a_removed_listener_gets_nothing_after_the_answer(stack: PumpStack):
    flow = Flow(stack)
    flow.start()
    guest = AddListener({"name": "guest", "handler": f"{_MODULE}:count"})
    gone: list[tuple[float, float]] = []  # from the answer to a removal until it is added again
    changed: list[tuple[float, float]] = []  # from a command until its answer
    for release in (2, 3):
        changed.append(_given(stack, guest))
        before = len(stack.notes("guest"))
        wait_until(lambda before=before: len(stack.notes("guest")) > before + 20, what="the guest works")
        changed.append(_given(stack, RemoveListener("guest")))
        removed_at, count = time.monotonic(), len(stack.notes("steady"))
        changed.append(_reload(stack, stack.folder / f"{_MODULE}.py", release))
        wait_until(lambda count=count: len(stack.notes("steady")) > count + 50, what="the others work on")
        gone.append((removed_at, time.monotonic()))
    flow.end()
    # A rate is no promise here: a busy machine takes fewer messages. Each command has met some, though.
    for given, answered in changed:
        assert [ids for begun, ended, ids in flow.taken if begun < answered and ended > given]
    _check_handled(stack, flow)
    for since, until in gone:
        assert not [one for one in stack.notes("guest") if since < one["at"] < until]
        assert not [
            ids for begun, ended, ids in flow.taken if since < begun and ended < until and "guest" in ids
        ]
    # A broadcast that meets a removal may be refused, with a <huh> that says so.
    assert all(status == 422 and "removed a moment ago" in text for status, text in flow.refused), flow.refused


def _given(stack: PumpStack, command: AddListener | RemoveListener | HotReload) -> tuple[float, float]:
    """Give a command; returns when it was given, and when it was answered."""
    given = time.monotonic()
    give_command(stack.settings, command)
    return given, time.monotonic()


def _reload(stack: PumpStack, module: Path, release: int) -> tuple[float, float]:
    module.write_text(_HANDLERS.format(release=release))
    found = _given(stack, HotReload())
    wait_until(
        lambda: stack.notes("steady")[-1]["release"] == release, what=f"release {release} of the handlers"
    )
    return found


def _check_handled(stack: PumpStack, flow: Flow) -> None:
    """Each message that was taken is acknowledged, by its handler or by who sent it back."""
    wanted = {one for _, _, ids in flow.taken for one in ids.values()}

    def unsettled() -> set[str]:
        ends = [one["body"] for one in stack.records() if one["type"] in ("message.acked", "message.handled")]
        return wanted - {one["message_id"] for body in ends for one in body.get("messages", [body])}

    wait_until(lambda: not unsettled(), 30, "all is handled")
    handled = {one["number"] for one in stack.notes("steady")}
    posted = [ids["steady"] for _, _, ids in flow.taken if "steady" in ids]
    assert len(posted) == len(flow.taken)
    assert len(handled) >= len(posted)
