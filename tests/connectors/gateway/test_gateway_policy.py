"""The table of roles and actions, and that no route comes into being without an action."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from connectors.gateway.admission import AdmittedRoute
from connectors.gateway.identities import Identities, Unidentified
from connectors.gateway.policy import Action, Caller, decide
from schemas.principals import ROLES, token_hash
from schemas.settled import AppliedChange
from schemas.view_rows import REGISTRY_PRINCIPALS, PrincipalRow

ALL, OWN, NO = "all", "own", "no"
# action: operator, delegator, worker, viewer
EXPECTED = {
    "job.register": (ALL, ALL, NO, NO),
    "job.pick": (ALL, NO, OWN, NO),
    "job.assign": (ALL, OWN, NO, NO),
    "job.cancel": (ALL, ALL, NO, NO),
    "job.read": (ALL, ALL, OWN, ALL),
    "job.list": (ALL, ALL, NO, ALL),
    "events.read": (ALL, ALL, NO, ALL),
    "verdicts.read": (ALL, NO, NO, NO),
    "brokers.read": (ALL, NO, NO, NO),
    "session.create": (ALL, ALL, NO, NO),
    "session.stop": (ALL, ALL, NO, NO),
    "session.resume": (ALL, ALL, NO, NO),
    "session.read": (ALL, ALL, NO, ALL),
    "principal.add": (ALL, NO, NO, NO),
    "principal.list": (ALL, NO, NO, NO),
    "principal.revoke": (ALL, NO, NO, NO),
    "mailbox.read": (ALL, OWN, OWN, NO),
}


def test_the_table_of_expectations_names_every_action():
    assert set(EXPECTED) == {str(action) for action in Action}


@pytest.mark.parametrize("action", Action)
@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_exactly_the_rights_of_the_table(role, action):
    expected = EXPECTED[action][("operator", "delegator", "worker", "viewer").index(role)]
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

    with pytest.raises(TypeError, match="asks_for"):
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
    identities.changed(AppliedChange(REGISTRY_PRINCIPALS, "ann", 2, _row("t", "revoked")))
    # Rows that were read before the revocation came do not undo it.
    identities.load([_row("t")])
    found = identities.identify("Bearer t")
    assert isinstance(found, Unidentified) and found.principal == "ann"
