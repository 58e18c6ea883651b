"""The program of the reference client: `python reference_program.py [--fault NAME] [--fault NAME]`."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[4]
sys.path[:0] = [str(_ROOT), str(_ROOT / "connectors" / "agent_sdk")]

from tests.connectors.tools.conformance.planted_faults import FAULTS  # noqa: E402
from tests.connectors.tools.conformance.reference_client import Failed, ReferenceClient  # noqa: E402


def main() -> None:
    """Answer requests until the standard input ends."""
    faults = frozenset(sys.argv[2::2])
    assert faults <= set(FAULTS), faults
    client = ReferenceClient(faults)
    unread = b""
    while True:
        while b"\n" not in unread:
            if not select.select([0], [], [], 0.2)[0]:
                client.keep_leases()
                continue
            data = os.read(0, 65536)
            if not data:
                return
            unread += data
        line, _, unread = unread.partition(b"\n")
        request = json.loads(line)
        number, do = request.pop("id"), request.pop("do")
        request.pop("timeout_s")
        try:
            answer = {"ok": getattr(client, do)(**request)}
        except Failed as error:
            told = {"kind": error.kind, "reason": error.reason, "retry_after_s": error.retry_after_s}
            answer = {"error": told}
        sys.stdout.write(json.dumps({"id": number, **answer}) + "\n")
        sys.stdout.flush()
        if do == "close":
            return


if __name__ == "__main__":
    main()
