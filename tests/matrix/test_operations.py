"""The operations over HTTP: by each role, of other owners, repeated, and what of them reaches the log.

What is asked for comes from the declarations, and what is expected from the table of samples. Each request is
sent by both ways: the engine serves it as it is, and the careful path with a header more.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from connectors.hub.serving.policy import Reach
from tests.matrix.asking import (
    CHANGES,
    KEYED,
    UNLOGGED,
    WAYS,
    Watched,
    address,
    both,
    each_operation,
    leaves,
    operation,
)
from tests.matrix.ground import ROLES, Caller, Ground, fresh
from tests.matrix.memory_gateway import Answer
from tests.matrix.samples import SAMPLES, Sample
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE

pytestmark = [pytest.mark.requirement(one) for one in ("ST-90", "HH-11", "HH-12", "SE-07")]

# These take more time or room than the engine has, or wait.
LISTS = ("list_", "show_mailbox", "drain_", "broadcast_")


def test_each_declared_operation_has_a_sample_and_no_other(ground: Ground) -> None:
    assert set(ground.gateway.operations) == set(SAMPLES)


@each_operation
def test_a_sample_has_each_field_of_the_body(ground: Ground, name: str) -> None:
    sample, model = SAMPLES[name], operation(ground, name).BODY
    assert (model is None) == (sample.body is None)
    if model is not None:
        made = sample.request(ground, ground.operator).body
        assert {*made, *sample.lacks} == set(model.model_fields)


@each_operation
@pytest.mark.parametrize("letter", ROLES)
def test_each_role_may_what_the_table_says_and_is_refused_the_rest(
    ground: Ground, name: str, letter: str
) -> None:
    sample, asked = SAMPLES[name], operation(ground, name)
    caller, reach = ground.caller(letter), sample.reach(letter)
    if reach is not None and sample.is_alone:
        watched, request = Watched(ground), sample.request(ground, caller)
        del ground.gateway.begun[:]
        answer = ground.ask(caller, name, request)
        assert answer.status == sample.status, answer
        assert not watched.refused
        if answer.status != 404:
            asked.ANSWER.model_validate(answer.document)
        if asked.IS_DIRECT and not name.startswith(LISTS):
            # The engine notes how a request ended when its answer has left.
            ground.gateway.ask("GET", "/healthz")
            assert ground.gateway.begun[-1:] == ["answered" if sample.status != 404 else "refused"]
    if not asked.parameters and reach is not None and letter != "w":
        return
    # An agent that has ended its task has no token any more.
    caller = ground.caller(letter) if letter == "a" else caller
    # Without a right, not even its own things; with one to its own, not those of others.
    other = caller if reach is None else ground.caller("d" if letter == "a" else letter, 1)
    request = sample.request(ground, other)
    if reach is Reach.ALL:
        # Things that anybody may see or change.
        if sample.is_alone and "lease_id" not in (request.body or {}):
            assert ground.ask(caller, name, request, careful=True).status == sample.status
        return
    if reach is Reach.OWN and not asked.parameters and name != "pick_job":
        return
    watched = Watched(ground)
    answer = both(ground, caller, name, request)
    assert answer.said == (403, "policy"), answer
    assert watched.refused == [("policy", caller.name, asked.route)] * 2
    assert not watched.records


@each_operation
def test_without_a_good_token_nothing_is_done(ground: Ground, name: str) -> None:
    watched, request = Watched(ground), address(ground, name)
    for token in ("", "nobodys-token"):
        answer = both(ground, Caller("", "", token), name, request)
        assert answer.said == (401, "unauthorized")
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert [one[0] for one in watched.refused] == ["unauthorized"] * 4
    assert not watched.records


@pytest.mark.parametrize("name", [one for one in KEYED if SAMPLES[one].is_alone])
@pytest.mark.parametrize("first", WAYS)
def test_a_repeated_request_has_one_effect_and_the_same_answer(ground: Ground, name: str, first: bool) -> None:
    sample, asked, caller = SAMPLES[name], operation(ground, name), ground.operator
    request, key = sample.request(ground, caller), {asked.key_header.decode(): fresh("key")}
    watched = Watched(ground)
    answer = ground.ask(caller, name, request, careful=first, **key)
    made = len(watched.records)
    assert (answer.status, made > 0) == (sample.status, True), answer
    assert answer.verdict == (ACCEPTED if sample.is_known else None)
    asked.ANSWER.model_validate(answer.document)
    for way in (not first, first):
        again = ground.ask(caller, name, request, careful=way, **key)
        assert again.status == sample.status, again
        assert again.verdict == (DUPLICATE if sample.is_known else None)
        assert _same(sample, again) == _same(sample, answer)
    assert len(watched.records) == made
    if sample.other is not None:
        changed = request._replace(body={**request.body, **sample.other})
        assert both(ground, caller, name, changed, **key).said == (409, "seq_conflict")
    assert len(watched.records) == made
    assert not watched.refused


def _same(sample: Sample, answer: Answer) -> dict[str, Any]:
    return {name: value for name, value in answer.document.items() if name not in sample.changes}


@pytest.mark.parametrize("name", [one for one in KEYED if SAMPLES[one].is_alone])
def test_the_same_key_of_another_principal_is_another_request(ground: Ground, name: str) -> None:
    sample, key = SAMPLES[name], {operation(ground, name).key_header.decode(): fresh("key")}
    for caller in (ground.operator, ground.caller("o")):
        watched, request = Watched(ground), sample.request(ground, caller)
        made = len(watched.records)
        answer = ground.ask(caller, name, request, **key)
        assert (answer.status, len(watched.records) > made) == (sample.status, True), answer
        assert answer.verdict in (None, ACCEPTED)


@pytest.mark.parametrize("name", [one for one in CHANGES if one not in UNLOGGED and SAMPLES[one].body])
@pytest.mark.parametrize("careful", WAYS)
def test_each_field_of_the_body_reaches_the_log(ground: Ground, name: str, careful: bool) -> None:
    sample = SAMPLES[name]
    request, watched = sample.request(ground, ground.operator), Watched(ground)
    made = len(watched.records)
    ground.ask(ground.operator, name, request, careful=careful)
    texts = [f"{record.stream} {record.value.decode()}" for record in watched.records[made:]]
    found = " ".join(texts).replace('\\"', '"')
    for field, value in leaves(request.body):
        spelled = json.dumps(value, ensure_ascii=False).strip('"')
        thousandfold = str(value * 1000) if type(value) is int else spelled
        assert spelled in found or thousandfold in found, (field, found)


@pytest.mark.requirement("HB-06")
@pytest.mark.parametrize("careful", WAYS)
def test_a_deleted_task_is_cancelled_and_stays_readable(ground: Ground, careful: bool) -> None:
    request = SAMPLES["delete_task"].request(ground, ground.operator)
    assert (
        ground.ask(ground.operator, "delete_task", request, careful=careful).document["status"] == "cancelled"
    )
    again = ground.ask(ground.operator, "delete_task", request, careful=careful)
    assert again.said == (409, "after_terminal")
    assert ground.ask(ground.operator, "show_task", request).document["status"] == "cancelled"
