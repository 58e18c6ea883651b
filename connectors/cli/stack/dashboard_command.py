"""Print the address of the dashboard that logs a browser in.

The address holds your token (the operator's, or TRUNKLINE_TOKEN) behind a `#`, which no browser sends anywhere:
the page takes it from there, gets a cookie for it, and removes it. The address gives all your rights, so do not
share it; for other people there is `trunkline principals add NAME --role viewer`.
"""

from __future__ import annotations

import sys
from urllib.parse import quote

from connectors.cli.shared.actions import flag
from connectors.cli.shared.call import Call
from connectors.plumbing.gateway_client.gateway_access import read_token
from trunkline_agent.errors import NotFound, UsageError

ARGUMENTS = (flag("--no-token", "the bare address; the page asks for a token"),)


def run(call: Call) -> int:
    """Print the dashboard's address, which has the operator's token unless `--no-token` is given, and return 0.

    Raises UsageError if there is no dashboard, and NotFound if there is no token yet.
    """
    # Imported here, because it is slow to import and help must be quick.
    from connectors.programs.local_stack.ports import port_is_free

    if not call.settings.dashboard.port:
        raise UsageError("dashboard.port is 0: there is no dashboard; set it, and restart the gateway")
    token = None if call.no_token else read_token(call.settings)
    if token is None and not call.no_token:
        raise NotFound(
            f"there is no token yet at {call.settings.operator_token_file}: the gateway makes it at its first "
            "start, with 'trunkline up'"
        )
    print(call.settings.dashboard_url + ("" if token is None else f"#token={quote(token, safe='')}"))
    if port_is_free(call.settings.dashboard.port):
        print("Nothing listens there yet: start it with 'trunkline up'", file=sys.stderr)
    return 0
