"""The bodies of our own records: strict, and what is wrong with them is said without the input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from schemas.streams.job.job_registry import JobCancellation, JobPick, JobRegistration, JobSecretRotation
from schemas.streams.mailboxes.message import Message
from schemas.streams.principal.principals import PrincipalAddition, PrincipalRevocation
from schemas.streams.refused.refusal import Refusal
from schemas.streams.session.sessions import SESSION_MODELS
from schemas.wire.wire_body import WireBody, body_fault, first_fault
from tests.schemas.stream_records import GOOD

CANARY = "canary-8d2f"
MODELS: dict[str, type[BaseModel]] = {
    "job.registered": JobRegistration,
    "job.picked": JobPick,
    "job.cancelled": JobCancellation,
    "job.secret_rotated": JobSecretRotation,
    "message.posted": Message,
    "principal.added": PrincipalAddition,
    "principal.revoked": PrincipalRevocation,
    "request.refused": Refusal,
    **SESSION_MODELS,
}
HOSTILE = st.sampled_from(
    (
        CANARY,
        f"/{CANARY}",
        f"{CANARY}\u0007",
        CANARY * 2000,
        [CANARY],
        {CANARY: CANARY},
        {"host": {CANARY: CANARY}},
        {"host": "h", CANARY: 1},
        {"port": CANARY},
        None,
        True,
        1.5,
        -(2**63),
    )
)


@pytest.mark.requirement("CM-05")
@given(st.data(), st.sampled_from(sorted(MODELS)))
@settings(max_examples=150, deadline=None)
def test_what_is_said_of_a_wrong_body_quotes_nothing_of_it(data: st.DataObject, record_type: str) -> None:
    body = dict(GOOD[record_type][1])
    fields = st.sampled_from((*body, "broker", "reason", "description", "host", CANARY))
    body |= data.draw(st.dictionaries(fields, HOSTILE, min_size=1, max_size=3))
    fault = body_fault(MODELS[record_type], body)
    assert fault is None or CANARY not in fault
    if CANARY in body:
        assert fault is not None, "a key that nobody knows is refused"


@pytest.mark.parametrize("record_type", sorted(MODELS))
def test_a_good_body_has_no_fault_and_each_missing_field_is_named_or_has_a_default(record_type: str) -> None:
    model, body = MODELS[record_type], GOOD[record_type][1]
    assert body_fault(model, body) is None
    required = {f.alias or name for name, f in model.model_fields.items() if f.is_required()}
    for name in body:
        fault = body_fault(model, {key: value for key, value in body.items() if key != name})
        assert (fault is None) == (name not in required), name
        assert fault is None or fault.startswith(f"{name}: ")


def test_a_fault_names_the_place_and_not_the_key_that_a_stranger_chose() -> None:
    body = GOOD["job.registered"][1]
    assert (body_fault(JobRegistration, body | {CANARY: 1}) or "").startswith("body: ")
    assert (body_fault(JobRegistration, body | {"broker": {"port": 0}}) or "").startswith("broker.port: ")
    nested = body_fault(JobRegistration, body | {"broker": {CANARY: 1}})
    assert (nested or "").startswith("broker: ")
    with pytest.raises(ValidationError) as caught:
        JobPick.model_validate({"job_id": "ab12cd34", "session": CANARY + "/"})
    assert first_fault(caught.value).startswith("session: ")


@pytest.mark.parametrize("model", sorted(MODELS.values(), key=lambda m: m.__name__))
def test_bodies_are_strict_frozen_and_of_version_1(model: type[BaseModel]) -> None:
    assert issubclass(model, WireBody)
    assert (model.model_config["extra"], model.model_config["strict"], model.model_config["frozen"]) == (
        "forbid",
        True,
        True,
    )
    assert model.model_fields["schema_version"].default == 1


BAD_NAMES: tuple[Any, ...] = (
    "",
    ".",
    "..",
    "-x",
    "_x",
    "a/b",
    "a b",
    "a\n",
    "+",
    "#",
    "\u0661",
    "x" * 129,
    7,
    None,
)


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_is_one_by_the_rule_for_names(name: Any) -> None:
    assert body_fault(PrincipalRevocation, {"schema_version": 1, "principal": name}) is not None
    assert body_fault(JobPick, {"schema_version": 1, "job_id": "ab12cd34", "session": name}) is not None
