"""The table of roles and actions, and that no route comes into being without an action."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from connectors.hub.serving.admission import AdmittedRoute
from connectors.hub.serving.identities import Identities, Unidentified
from connectors.hub.serving.policy import Action, Caller, decide, owner_of_task
from schemas.fold.settled import AppliedChange
from schemas.streams.principal.principals import (
    AGENT,
    DELEGATOR,
    REGISTRY_PRINCIPALS,
    ROLES,
    PrincipalRow,
    token_hash,
)
from schemas.streams.task.task_registry import REGISTRY_TOKENS, TokenRow

ALL, OWN, NO = "all", "own", "no"
# action: operator, delegator, worker, viewer, agent
EXPECTED = {
    "job.register": (ALL, ALL, NO, NO),
    "job.pick": (ALL, NO, OWN, NO),
    "job.assign": (ALL, OWN, NO, NO),
    "job.cancel": (ALL, OWN, NO, NO),
    "job.rotate": (ALL, OWN, NO, NO),
    "job.report": (ALL, OWN, OWN, NO),
    "job.read": (ALL, ALL, OWN, ALL),
    "job.list": (ALL, ALL, NO, ALL),
    "events.read": (ALL, ALL, NO, ALL),
    "verdicts.read": (ALL, NO, NO, NO),
    "brokers.read": (ALL, NO, NO, NO),
    "session.create": (ALL, ALL, NO, NO),
    "session.stop": (ALL, OWN, NO, NO),
    "session.resume": (ALL, OWN, NO, NO),
    "session.read": (ALL, ALL, NO, ALL),
    "principal.add": (ALL, NO, NO, NO),
    "principal.list": (ALL, NO, NO, NO),
    "principal.revoke": (ALL, NO, NO, NO),
    "mailbox.read": (ALL, OWN, OWN, NO, OWN),
    "message.send": (ALL, ALL, ALL, NO, ALL),
    "message.broadcast": (ALL, ALL, ALL, NO, ALL),
    "message.drain": (ALL, ALL, ALL, NO, ALL),
    "message.mark": (ALL, ALL, ALL, NO, ALL),
    "message.replay": (ALL, OWN, OWN, NO, OWN),
    "topic.publish": (ALL, ALL, ALL, NO, ALL),
    "topic.subscribe": (ALL, OWN, OWN, NO, OWN),
    "topic.read": (ALL, ALL, ALL, ALL, ALL),
    "schedule.set": (ALL, OWN, OWN, NO, OWN),
    "schedule.remove": (ALL, OWN, OWN, NO, OWN),
    "schedule.read": (ALL, OWN, OWN, NO, OWN),
    "schedule.list": (ALL, ALL, ALL, NO, ALL),
    "webhook.set": (ALL, OWN, OWN, NO, NO),
    "webhook.read": (ALL, OWN, OWN, NO, OWN),
    "webhook.list": (ALL, ALL, ALL, NO, ALL),
    "audit.read": (ALL, ALL, NO, ALL, NO),
    "agent.read": (ALL, ALL, ALL, ALL, ALL),
    "participant.add": (ALL, NO, NO, NO),
    "participant.stop": (ALL, NO, NO, NO),
    "mailbox.clear": (ALL, NO, NO, NO),
    "limits.read": (ALL, NO, NO, NO),
    "limits.set": (ALL, NO, NO, NO),
    "task.submit": (ALL, ALL, NO, NO, NO),
    "task.read": (ALL, ALL, NO, ALL, OWN),
    "task.cancel": (ALL, OWN, NO, NO, NO),
    "task.end": (ALL, OWN, NO, NO, OWN),
    "pump.run": (ALL, NO, NO, NO),
    "thread.read": (ALL, NO, NO, NO),
    "listener.read": (ALL, NO, NO, NO),
    "token.list": (ALL, ALL, NO, ALL, NO),
    "token.revoke": (ALL, OWN, NO, NO, NO),
}
COLUMNS = (*ROLES, AGENT)


def test_the_table_of_expectations_names_every_action():
    assert set(EXPECTED) == {str(action) for action in Action}


@pytest.mark.parametrize("action", Action)
@pytest.mark.parametrize("role", COLUMNS)
def test_each_role_has_exactly_the_rights_of_the_table(role, action):
    row = EXPECTED[action]
    # The actions that agents have nothing to do with are listed without them.
    expected = row[COLUMNS.index(role)] if COLUMNS.index(role) < len(row) else NO
    caller = Caller("ann", role)
    assert decide(caller, action, "ann").allowed == (expected != NO)
    assert decide(caller, action, "bo").allowed == (expected == ALL)
    assert decide(caller, action, None).allowed == (expected == ALL)


@pytest.mark.parametrize("action", Action)
def test_a_role_that_nobody_knows_may_do_nothing(action):
    assert not decide(Caller("ann", "root"), action, "ann").allowed


def test_a_route_that_names_no_action_cannot_be_made():
    app = FastAPI()
    app.router.route_class = AdmittedRoute

    async def forgotten() -> None: ...

    with pytest.raises(TypeError, match="open_to_all"):
        app.get("/forgotten")(forgotten)


def _row(token, status="active"):
    return PrincipalRow("ann", "worker", status, token_hash(token), "http/operator", 1, None)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "bearer", "Basic operator", "operator", "Bearer nobody"]
)
def test_what_is_no_known_bearer_token_identifies_nobody(header):
    assert isinstance(Identities("operator").identify(header), Unidentified)


def test_a_token_identifies_its_principal_until_it_is_revoked():
    identities = Identities("operator")
    assert identities.identify("Bearer operator") == Caller("operator", "operator")
    identities.load([_row("t")])
    assert identities.identify("bearer t") == Caller("ann", "worker")
    revoked = AppliedChange(REGISTRY_PRINCIPALS, "ann", 2, _row("t", "revoked"))
    identities.changed(revoked)
    # Rows that were read before the revocation came do not undo it.
    loaded_late = Identities("operator")
    loaded_late.changed(revoked)
    loaded_late.load([_row("t")])
    for one in (identities, loaded_late):
        found = one.identify("Bearer t")
        assert isinstance(found, Unidentified) and found.principal == "ann"


def _token_row(token, status="active", expiry=10_000):
    return TokenRow(token, token_hash(token), "echo", "t1", ["answer"], status, 1, expiry, None, None)


@pytest.mark.requirement("HH-02")
def test_a_tasks_token_identifies_its_agent_until_it_expires_or_is_revoked():
    now = [9.0]
    identities = Identities("operator", clock=lambda: now[0])
    identities.changed(AppliedChange(REGISTRY_TOKENS, "gone", 1, _token_row("gone", "revoked")))
    identities.load([_token_row("a"), _token_row("gone")])
    caller = identities.identify("Bearer a")
    assert caller == Caller("echo", AGENT, "t1", "a", ("answer",))
    assert isinstance(identities.identify("Bearer gone"), Unidentified), "revoked while the rows were loaded"
    now[0] = 9.999
    assert identities.identify("Bearer a") == caller
    now[0] = 10.0
    expired = identities.identify("Bearer a")
    assert isinstance(expired, Unidentified) and expired.expired is not None
    now[0] = 9.0
    identities.changed(AppliedChange(REGISTRY_TOKENS, "a", 2, _token_row("a", "revoked")))
    assert isinstance(identities.identify("Bearer a"), Unidentified)


@pytest.mark.requirement("HH-02")
def test_an_agent_owns_its_own_task_and_mailbox_alone():
    caller = Caller("echo", AGENT, "t1")
    assert decide(caller, Action.TASK_END, owner_of_task("t1")).allowed
    assert not decide(caller, Action.TASK_END, owner_of_task("t2")).allowed
    assert not decide(Caller("t1", AGENT), Action.TASK_END, owner_of_task("t1")).allowed
    assert decide(caller, Action.MAILBOX_READ, "echo").allowed
    assert not decide(caller, Action.MAILBOX_READ, "flaky").allowed


@pytest.mark.requirement("SE-07")
def test_a_principal_owns_what_it_has_made_at_this_door_and_an_agent_of_its_name_does_not():
    made = "http/ann"
    assert decide(Caller("ann", DELEGATOR), Action.JOB_CANCEL, made).allowed
    for caller in (Caller("bo", DELEGATOR), Caller("ann", AGENT, "t1")):
        assert not decide(caller, Action.TASK_END, made).allowed
    for elsewhere in ("cli/ann", "mqtt/ann", "task/ann", "/ann", "http/", "http/annabel"):
        assert not decide(Caller("ann", DELEGATOR), Action.JOB_CANCEL, elsewhere).allowed
