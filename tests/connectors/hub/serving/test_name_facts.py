"""Facts of names are kept until a row changes that they depend on, and never longer (ST-91)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.hub.services.principal_limits import NameFacts
from schemas.effects.recipients import has_mailbox, limits_of
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.streams.control.limits import LimitRow
from schemas.streams.mailboxes.message import MessageRow
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.schemas.hub_records import public_key

pytestmark = pytest.mark.requirement("ST-91")


def test_facts_follow_the_rows_that_they_are_made_of(tmp_path: Path) -> None:
    hub = FoldedHub(tmp_path)
    assert not hub.names.of(has_mailbox, "bo")
    hub.join("bo", public_key(1))
    assert hub.names.of(has_mailbox, "bo")
    assert hub.names.of(limits_of, "bo").pending_most == limits_of(hub.get, "bo").pending_most
    hub.limit("bo", pending_most=3)
    assert hub.names.of(limits_of, "bo").pending_most == 3


def test_a_fact_is_asked_once_until_a_row_of_its_kind_changes() -> None:
    asked: list[str] = []

    def fact(get: Any, name: str) -> int:
        asked.append(name)
        return len(asked)

    facts = NameFacts(lambda *_: None)
    assert [facts.of(fact, "a") for _ in range(3)] == [1, 1, 1]
    facts.changed(AppliedChange(MessageRow.VIEW, "k", 1, None))
    assert facts.of(fact, "a") == 1
    facts.changed(AppliedChange(LimitRow.VIEW, "k", 2, None))
    assert facts.of(fact, "a") == 2


def test_a_fact_that_was_made_of_older_rows_is_not_kept() -> None:
    facts = NameFacts(lambda *_: None)

    def changing(get: Any, name: str) -> str:
        facts.changed(AppliedChange(LimitRow.VIEW, "k", 1, None))
        return "old"

    assert facts.of(changing, "a") == "old"
    assert not facts._known


@pytest.mark.parametrize("fact", [has_mailbox, limits_of])
def test_a_fact_is_forgotten_when_any_row_changes_that_it_asks_for(fact: Callable[..., Any]) -> None:
    asked = list[type[Row]]()

    def get(row_type: Any, key: str, /) -> None:
        asked.append(row_type)

    facts = NameFacts(get)
    facts.of(fact, "bo")
    for row_type in set(asked):
        facts.of(fact, "bo")
        before = len(asked)
        facts.changed(AppliedChange(row_type.VIEW, "k", 1, None))
        facts.of(fact, "bo")
        assert len(asked) > before, row_type
