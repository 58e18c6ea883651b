"""The check of `trunkline doctor` on agents over MQTT that confirm nothing."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.cli.doctor.gateway import inboxes_finding as finding_of

pytestmark = pytest.mark.requirement("DL-33")


def one(name: str, unconfirmed: int = 0) -> dict[str, Any]:
    """Return an agent of the gateway's answer."""
    return {"agent_name": name, "unconfirmed": unconfirmed}


def test_agents_that_confirm_are_no_finding() -> None:
    assert finding_of([]).level == finding_of([one("ann"), one("bob")]).level == "ok"


def test_agents_that_do_not_confirm_are_named_up_to_three() -> None:
    found = finding_of([one("ann"), *(one(f"bob{number}", 3 + number) for number in range(5))])
    assert found.level == "warn"
    assert found.found == (
        "messages are published again and not confirmed by bob0 (3 times again), bob1 (4 times again), "
        "bob2 (5 times again), and 2 more"
    )
