"""Checks of leases: handed out again after a kill, extended, lost, acknowledged and given back."""

from __future__ import annotations

import time
from typing import Any, Final

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.tools.conformance.check import Checks
from connectors.tools.conformance.client_process import ClientProcess
from connectors.tools.conformance.http_proxy import Fault
from connectors.tools.conformance.hub_checks import SEND, drained, leased, posted
from connectors.tools.conformance.scene import CALL_S, CheckFailed, Principal, Scene, expect, expect_error

CHECKS: Final = Checks()
# Long enough for a client on a busy machine to extend it in time.
_LEASE_S: Final = 3
# Gateways end a lease up to a second late.
_REDELIVERY_S: Final = 10.0


def _lease(hub: GatewayClient, wait_s: float) -> dict[str, Any] | None:
    """Lease the next message as the kit, for a minute. None: none came in time."""
    query = {"wait": wait_s, "lease": 60, "limit": 1}
    found = hub.get(path_of("messages"), query, wait_s=wait_s)["messages"]
    return dict(found[0]) if found else None


def _given(scene: Scene) -> tuple[ClientProcess, GatewayClient, str, Principal]:
    """Return a client, its mailbox as the kit sees it, the id of a message in it, and its principal."""
    ann, bo = scene.principal(), scene.principal()
    message_id = posted(scene.hub(bo), ann.name, {"n": 1})
    return scene.agent(ann), scene.hub(ann), message_id, ann


@CHECKS.add("hub")
def acknowledges(scene: Scene) -> None:
    """Check that an acknowledged message never comes again, also when the answer to the ack was lost."""
    client, mailbox, message_id, _ = _given(scene)
    got = leased(client, lease_s=_LEASE_S)
    expect((got["id"], got["attempt"], got["payload"]), (message_id, 1, {"n": 1}), "the message")
    scene.http.plant(Fault("POST", f"{SEND}/ack", forward=True))
    client.call("ack", CALL_S, message_id=message_id)
    expect(_lease(mailbox, _LEASE_S + 1.5), None, "a message after its acknowledgement")


@CHECKS.add("hub")
def gives_back(scene: Scene) -> None:
    """Check that a message that was given back is handed out again at once, as the second attempt."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=60)
    client.call("nack", CALL_S, message_id=message_id, error="no disk space")
    again = _lease(mailbox, _REDELIVERY_S) or {}
    expect((again.get("id"), again.get("attempt")), (message_id, 2), "the message and its attempt")


@CHECKS.add("hub")
def killed_before_ack(scene: Scene) -> None:
    """Check that a message is handed out again when the client is killed after the lease, before the ack."""
    client, _, message_id, ann = _given(scene)
    leased(client, lease_s=_LEASE_S)
    client.kill()
    other = scene.agent(ann)
    again = leased(other, _REDELIVERY_S)
    expect((again["id"], again["attempt"]), (message_id, 2), "the message and its attempt")
    other.call("ack", message_id=message_id)


@CHECKS.add("hub")
def lease_is_repeated_not_renewed(scene: Scene) -> None:
    """Check that a lease whose answer was lost is asked for with the same X-Request-ID: attempt 1, at once."""
    ann, bo = scene.principal(), scene.principal()
    message_id = posted(scene.hub(bo), ann.name, {"n": 1})
    client = scene.agent(ann)
    scene.http.plant(Fault("GET", SEND, forward=True))
    got = leased(client, 4.0, lease_s=60)
    expect((got["id"], got["attempt"]), (message_id, 1), "the message and its attempt")
    client.call("ack", message_id=message_id)


@CHECKS.add("hub")
def lost_leases_are_reported(scene: Scene) -> None:
    """Check that the ack of a client that was stopped until another one had its message is `lease_lost`."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=_LEASE_S)
    client.pause()
    again = _lease(mailbox, _REDELIVERY_S)
    client.resume()
    if again is None:
        raise CheckFailed("the lease of a stopped client did not end")
    expect_error("lease_lost", lambda: client.call("ack", CALL_S, message_id=message_id), "a late ack")


@CHECKS.add("extend")
def extends(scene: Scene) -> None:
    """Check that an extended lease lasts longer: no other client gets the message meanwhile."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=_LEASE_S)
    client.call("extend", CALL_S, message_id=message_id, lease_s=30)
    # The lease must not be extended by the client itself.
    client.pause()
    found = _lease(mailbox, _LEASE_S + 2.0)
    client.resume()
    expect(found, None, "a message under an extended lease")
    client.call("ack", CALL_S, message_id=message_id)


@CHECKS.add("keeps_leases")
def keeps_leases(scene: Scene) -> None:
    """Check that the lease of a message that is not settled is extended until the ack."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=_LEASE_S)
    expect(_lease(mailbox, 2 * _LEASE_S + 1.0), None, "a message that is still at work")
    client.call("ack", CALL_S, message_id=message_id)


@CHECKS.add("ends_long_handlings")
def ends_long_handlings(scene: Scene) -> None:
    """Check that a message that is handled for longer than longest_s comes again, and its ack is late."""
    client, mailbox, message_id, _ = _given(scene)
    client.call("lease", CALL_S, wait_s=8.0, lease_s=60, longest_s=1.0)
    again = _lease(mailbox, _REDELIVERY_S) or {}
    expect((again.get("id"), again.get("attempt")), (message_id, 2), "the message and its attempt")
    expect_error("lease_lost", lambda: client.call("ack", CALL_S, message_id=message_id), "a late ack")


@CHECKS.add("hub")
def an_empty_mailbox_is_waited_for(scene: Scene) -> None:
    """Check that a lease waits for a message that comes later, and returns null when none comes in time."""
    ann, bo = scene.principal(), scene.principal()
    client, kit = scene.agent(ann), scene.hub(bo)
    started = time.monotonic()
    expect(client.call("lease", wait_s=1.0, lease_s=30).get("message"), None, "a message of an empty mailbox")
    took = time.monotonic() - started
    if took < 0.9:
        raise CheckFailed(f"lease with wait_s 1 returned after {took:.2f} s")
    client.begin("lease", CALL_S, wait_s=15.0, lease_s=30)
    scene_message = posted(kit, ann.name, {"n": 1})
    message = client.finish().get("message") or {}
    expect(message.get("id"), scene_message, "the message")
    client.call("ack", CALL_S, message_id=scene_message)
    expect(drained(scene.hub(ann)), [], "the mailbox")
