"""Several gateways, killed and started again: one takes commands, and none takes one twice (XP-11)."""

from __future__ import annotations

import signal

import pytest

from connectors.doors.out_of_band.signed_commands import AddListener, HotReload, RemoveListener
from tests.broker_processes import wait_until
from tests.connectors.doors.out_of_band.conftest import CommandStack
from trunkline_agent.errors import BackboneUnreachable

pytestmark = pytest.mark.requirement("XP-11")


def test_of_several_gateways_one_takes_commands_and_the_next_takes_over(stack: CommandStack):
    name, first = stack.added(), stack.gateways[0]
    removal = stack.command(RemoveListener(name))
    reload_ = stack.command(HotReload())
    (stack.folder / "organism.yaml").write_text("listeners: [{name: ann, type: human}]\n")
    assert stack.post(*removal)[0] == 200
    assert stack.post(*reload_)[0] == 200
    second = stack.start()
    wait_until(lambda: "not_served_here" in second.program.log(), what="the second stands by")
    assert stack.give(AddListener({"name": name, "type": "human"}))[0] == 200
    wait_until(lambda: name in stack.listeners(), what="the second gateway knows it, too")
    first.program.stop(signal.SIGKILL)
    # Nobody has taken the socket file away, and the second one replaces it.
    assert stack.settings.command_socket.exists()
    wait_until(lambda: _answers(stack), what="the second takes commands")
    for replayed in (removal, reload_):
        status, answer = stack.post(*replayed)
        assert (status, answer["reason"]) == (403, "replayed")
    assert set(stack.listeners()) == {"ann", name}
    second.program.stop(signal.SIGKILL)
    with pytest.raises(BackboneUnreachable, match="no gateway takes commands"):
        stack.give(HotReload())
    stack.start()
    assert stack.post(*removal)[0] == 403
    assert stack.give(RemoveListener(name))[0] == 200
    third = stack.gateways[-1]
    third.program.stop(signal.SIGTERM)
    assert not stack.settings.command_socket.exists()


def test_a_refused_command_is_known_to_the_gateway_that_refused_it_alone(stack: CommandStack):
    """The threat table is right about nonces: the log has only those that changed something."""
    first = stack.start()
    wait_until(lambda: _answers(stack), what="it takes commands")
    removal = stack.command(RemoveListener("later"))
    assert stack.post(*removal)[0] == 404
    assert stack.give(AddListener({"name": "later", "type": "human"}))[0] == 200
    assert stack.post(*removal)[0] == 403
    first.program.stop(signal.SIGTERM)
    stack.start()
    wait_until(lambda: _answers(stack), what="the next one takes commands")
    assert stack.post(*removal)[0] == 200
    assert stack.post(*removal)[0] == 403


def _answers(stack: CommandStack) -> bool:
    try:
        return stack.post(b"<nothing/>", None)[0] == 400
    except BackboneUnreachable:
        return False
