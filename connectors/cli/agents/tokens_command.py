"""Lists and revokes the tokens of tasks.

  trunkline tokens list --status active
  trunkline tokens revoke 3f9c0a1b2d4e --reason "it was in a log"

A token belongs to one task and ends with it. Only 'tasks submit' prints its value; here the first 12 digits of
its hash name it. Revoking a token while its task runs locks the task's agent out for ever.

Exit codes: 0; 2 wrong arguments; 3 no such token; 4 refused; 5 the gateway does not answer.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.call import Columns, Row
from connectors.cli.shared.declared import Shown, add_declared, newest_last
from connectors.cli.shared.text_output import age_of
from trunkline_agent.errors import UsageError

_TOKEN_ID: Final = re.compile(r"[0-9a-f]{12}").fullmatch


def _token_id(text: str) -> str:
    if _TOKEN_ID(text) is None:
        # The error does not repeat the text, which may be the token itself.
        raise UsageError("expected the 12 lower-case hex digits that 'tokens list' shows")
    return text


def _moment(since_1970_ms: int) -> datetime:
    return datetime.fromtimestamp(since_1970_ms / 1000, UTC)


def _left(row: Row) -> str | None:
    """Return the time left until the token expires, None if it is not active."""
    return age_of(datetime.now(UTC).isoformat(), _moment(row["expiry"])) if row["status"] == "active" else None


_COLUMNS: Final[Columns] = {
    "TOKEN": "token_id",
    "STATE": "status",
    "AGE": lambda row: age_of(_moment(row["issued"]).isoformat()),
    "LEFT": _left,
    "AGENT": "agent_name",
    "TASK": "task_id",
    "CAPABILITIES": lambda row: ", ".join(row["capabilities"]) or None,
    "WHY REVOKED": "revoked_why",
}
_TOKEN: Final = argument("token_id", "12 hex digits, from 'tokens list'", type=_token_id)
ACTIONS: Final = Actions()


add_declared(
    ACTIONS,
    "tokens",
    Shown("list", "List the tokens of tasks, the newest last", adapted=newest_last("tokens"), columns=_COLUMNS),
    Shown("revoke", answer="token {token_id} of task {task_id} is {status}", arguments={"token_id": _TOKEN}),
)
