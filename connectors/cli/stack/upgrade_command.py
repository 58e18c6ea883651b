"""Bring the data directory of an earlier version over to this one.

  trunkline upgrade --dry-run      say what would be done, and change nothing
  trunkline upgrade                do it

First stop the stack and all doors (trunkline down), and back up. The command starts the local Kafka alone if no
Kafka answers, and looks whether the ledger has the whole log. If it does not, the last commit with the earlier
rules settles the rest: it is checked out into a temporary folder, which needs the history of this repository
and some minutes. Then the command switches the ledger to the rules of this version, compares the views with the
ledger, and builds them anew if they differ. It can be interrupted, and called again at any time.

Exit codes: 0, also when there is nothing to do; 2 wrong arguments; 3 there is no ledger; 4 refused, with the
reason; 5 Kafka does not answer; 1 a step failed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from connectors.cli.shared.actions import flag
from connectors.cli.shared.call import Call
from connectors.cli.stack.upgrade_steps import Upgrade

ARGUMENTS = (
    flag("--dry-run", "say what would be done, and change nothing"),
    flag("--json", "print one JSON object at the end, and the steps to standard error"),
)


def run(call: Call) -> int:
    """Upgrade the data directory, or with `--dry-run` say what an upgrade would do. Returns the exit code 0.

    Raises TrunklineError, with the exit code that the module's text names.
    """
    steps: list[dict[str, Any]] = []

    def tell(step: str, text: str) -> None:
        steps.append({"step": step, "result": text})
        print(f"  {step:<9}{text}", file=sys.stderr if call.json else sys.stdout, flush=True)

    upgrade = Upgrade(call.settings, tell)
    found = upgrade.plan() if call.dry_run else upgrade.carry_out()
    if call.json:
        print(json.dumps({**found, "dry_run": call.dry_run, "steps": steps}))
    return 0
