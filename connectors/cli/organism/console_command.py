"""Sits at the XML pump as a person: shows what comes for a human listener, and sends what is typed.

  trunkline console                       as the listener 'console'
  trunkline console ann --json            as 'ann', each message as a line of JSON

What may be typed:
  @calculator <calculate><expression>1+2</expression></calculate>     to that listener
  <calculate><expression>1+2</expression></calculate>                 to all that take <calculate>
  calculate expression=1+2 digits=3                                   the same, made into XML
  #3 answer text=yes                                                  to who sent message 3, on its thread
  /listeners  /help  /quit                                            Ctrl-D ends, too

The listener must be there as one of type human: in conf/organism.yaml, or
'trunkline organism add-listener ann --type human'. A message counts as read once it was printed. It needs the
operator's token.

Exit codes: 0; 3 no such listener; 4 refused; 5 the gateway does not answer; 130 interrupted.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.settings.settings import Settings

_LISTENER = "console"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "listener", nargs="?", default=_LISTENER, metavar="LISTENER", help=f"whom to be (default: {_LISTENER})"
    )
    parser.add_argument("--json", action="store_true", help="print each message as one line of JSON")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Sit there until the end. Raises TrunklineError."""
    from connectors.cli.organism.console_session import ConsoleSession
    from connectors.cli.shared.hub_rows import checked_name

    return ConsoleSession(settings, checked_name(args.listener, "a listener"), is_json=args.json).run()
