"""The bridge between the file queue and the backbone, in both directions (FQ-15 to FQ-17)."""
