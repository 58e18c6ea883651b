"""Any JSON as the body of any operation: it is answered, and no operation fails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as checks
from hypothesis import strategies as st

from tests.matrix.asking import CHANGES, address
from tests.matrix.ground import Ground, fresh
from tests.matrix.samples import SAMPLES

_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
_LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT
)
_ANY = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=6
)
_FIELDS = ("agent_name", "description", "recipient", "type", "payload", "result", "error", "reason")
_BODIES = st.dictionaries(st.sampled_from(_FIELDS), st.sampled_from(["hub", "x"]) | _ANY, max_size=4)
_RECIPIENTS = st.sampled_from(["hub", "echo", "nobody"])
_ENVELOPES = st.fixed_dictionaries({"recipient": _RECIPIENTS, "type": _TEXT, "payload": _ANY})
_ASKED = st.tuples(
    st.sampled_from([name for name in CHANGES if SAMPLES[name].body is not None]), _BODIES | _ANY
)


@pytest.mark.requirement("HH-11")
@checks(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_ASKED | st.tuples(st.just("send_message"), _ENVELOPES), st.booleans())
def test_no_body_makes_an_operation_fail(ground: Ground, asked: tuple[str, Any], careful: bool) -> None:
    name, body = asked
    free = address(ground, name, name=fresh("free"), topic=fresh("free"))
    answer = ground.ask(ground.operator, name, free._replace(body=body), careful=careful)
    assert answer.status in (200, 201, 400, 403, 404, 409), answer
    if answer.status < 400:
        ground.gateway.operations[name].ANSWER.model_validate(answer.document)
    else:
        assert answer.document.keys() == {"reason", "message"}
