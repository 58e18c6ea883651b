"""The settings of the audit chain: where it lies, and its signed anchors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from schemas.settings import Settings


class AuditSettings(BaseModel):
    """The chain of Merkle roots over the ledger, and its signed anchors. A path of None is below `data_dir`.

    `anchors_dir` belongs on other storage, best where this account can append and not change.
    `anchor_interval_s`: how often an anchor is made, if the chain has grown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chain_dir: Path | None = None
    anchors_dir: Path | None = None
    key_file: Path | None = None
    anchor_interval_s: float = Field(default=60.0, gt=0)


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
