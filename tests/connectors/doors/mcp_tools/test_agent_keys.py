"""The index of agents' keys (AM-02, AM-03): whom it lets in, and that its time tells nobody who there is."""

from __future__ import annotations

import base64
import itertools
import statistics
import time

import pytest

from connectors.doors.mcp_tools.agents.agent_keys import AgentKeys
from schemas.fold.settled import AppliedChange
from schemas.streams.agents.agent_registry import REGISTRY_KEYS, AgentKeyRow
from tests.connectors.doors.mcp_tools.conftest import key_pair_of
from trunkline_agent.mcp.signing import key_id, load_private_key, new_key_pair, sign

BODY = b'{"jsonrpc":"2.0"}'
FIRST, SECOND = new_key_pair(), new_key_pair()
_offsets = itertools.count(1)


def row(
    public_key: str, agent: str = "ann", status: str = "active", valid_until: int | None = None
) -> AgentKeyRow:
    """A key as the live view has it; later ones are younger."""
    number = next(_offsets)
    return AgentKeyRow(
        agent_name=agent,
        key_id=key_id(public_key),
        public_key=public_key,
        status=status,
        registered_at=number,
        valid_until=valid_until,
        removed_at=None if status == "active" else number,
    )


def changed(keys: AgentKeys, key: AgentKeyRow) -> None:
    """The live view has changed a row."""
    keys.changed(AppliedChange(REGISTRY_KEYS, f"{key.agent_name}/{key.key_id}", next(_offsets), key))


def is_good(keys: AgentKeys, pair: tuple[bytes, str], agent: str = "ann") -> bool:
    """True if a request signed now by this key is the agent's."""
    timestamp = str(int(time.time()))
    return (
        keys.verify_signature(agent, timestamp, BODY, sign(load_private_key(pair[0]), timestamp, BODY)) is None
    )


@pytest.mark.requirement("AM-03")
def test_what_changes_while_the_keys_are_loaded_is_not_undone_by_what_was() -> None:
    keys = AgentKeys()
    changed(keys, row(FIRST[1], status="removed"))
    changed(keys, row(SECOND[1]))
    assert (keys.is_registered("ann"), keys.is_registered("bo")) == (True, False)
    keys.load([row(FIRST[1]), row(SECOND[1], agent="bo")])
    assert not is_good(keys, FIRST)
    assert is_good(keys, SECOND)
    assert is_good(keys, SECOND, "bo")
    assert (keys.is_registered("ann"), keys.is_registered("bo")) == (True, True)
    changed(keys, row(SECOND[1], status="removed"))
    assert not is_good(keys, SECOND)
    assert (keys.is_registered("ann"), keys.is_registered("bo")) == (False, True)


@pytest.mark.requirement("AM-03")
def test_a_key_is_good_until_the_end_of_its_overlap() -> None:
    keys = AgentKeys()
    end_us = int((time.time() + 60) * 1e6)
    keys.load([row(FIRST[1], valid_until=end_us), row(SECOND[1])])
    assert is_good(keys, FIRST)
    assert is_good(keys, SECOND)
    changed(keys, row(FIRST[1], valid_until=end_us - 120_000_000))
    assert not is_good(keys, FIRST)
    assert is_good(keys, SECOND)


@pytest.mark.long
@pytest.mark.requirement("AM-02")
def test_a_wrong_signature_takes_as_long_for_an_unknown_agent() -> None:
    """Of whatever length, for an agent with one key, with two, and with one of another length: the medians of
    300 interleaved checks within 15%; on a machine that others use, in one of ten attempts.
    """
    keys = AgentKeys()
    longer = key_pair_of(4096)[1]
    rows = [row(FIRST[1], "one"), row(FIRST[1], "two"), row(SECOND[1], "two"), row(longer, "longer")]
    keys.load(rows)
    timestamp = str(int(time.time()))
    spreads = []
    for length, first in ((256, 1), (256, 200), (512, 1)):
        signature = base64.b64encode(bytes([first]) * length).decode()
        for _ in range(10):
            took: dict[str, list[float]] = {name: [] for name in ("one", "two", "longer", "nobody")}
            for name in list(took) * 300:
                began = time.perf_counter()
                assert keys.verify_signature(name, timestamp, BODY, signature)
                took[name].append(time.perf_counter() - began)
            medians = [statistics.median(values) for values in took.values()]
            spreads.append(max(medians) / min(medians) - 1)
            if spreads[-1] <= 0.15:
                break
        else:
            pytest.fail(f"signatures of {length} bytes differ by {spreads}")
