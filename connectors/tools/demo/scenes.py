"""The parts of the demo that use the gateway's HTTP API: sessions, agents, and listeners of the XML pump.

A scene that needs agents or listeners which a kept stack does not have is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.tools.demo.steps import Actor
from connectors.tools.samples.hub_agent import FINISH, GREET
from schemas.fold import stream_kind as states
from schemas.settings.settings import Settings
from schemas.streams.principal.principals import OPERATOR
from schemas.streams.session.sessions import TERMINATED
from schemas.streams.task.task_registry import FAILED, TASK_TERMINAL
from trunkline_agent import Agent, Credentials
from trunkline_agent.credentials import HubAccess
from trunkline_agent.errors import MessageRejected, Refused
from trunkline_agent.xml import XmlSender

Tick = Callable[[], None]
_Found = TypeVar("_Found")
# As conf/agents defines them.
ECHO: Final = "echo"
FLAKY: Final = "flaky"
_POLL_S: Final = 0.1
_CLOSED_WITHIN_S: Final = 20.0
_AGENT_S: Final = 30.0
_ANSWER_S: Final = 30.0
_ROWS_MOST: Final = 1000
_SAMPLE: Final = "urn:trunkline:sample:1"


class Scene(NamedTuple):
    """The result of one of these parts (a scene).

    Attributes:
        lines: Texts for the report.
        differences: A text for each difference from the plan; empty if all is as planned.
    """

    lines: list[str]
    differences: list[str]


class _Question(NamedTuple):
    """A payload for the XML pump, the listeners that answer it in this order, and the kind of their answers."""

    payload: str
    answered_by: tuple[str, ...]
    kind: str
    label: str


# The fast one of the search pair answers before the slow one is done. The researcher asks them all by itself.
_QUESTIONS: Final = (
    _Question(
        "<calculate xmlns='{0}'><operation>multiply</operation><first>6</first><second>7</second></calculate>",
        ("calculator",),
        "result",
        "6 times 7",
    ),
    _Question(
        "<search xmlns='{0}'><query>log mailbox</query></search>",
        ("index_search", "archive_search"),
        "found",
        "a search",
    ),
    _Question("<research xmlns='{0}'><text>logs</text></research>", ("researcher",), "report", "a research"),
)


def operator_client(settings: Settings) -> GatewayClient:
    """Return a client of the gateway with the token of this stack's operator. The caller closes it (`with`).

    A token in the environment is ignored. If the operator has no token, one is created and stored in the
    operator's token file. Nothing is sent yet.
    """
    return GatewayClient(settings, token=ensure_operator_token(settings))


def operator_credentials(settings: Settings) -> Credentials:
    """Return the credentials of this stack's operator at the hub, whose token is made if there is none."""
    hub = HubAccess(settings.gateway_url, ensure_operator_token(settings))
    ca_certs = settings.gateway.ca_certs
    return Credentials(OPERATOR, hub, ca_certs=None if ca_certs is None else str(ca_certs))


def pick_job(operator: GatewayClient, actor: Actor) -> bool:
    """Create the session of a job of the demo, and let it pick the job. Return whether that was done.

    Nothing is done if another job waits that any session may pick. The new session would pick that job. On a
    kept stack this may be real work.

    Raises:
        Refused: The gateway gave the session another job, or refuses a request.
        BackboneUnreachable: The gateway does not answer.
    """
    pending = operator.get(path_of("jobs"), {"state": states.PENDING, "limit": _ROWS_MOST})["jobs"]
    if any(row["session_wanted"] is None for row in pending):
        return False
    operator.post(path_of("sessions"), {"session": actor.session, "for_job": actor.job_id})
    grant = operator.post(path_of("jobs", "pick"), {"session": actor.session})
    if grant["job_id"] != actor.job_id:
        raise Refused(f"session {actor.session} asked for a job and got {grant['job_id']}")
    return True


def sessions_end(settings: Settings, sessions: list[str], tick: Tick) -> Scene:
    """Wait up to 20 s until the sessions are terminated, which must happen because their jobs have ended.

    `sessions` are the names of those that have picked a job. `tick` is called while waiting. The result has a
    difference for each session that is not terminated then. Raises TrunklineError if the gateway does not
    answer.
    """
    with operator_client(settings) as gateway:

        def open_sessions() -> dict[str, str]:
            found = {name: gateway.get(path_of("sessions", name))["status"] for name in sessions}
            return {name: status for name, status in found.items() if status != TERMINATED}

        left = _poll(open_sessions, lambda found: not found, _CLOSED_WITHIN_S, tick)
    return Scene(
        [f"Session {name} picked its job at the gateway and ended with it" for name in sessions],
        [f"session {name}: planned to be {TERMINATED}, it is {status}" for name, status in left.items()],
    )


def agents_talk(settings: Settings, tick: Tick) -> Scene:
    """Give tasks to the sample agents `echo` and `flaky`, real processes, and let them talk through the hub.

    `echo` completes its task by a message. `flaky` is killed in the middle, and its task must fail by itself. A
    task with another end is a difference in the result. The result is empty if these agents are not defined.
    `tick` is called while waiting. Raises TrunklineError if the gateway does not answer.
    """
    # A task whose process has died fails after two looks at most.
    limit_s = _AGENT_S + 2 * settings.gateway.task_check_s
    with operator_client(settings) as hub, Agent(OPERATOR, operator_credentials(settings)) as operator:
        defined = {agent["name"] for agent in hub.get(path_of("agents"))["agents"]}
        if not {ECHO, FLAKY} <= defined:
            return Scene([], [])
        tasks = {
            name: hub.post(path_of("tasks"), {"agent_name": name, "description": what})["task"]["id"]
            for name, what in ((ECHO, "greet a colleague"), (FLAKY, "answer once, then crash"))
        }

        def ended(name: str) -> dict[str, Any]:
            path = path_of("tasks", tasks[name])
            return _poll(lambda: dict(hub.get(path)), lambda t: t["status"] in TASK_TERMINAL, limit_s, tick)

        operator.send(ECHO, GREET, {"to": FLAKY})
        failed = ended(FLAKY)
        operator.send(ECHO, FINISH)
        completed = ended(ECHO)
    planned = ((ECHO, completed, states.COMPLETED), (FLAKY, failed, FAILED))
    return Scene(
        [
            f"Agent {ECHO} asked {FLAKY} by the hub; its task: {completed['status']}, {completed['result']}",
            f"Agent {FLAKY} answered and was killed; its task: {failed['status']}, {failed['error']}",
        ],
        [
            f"task of {name}: planned to be {state}, it is {task['status']}"
            for name, task, state in planned
            if task["status"] != state
        ],
    )


def listeners_answer(settings: Settings, tick: Tick) -> Scene:
    """Send questions in XML to the listeners of conf/organism.yaml, and compare the order of their answers.

    It waits at most 30 s for the answers to a question. Missing answers, and answers in another order, are
    differences in the result. Questions to listeners that do not exist are left out. `tick` is called while
    waiting.
    """
    scene = Scene([], [])
    with operator_client(settings) as hub, XmlSender(operator_credentials(settings)) as sender:
        existing = {row["listener"] for row in hub.get(path_of("listeners"))["listeners"]}
        for question in _QUESTIONS:
            if not set(question.answered_by) <= existing:
                continue
            answered = _answers(hub, sender, question, tick)
            wanted = [(name, question.kind) for name in question.answered_by]
            if answered != wanted:
                scene.differences.append(f"{question.label}: planned answers {wanted}, they are {answered}")
            order = ", then ".join(name for name, _ in answered)
            scene.lines.append(f"The XML pump was asked for {question.label}; answers by {order}")
    return scene


def _answers(hub: GatewayClient, sender: XmlSender, question: _Question, tick: Tick) -> list[tuple[str, str]]:
    """Ask a question. Return sender and kind of the answers that came in time, in their order."""
    try:
        posted = sender.send(None, question.payload.format(_SAMPLE))
    except MessageRejected as error:
        return [("nobody", str(error))]

    def of_this_thread() -> list[dict[str, Any]]:
        # Read without taking the messages out, because others may be in the operator's mailbox.
        page = hub.get(path_of("mailboxes", "default", OPERATOR), {"limit": _ROWS_MOST})["messages"]
        return [row for row in page if row["thread"] == posted.thread]

    found = _poll(of_this_thread, lambda rows: len(rows) >= len(question.answered_by), _ANSWER_S, tick)
    return [(row["sender"], row["kind"]) for row in sorted(found, key=lambda row: row["posted_at"])]


def _poll(look: Callable[[], _Found], is_done: Callable[[_Found], bool], limit_s: float, tick: Tick) -> _Found:
    """Look until the result is done or the time is over. Return the last result."""
    deadline = time.monotonic() + limit_s
    while not is_done(found := look()) and time.monotonic() < deadline:
        tick()
        time.sleep(_POLL_S)
    return found
