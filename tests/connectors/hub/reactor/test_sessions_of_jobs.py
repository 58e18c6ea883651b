"""The reactor's memory of the sessions that were made for jobs."""

from __future__ import annotations

import msgspec
import pytest

from connectors.hub.reactor.derived_records import SessionsByJob
from schemas.streams.session.sessions import STOPPED, TERMINATED, SessionRow

ROW = SessionRow("s1", "running", "d", None, None, "0badcafe", None, 0, "ann", 1, None, None, None)


@pytest.mark.requirement("ST-71")
def test_the_sessions_of_a_job_are_known_until_they_have_ended_and_then_take_no_memory() -> None:
    sessions = SessionsByJob()
    other = msgspec.structs.replace(ROW, session="s2")
    for row in (ROW, other, msgspec.structs.replace(ROW, session="s3", for_job=None), None):
        sessions.add(row)
    assert sorted(sessions.made_for("0badcafe")) == ["s1", "s2"]
    sessions.add(msgspec.structs.replace(ROW, status=STOPPED))
    assert sorted(sessions.made_for("0badcafe")) == ["s1", "s2"], "it can be resumed"
    sessions.add(msgspec.structs.replace(ROW, status=TERMINATED))
    assert sessions.made_for("0badcafe") == ["s2"]
    sessions.add(msgspec.structs.replace(other, status=TERMINATED))
    assert not sessions._names
