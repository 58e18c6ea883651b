"""Gives tasks to the hub's agents, follows them and ends them.

  trunkline tasks submit echo "answer Ann's questions"
      starts the agent 'echo' and prints the task's id. The agent gets the task's token by itself;
      --show-token prints it, too, for a client that speaks in the agent's place.
  trunkline tasks submit echo "sum up the mail" --wait 10m       waits for the end, prints the result
  trunkline tasks list --status running
  trunkline tasks complete 5b7e… --result -                      reads the result from standard input
  trunkline tasks cancel 5b7e… --reason "no longer needed"       stops what was launched for it
  trunkline tasks containers                                     what was launched, with its state

Exit codes: 0; 1 the time of '--wait' ran out, and the task runs on; 2 wrong arguments; 3 no such task or agent;
4 refused, not started, or with '--wait' failed or cancelled; 5 the gateway does not answer; 130 after Ctrl-C,
which cancels nothing.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.actions import Actions, argument, flag
from connectors.cli.shared.arguments import STANDARD_INPUT, name_of, read_given_text, request_id
from connectors.cli.shared.call import Call, Columns, Row
from connectors.cli.shared.declared import Shown, add_declared, newest_last
from connectors.cli.shared.text_output import age_of, fields, print_json
from schemas.fold.stream_kind import COMPLETED
from schemas.streams.task.task_registry import TASK_TERMINAL
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError
from trunkline_agent.terminal_text import escaped
from trunkline_agent.wire.message_fields import duration_s

if TYPE_CHECKING:
    from connectors.plumbing.gateway_client.gateway_client import GatewayClient

_EXIT_INTERRUPTED: Final = 130
# The first and the longest pause between two requests while waiting for a task.
_POLL_S: Final = (0.1, 1.0)
_TASK: Final = argument(
    "task_id", "the task, as 'submit' and 'list' show it", type=name_of("a task"), metavar="ID"
)
ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("agent", "the agent; 'agents list' shows the names"),
    argument("description", "what is to be done"),
    request_id("the same task, not a second one, and prints its token again"),
    argument(
        "--wait", "wait at most this long for the end (5m, 2h), and exit as the task ends", type=duration_s
    ),
    flag("--show-token", "print the task's token, as --json does"),
    example='trunkline tasks submit echo "sum up the mail" --wait 10m --json',
)
def _submit(call: Call) -> int:
    """Give an agent a task and start the agent."""
    from connectors.plumbing.gateway_client.gateway_client import path_of

    with call.gateway() as gateway:
        with call.named_request("the gateway took the task") as request_id:
            body = {"agent_name": call.agent, "description": call.description}
            answer = gateway.post(path_of("tasks"), body, request_id=request_id)
        answer["request_id"] = request_id
        try:
            if not call.json:
                _print_submitted(answer, call.show_token)
            if call.wait is not None:
                _wait(gateway, answer, call.wait)
        except KeyboardInterrupt:
            _explain_interrupt(answer["task"]["id"])
            return _EXIT_INTERRUPTED
        finally:
            if call.json:
                print_json(answer)
    return 0 if call.wait is None else _print_end(call, answer["task"])


def _print_submitted(answer: dict[str, Any], with_token: bool) -> None:
    task = answer["task"]
    print(f"task   {escaped(task['id'])}")
    print(f"agent  {escaped(task['agent_name'])}")
    print(f"state  {escaped(task['status'])}")
    again = f"--request-id {answer['request_id']} --show-token"
    token = escaped(answer["token"]) if with_token else f"not shown; the same again with {again} prints it"
    # Flushed, because a long wait may follow.
    print(f"token  {token}", flush=True)


def _wait(gateway: GatewayClient, answer: dict[str, Any], limit_s: float) -> None:
    """Keep `answer["task"]` current until the task has ended.

    Raises TrunklineError when the time is over, and BackboneUnreachable when the gateway is away then.
    """
    from connectors.plumbing.gateway_client.gateway_client import path_of

    task_id, deadline = answer["task"]["id"], time.monotonic() + limit_s
    pause_s, away = _POLL_S[0], None
    while answer["task"]["status"] not in TASK_TERMINAL:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise away or TrunklineError(
                f"task {escaped(task_id)} has not ended within {limit_s:g} s and runs on; "
                f"'trunkline tasks show {escaped(task_id)}' shows its state"
            )
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _POLL_S[1])
        try:
            answer["task"], away = gateway.get(path_of("tasks", task_id)), None
        except BackboneUnreachable as error:
            # A gateway that is restarted still knows the task, so there is no reason to give up.
            if away is None:
                print(f"task {escaped(task_id)} is still waited for: {error}", file=sys.stderr, flush=True)
            away = error


def _print_end(call: Call, task: Row) -> int:
    """Print the end state and the result. Raises Refused when the task was not completed."""
    if task["status"] != COMPLETED:
        raise Refused(
            f"task {escaped(task['id'])} is {escaped(task['status'])}: "
            f"{escaped(task['error'] or 'no reason was given')}"
        )
    if not call.json:
        print(f"state  {escaped(task['status'])}")
        print(f"result {escaped(_result_text(task) or '')}")
    return 0


def _result_text(task: Row) -> str | None:
    """Return a task's result for a person: a string as it is, any other JSON as JSON."""
    result = task["result"]
    return result if result is None or isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _explain_interrupt(task_id: str) -> None:
    task_id = escaped(task_id)
    print(f"task {task_id} runs on; nothing was cancelled.", file=sys.stderr)
    print(f"  see it:     trunkline tasks show {task_id}", file=sys.stderr)
    print(f"  cancel it:  trunkline tasks cancel {task_id} --reason '…'", file=sys.stderr, flush=True)


_TASK_COLUMNS: Final[Columns] = {
    "TASK": "id",
    "STATE": "status",
    "AGE": lambda row: age_of(row["submitted_at"]),
    "AGENT": "agent_name",
    "DESCRIPTION": "description",
    "RESULT OR ERROR": lambda row: _result_text(row) if row["error"] is None else row["error"],
}


@ACTIONS.add(
    _TASK,
    argument("--result", "the result; - reads it from standard input", metavar="TEXT"),
    example="date | trunkline tasks complete 5b7e… --result -",
)
def _complete(call: Call) -> int:
    """Report that a task is done."""
    result = call.result
    if result == STANDARD_INPUT:
        result = read_given_text(result, "--result", call.settings.limits.payload_bytes)
    row = call.post("tasks", call.task_id, "complete", result=result)
    return call.print_answer(row, f"task {call.task_id} is {escaped(row['status'])}")


_CONTAINER_COLUMNS: Final[Columns] = {
    "CONTAINER": "container_name",
    "STATE": "state",
    "SINCE": lambda row: age_of(row["changed_at"]),
    "BACKEND": "backend",
    "PORT": "port",
    "ERROR": "error",
}


def _shown(row: Row) -> list[str]:
    return [fields({**row, "result": _result_text(row)})]


_OF_AGENT: Final = argument("--agent", "only the tasks of this agent", dest="agent_name", metavar="NAME")
_CHANGED: Final = "task {task_id} is {status}"
add_declared(
    ACTIONS,
    "tasks",
    Shown(
        "list",
        "List tasks, the newest last",
        adapted=newest_last("tasks"),
        columns=_TASK_COLUMNS,
        arguments={"agent_name": _OF_AGENT},
    ),
    Shown("show", answer=_shown, arguments={"task_id": _TASK}),
    Shown("fail", answer=_CHANGED, arguments={"task_id": _TASK}),
    Shown("cancel", answer=_CHANGED, arguments={"task_id": _TASK}),
    Shown(
        "containers",
        "List what was launched for tasks, the newest last",
        adapted=newest_last("containers"),
        columns=_CONTAINER_COLUMNS,
    ),
)
