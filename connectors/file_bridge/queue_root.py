"""Which file queue the bridge joins to the backbone."""

from __future__ import annotations

import os
from pathlib import Path

from connectors.file_queue.queue_settings import find_root
from schemas.settings.settings import Settings


def queue_root(settings: Settings) -> Path:
    """`files.root`; without it, below a data directory of one's own, else where the queue's own users find it.

    So a second stack, of a test or a demonstration, does not carry off what is in the user's queue.
    """
    if settings.files.root is not None:
        return settings.files.root
    if settings.data_dir != Settings.model_fields["data_dir"].default:
        return settings.data_path / "queue"
    return Path(find_root(os.environ)).absolute()
