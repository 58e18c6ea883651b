"""Start the gateway: `python -m connectors.gateway_program`."""

import sys

from connectors.gateway_program.program import main
from schemas.keys.umask import keep_files_private

if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
