"""Connects a person to the XML pump: shows messages for a human listener, and sends typed messages.

  trunkline console                       as the listener 'console'
  trunkline console ann --json            as 'ann', each message as a line of JSON

Input:
  @calculator <calculate><expression>1+2</expression></calculate>     to that listener
  <calculate><expression>1+2</expression></calculate>                 to all that take <calculate>
  calculate expression=1+2 digits=3                                   the same, made into XML
  #3 answer text=yes                                                  to the sender of message 3, on its thread
  /listeners  /help  /quit                                            Ctrl-D ends, too

The listener must exist and be of type human: in conf/organism.yaml, or after
'trunkline organism add-listener ann --type human'. A message counts as read once it was printed. The command
needs the operator's token.

Exit codes: 0; 3 no such listener; 4 refused; 5 the gateway does not answer; 130 interrupted.
"""

from __future__ import annotations

from connectors.cli.shared.actions import argument, flag
from connectors.cli.shared.arguments import name_of
from connectors.cli.shared.call import Call

_LISTENER = "console"


ARGUMENTS = (
    argument(
        "listener",
        f"the listener to be (default: {_LISTENER})",
        nargs="?",
        type=name_of("a listener"),
        default=_LISTENER,
    ),
    flag("--json", "print each message as one line of JSON"),
)


def run(call: Call) -> int:
    """Run `trunkline console` until the end of input, and return 0.

    Raises TrunklineError: NotFound without the listener, Refused for a wrong token, BackboneUnreachable without
    a gateway at the start.
    """
    from connectors.cli.organism.console_session import ConsoleSession

    return ConsoleSession(call.settings, call.listener, is_json=call.json).run()
