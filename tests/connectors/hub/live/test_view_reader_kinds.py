"""The live view's check that each kind of stream has its rows in the tables."""

from __future__ import annotations

import pytest

from schemas.fold.stream_kind import StreamKind
from schemas.settings.settings import Settings
from schemas.streams.fold import KINDS
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.live.local_stores import entries_of, loaded_state
from tests.schemas.job_records import KEYRING
from tests.schemas.stream_records import GOOD, good_record
from trunkline_agent.errors import TrunklineError

KINDS_WITH_ROWS = [kind for kind in KINDS.values() if kind.row_of_each_stream]


def a_stream_of(kind: StreamKind) -> FoldedLog:
    """Return the fold of one stream of this kind."""
    folded = FoldedLog(KEYRING)
    types = [name for name, (key, _) in GOOD.items() if key.startswith(f"{kind.name}/".encode())]
    assert any(folded.add(good_record(name, offset=at)).verdict == "accepted" for at, name in enumerate(types))
    return folded


@pytest.mark.long
@pytest.mark.requirement("HO-01")
@pytest.mark.parametrize("kind", KINDS_WITH_ROWS, ids=lambda kind: kind.name)
def test_a_stream_with_entries_and_without_its_row_is_refused(kind, tmp_path):
    settings, folded = Settings(data_dir=tmp_path), a_stream_of(kind)
    folded.write_entries(settings, {})
    views = " or ".join(row.VIEW for row in kind.row_of_each_stream)
    why = f"entries of {kind.name} streams, but no rows in {views} below"
    with pytest.raises(TrunklineError, match=why), loaded_state(settings, KEYRING):
        pass
    folded.write_rows(settings)
    with loaded_state(settings, KEYRING) as state:
        assert entries_of(state) == folded.entries
