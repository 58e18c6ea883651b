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

from connectors.cli.agents import principal_limits
from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import path
from connectors.cli.shared.call import Call, Columns
from connectors.cli.shared.files import new_private_file
from connectors.cli.shared.text_table import age_of

_ROLES: Final = ("operator", "delegator", "worker", "viewer")
_COLUMNS: Final[Columns] = {
    "PRINCIPAL": "principal",
    "ROLE": "role",
    "STATE": "status",
    "AGE": lambda row: age_of(row["added_at"]),
    "ADDED BY": "added_by",
}
_NAME: Final = argument("name", "the principal; a worker has the name of its session")
ACTIONS: Final = Actions()


@ACTIONS.add(
    _NAME,
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


@ACTIONS.add()
def _list(call: Call) -> int:
    """List the principals."""
    found = call.get_all("principals", key="principals", name="principal")
    return call.print_rows(found, "principals", _COLUMNS)


@ACTIONS.add(_NAME)
def _revoke(call: Call) -> int:
    """Revoke a principal's token."""
    row = call.post("principals", call.name, "revoke")
    return call.print_answer(row, f"{call.name} is revoked")


ACTIONS.extend(principal_limits.ACTIONS)
