"""Runs the gateway: `python -m connectors.gateway`."""

import sys

from connectors.gateway.program import main
from schemas.umask import keep_files_private

if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
