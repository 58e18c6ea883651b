"""The settings of the audit chain and its signed anchors."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


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
