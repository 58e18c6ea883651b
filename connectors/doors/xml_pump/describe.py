"""Print as JSON which XML payload each handler accepts; a program of its own, because it imports users' code.

    python -m connectors.doors.xml_pump.describe MODULE:NAME …

The last line of standard output is one object. By the name of each handler it holds `root_tag`, `namespace`,
`xsd`, `example` and `tool` (for language models), or `error`: why it is no handler. The gateway runs this
program, so that it need not import users' code.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from connectors.doors.xml_pump.handlers import HandlerError, load_handler


def described(name: str) -> dict[str, Any]:
    """Import the handler `name` (`module:attribute`) and describe the payload that it takes. Runs users' code.

    Returns:
        The fields `root_tag`, `namespace`, `xsd`, `example` and `tool`. If the handler cannot be imported or is
        no handler, only `error`, a text that says why.
    """
    try:
        kind = load_handler(name).payload
    except HandlerError as error:
        return {"error": str(error)}
    texts = {name: getattr(kind, name) for name in ("root_tag", "namespace", "xsd")}
    return {**texts, "example": kind.example.decode("utf-8"), "tool": kind.tool_description}


def main(names: Sequence[str]) -> int:
    """Print the descriptions of the handlers `names` as one JSON object, and return the exit code 0.

    Each name is `module:attribute`, and a key of the object. A handler that cannot be used has the field
    `error`; the exit code is 0 then, too.
    """
    # Output of a module during its import is not part of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        found = {name: described(name) for name in names}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
