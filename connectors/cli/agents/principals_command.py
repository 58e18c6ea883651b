"""Makes and revokes the tokens of the gateway's clients, and sets how much they may send.

  trunkline principals add ann --role delegator      prints the token, once
  trunkline principals add builder --role worker --token-file builder.token
  trunkline principals list
  trunkline principals revoke ann                    final: the name cannot be used again
  trunkline principals limit all --pending 50000     messages that may wait in a mailbox
  trunkline principals limit role worker --per-minute 600      messages that each worker may send in a minute
  trunkline principals limit name bo --pending 1000 --bytes 10000000
  trunkline principals limit role delegator --jobs 500 --topics 100
  trunkline principals limit name bo                 bo has no limits of its own any more
  trunkline principals limits

Roles: operator (everything), delegator (register, cancel, watch), worker (pick and read its own), viewer.

A limit of a principal counts before that of its role, and this before that for all. Without any, 100,000
messages may wait in a mailbox, it may have 1,000 subscriptions, and rates and jobs are not limited. 'limit'
replaces all limits of the scope at once. The log counts what waits in a mailbox; each gateway counts the rates
of a minute, live jobs and subscriptions for itself, and the MQTT bridge the rates of agents. A request beyond a
limit is refused with 429 and the reason 'mailbox_full', 'rate_limited' or 'limit_reached'; try it later.

A command takes its token from TRUNKLINE_TOKEN, else the operator's from its file below data_dir.
Exit codes: 0; 2 wrong arguments; 3 no such principal; 4 refused; 5 the gateway does not answer.
"""

from __future__ import annotations

from typing import Final

from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import new_private_file, path, request_id
from connectors.cli.shared.call import Call, Columns
from connectors.cli.shared.declared import Shown, add_declared
from connectors.cli.shared.text_output import age_of
from trunkline_agent.errors import UsageError

_ROLES: Final = ("operator", "delegator", "worker", "viewer")
_COLUMNS: Final[Columns] = {
    "PRINCIPAL": "principal",
    "ROLE": "role",
    "STATE": "status",
    "AGE": lambda row: age_of(row["added_at"]),
    "ADDED BY": "added_by",
}
_ALL: Final = "all"
_LIMITS: Final = {
    "pending": "pending_most",
    "bytes": "bytes_most",
    "per_minute": "messages_per_minute",
    "bytes_per_minute": "bytes_per_minute",
    "jobs": "live_jobs_most",
    "topics": "subscriptions_most",
}
_LIMIT_COLUMNS: Final[Columns] = {
    "SCOPE": "scope",
    "NAME": "name",
    "PENDING": "pending_most",
    "BYTES": "bytes_most",
    "MESSAGES/MIN": "messages_per_minute",
    "BYTES/MIN": "bytes_per_minute",
    "JOBS": "live_jobs_most",
    "TOPICS": "subscriptions_most",
    "AGE": lambda row: age_of(row["limited_at"]),
    "SET BY": "limited_by",
}
ACTIONS: Final = Actions()


@ACTIONS.add(
    argument("name", "the principal; a worker has the name of its session"),
    argument("--role", "what it may do", required=True, choices=_ROLES),
    path("--token-file", "write the token there (new file, 0600), do not print it"),
)
def _add(call: Call) -> int:
    """Add a principal, print its token once."""
    with new_private_file(call.token_file, "--token-file") as file:
        made = call.post("principals", principal=call.name, role=call.role)
        if file is not None:
            file.write(made.pop("token") + "\n")
            made["token_file"] = str(call.token_file)
    lines = [
        f"principal  {call.name} ({call.role})",
        f"token      {made.get('token', f'in {call.token_file}')}",
    ]
    if file is None:
        lines.append("The token is not shown again. Give it to the client as TRUNKLINE_TOKEN.")
    return call.print_answer(made, *lines)


@ACTIONS.add(
    argument("scope", "all, role or name", choices=(_ALL, "role", "name")),
    argument("name", "the role or the principal; not for 'all'", nargs="?"),
    argument("--pending", "messages that may wait in a mailbox", type=int, metavar="N"),
    argument("--bytes", "bytes that the bodies of these messages may have", type=int, metavar="N"),
    argument("--per-minute", "messages that a principal may send in a minute", type=int, metavar="N"),
    argument("--bytes-per-minute", "bytes in messages that it may send in a minute", type=int, metavar="N"),
    argument("--jobs", "jobs without an end that a principal may have", type=int, metavar="N"),
    argument("--topics", "topics that a mailbox may be subscribed to", type=int, metavar="N"),
    request_id("the same change"),
    example="trunkline principals limit role worker --pending 10000 --per-minute 600",
)
def _limit(call: Call) -> int:
    """Set all limits of a scope; those that are not given are lifted."""
    name = _ALL if call.scope == _ALL and call.name is None else call.name
    if name is None:
        raise UsageError(f"NAME: say which {'role' if call.scope == 'role' else 'principal'}")
    wanted = {field: getattr(call, option) for option, field in _LIMITS.items()}
    row = call.post_named("limits", call.scope, name, possible_effect="the limits were set", **wanted)
    given = ", ".join(f"{field} {row[field]}" for field in _LIMITS.values() if row[field] is not None)
    return call.print_answer(row, f"limits of {call.scope} {name}: {given or 'none'}")


add_declared(
    ACTIONS,
    "principals",
    Shown("list", columns=_COLUMNS),
    Shown("revoke", answer="{principal} is revoked"),
    Shown("limits", columns=_LIMIT_COLUMNS, by="scope/name"),
)
