"""The stdio wrapper as a program: `python -m connectors.agent_client`. It is configured by its environment."""

import signal
import sys

# Until it serves, which takes a second, an interrupt just ends it.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from connectors.agent_client.stdio_wrapper import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
