"""Runs the bridge: `python -m connectors.mqtt_bridge`."""

from __future__ import annotations

import sys

from connectors.mqtt_bridge.program import main
from schemas.keys.umask import keep_files_private

if __name__ == "__main__":
    keep_files_private()
    sys.exit(main())
