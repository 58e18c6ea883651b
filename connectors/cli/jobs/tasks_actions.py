"""What `trunkline tasks` does for each action."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from connectors.cli.shared.given_content import STANDARD_INPUT, read_given_text
from connectors.cli.shared.hub_options import named_request
from connectors.cli.shared.hub_rows import Row, checked_name, print_rows
from connectors.cli.shared.text_table import age_of, fields, print_json
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.terminal.terminal_text import escaped
from schemas.errors import BackboneUnreachable, Refused, TrunklineError
from schemas.fold.life_cycles import COMPLETED, TASK_TERMINAL

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

EXIT_INTERRUPTED: Final = 130
# Between two looks at a task that is waited for.
_POLL_S: Final = (0.1, 1.0)


def submit(args: argparse.Namespace, settings: Settings) -> int:
    """Submit a task, and wait for its end if that is wanted."""
    with GatewayClient(settings) as gateway:
        with named_request(args.request_id, "the task was taken") as request_id:
            body = {"agent_name": args.agent, "description": args.description}
            told = gateway.post(path_of("tasks"), body, request_id=request_id)
        told["request_id"] = request_id
        try:
            if not args.json:
                _print_submitted(told, args.show_token)
            if args.wait is not None:
                _wait(gateway, told, args.wait)
        except KeyboardInterrupt:
            _tell_it_runs_on(told["task"]["id"])
            return EXIT_INTERRUPTED
        finally:
            if args.json:
                print_json(told)
    return 0 if args.wait is None else _print_end(args, told["task"])


def _print_submitted(told: dict[str, Any], with_token: bool) -> None:
    task = told["task"]
    print(f"task   {escaped(task['id'])}")
    print(f"agent  {escaped(task['agent_name'])}")
    print(f"state  {escaped(task['status'])}")
    again = f"--request-id {told['request_id']} --show-token"
    token = escaped(told["token"]) if with_token else f"not shown; the same again with {again} prints it"
    # At once: it may be waited for the end for long.
    print(f"token  {token}", flush=True)


def _wait(gateway: GatewayClient, told: dict[str, Any], limit_s: float) -> None:
    """Keep `told["task"]` as it is, until it has ended. Raises TrunklineError when the time is over, and
    BackboneUnreachable when the gateway is away then.
    """
    task_id, deadline = told["task"]["id"], time.monotonic() + limit_s
    pause_s, away = _POLL_S[0], None
    while told["task"]["status"] not in TASK_TERMINAL:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise away or TrunklineError(
                f"task {escaped(task_id)} has not ended within {limit_s:g} s and runs on; "
                f"'trunkline tasks show {escaped(task_id)}' says how it is"
            )
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _POLL_S[1])
        try:
            told["task"], away = gateway.get(path_of("tasks", task_id)), None
        except BackboneUnreachable as error:
            # A gateway that is started anew knows the task, so there is no reason to give up.
            if away is None:
                print(f"task {escaped(task_id)} is still waited for: {error}", file=sys.stderr, flush=True)
            away = error


def _print_end(args: argparse.Namespace, task: Row) -> int:
    """Say how the task has ended. Raises Refused when it was not completed."""
    if task["status"] != COMPLETED:
        raise Refused(
            f"task {escaped(task['id'])} is {escaped(task['status'])}: "
            f"{escaped(task['error'] or 'nobody said why')}"
        )
    if not args.json:
        print(f"state  {escaped(task['status'])}")
        print(f"result {escaped(_shown_result(task) or '')}")
    return 0


def _shown_result(task: Row) -> str | None:
    """Return a task's result for a person: a string as it is, any other JSON as JSON."""
    result = task["result"]
    return result if result is None or isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _tell_it_runs_on(task_id: str) -> None:
    task_id = escaped(task_id)
    print(f"task {task_id} runs on; nothing was cancelled.", file=sys.stderr)
    print(f"  see it:     trunkline tasks show {task_id}", file=sys.stderr)
    print(f"  cancel it:  trunkline tasks cancel {task_id} --reason '…'", file=sys.stderr, flush=True)


def list_tasks(args: argparse.Namespace, settings: Settings) -> int:
    """Print the tasks that are wanted; NotFound when there is none."""
    wanted = {"status": args.status, "agent_name": args.agent, "limit": args.limit}
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of("tasks"), wanted)
    found["tasks"].reverse()
    heading = ("TASK", "STATE", "AGE", "AGENT", "DESCRIPTION", "RESULT OR ERROR")

    def cells(row: Row) -> tuple[object, ...]:
        came_of_it = _shown_result(row) if row["error"] is None else row["error"]
        age = age_of(row["submitted_at"])
        return row["id"], row["status"], age, row["agent_name"], row["description"], came_of_it

    return print_rows(args, found, "tasks", heading, cells)


def show(args: argparse.Namespace, settings: Settings) -> int:
    """Print one task."""
    task_id = checked_name(args.task, "a task")
    with GatewayClient(settings) as gateway:
        row = gateway.get(path_of("tasks", task_id))
    print_json(row) if args.json else print(fields({**row, "result": _shown_result(row)}))
    return 0


def complete(args: argparse.Namespace, settings: Settings) -> int:
    """Complete a task with its result."""
    result = args.result
    if result == STANDARD_INPUT:
        result = read_given_text(result, "--result", settings.limits.payload_bytes)
    return _end(args, settings, "complete", {"result": result})


def fail(args: argparse.Namespace, settings: Settings) -> int:
    """Say that a task has failed."""
    return _end(args, settings, "fail", {"error": args.error})


def cancel(args: argparse.Namespace, settings: Settings) -> int:
    """Cancel a task."""
    return _end(args, settings, "cancel", {"reason": args.reason})


def _end(args: argparse.Namespace, settings: Settings, how: str, said: dict[str, str | None]) -> int:
    task_id = checked_name(args.task, "a task")
    with GatewayClient(settings) as gateway:
        row = gateway.post(path_of("tasks", task_id, how), said)
    print_json(row) if args.json else print(f"task {task_id} is {escaped(row['status'])}")
    return 0


def list_containers(args: argparse.Namespace, settings: Settings) -> int:
    """Print what was launched for tasks; NotFound when nothing was."""
    with GatewayClient(settings) as gateway:
        found = gateway.get(path_of("containers"), {"limit": args.limit})
    found["containers"].reverse()
    heading = ("CONTAINER", "STATE", "SINCE", "BACKEND", "PORT", "ERROR")

    def cells(row: Row) -> tuple[object, ...]:
        since = age_of(row["changed_at"])
        return row["container_name"], row["state"], since, row["backend"], row["port"], row["error"]

    return print_rows(args, found, "containers", heading, cells)


ACTIONS: Final[dict[str, Callable[[argparse.Namespace, Settings], int]]] = {
    "submit": submit,
    "list": list_tasks,
    "show": show,
    "complete": complete,
    "fail": fail,
    "cancel": cancel,
    "containers": list_containers,
}
