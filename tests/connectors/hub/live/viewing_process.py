"""A process with a live view on a store in the data directory, which prints how far both are: for its tests.

python -m tests.connectors.hub.live.viewing_process

VIEW_MOST_RECORDS is the number of records that may wait to be written, if it is set, and VIEW_FILE_BYTES the
size that no file of the process may exceed.
"""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

from connectors.hub.live import store_writer
from connectors.hub.live.live_view import LiveView
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import load_settings

EVERY_S = 0.05


def main() -> None:
    """Run until killed, or until the view has failed."""
    settings = load_settings()
    if most := os.environ.get("VIEW_MOST_RECORDS"):
        store_writer._SOON_RECORDS, store_writer.MOST_RECORDS = 1, int(most)  # type: ignore[misc]
    if most := os.environ.get("VIEW_FILE_BYTES"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    view = LiveView(settings, load_keyring(settings), settings.state_path / "view")
    view.open()
    Path(os.environ["TRUNKLINE_READY_FILE"]).touch()
    while view.failure is None:
        ends = {str(number): end for number, end in view.next_offsets().items()}
        stored = {str(number): end for number, end in view._state.place.offsets.items()}
        trouble = None if view._store is None else view._store.trouble
        print(json.dumps({"view": ends, "store": stored, "trouble": trouble}), flush=True)
        time.sleep(EVERY_S)
    print(json.dumps({"failure": str(view.failure)}), flush=True)


if __name__ == "__main__":
    main()
