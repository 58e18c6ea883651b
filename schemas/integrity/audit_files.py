"""The files of the audit chain and of its signed anchors, as the settings name them."""

from __future__ import annotations

from pathlib import Path

from schemas.settings.settings import Settings


def chain_file(settings: Settings, table: str) -> Path:
    """The file with all entries of the chain of the ledger with this table id. A ledger that is made anew has
    another id, and a chain of its own.
    """
    return (settings.audit.chain_dir or settings.data_path / "audit") / f"chain-{table}.ndjson"


def anchors_file(settings: Settings) -> Path:
    """The file with the anchors."""
    return (settings.audit.anchors_dir or settings.data_path / "anchors") / "anchors.ndjson"


def is_beside_the_ledger(settings: Settings, anchors: Path) -> bool:
    """Whether the path `anchors` is below `data_dir` or the tables: who cuts the ledger off there can cut off
    the anchors as well.
    """
    folders = [settings.data_path]
    if "://" not in settings.tables_root:
        folders.append(Path(settings.tables_root))
    return any(anchors.resolve().is_relative_to(folder.resolve()) for folder in folders)


def anchor_key_file(settings: Settings) -> Path:
    """The 0600 file with the key that signs anchors."""
    return settings.audit.key_file or settings.data_path / "keys" / "audit.pem"


def anchor_public_key_file(settings: Settings) -> Path:
    """The file with its public key, which may be given to anybody."""
    return anchor_key_file(settings).with_suffix(".pub")
