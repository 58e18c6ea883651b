"""Paths of the audit chain, its anchors and their keys, by the settings."""

from __future__ import annotations

from pathlib import Path

from schemas.settings.settings import Settings


def chain_file(settings: Settings, table: str) -> Path:
    """Return the path of the audit chain's file for the ledger with the Delta table id `table`.

    The file may not exist yet. A ledger that is created anew has another id, and so a chain file of its own.
    """
    return (settings.audit.chain_dir or settings.data_path / "audit") / f"chain-{table}.ndjson"


def anchors_file(settings: Settings) -> Path:
    """Return the path of the file with the signed anchors of the audit chain. The file may not exist yet."""
    return (settings.audit.anchors_dir or settings.data_path / "anchors") / "anchors.ndjson"


def is_beside_the_ledger(settings: Settings, anchors: Path) -> bool:
    """Return whether the anchors are stored inside `data_dir` or the folder of the tables.

    `anchors` is the anchors file or its folder. Callers warn about such a place: a person who can truncate the
    ledger there can truncate the anchors as well. Tables in an object store are not compared.
    """
    folders = [settings.data_path]
    if "://" not in settings.tables_root:
        folders.append(Path(settings.tables_root))
    return any(anchors.resolve().is_relative_to(folder.resolve()) for folder in folders)


def anchor_key_file(settings: Settings) -> Path:
    """Return the path of the file (mode 0600) with the private key that signs anchors. It may not exist yet."""
    return settings.audit.key_file or settings.data_path / "keys" / "audit.pem"


def anchor_public_key_file(settings: Settings) -> Path:
    """Return the path of the file with the public key that verifies anchors. It is beside the private key.

    The public key is no secret. The file may not exist yet.
    """
    return anchor_key_file(settings).with_suffix(".pub")
