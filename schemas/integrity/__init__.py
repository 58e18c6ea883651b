"""The audit chain: Merkle roots over the ledger, and signed anchors."""
