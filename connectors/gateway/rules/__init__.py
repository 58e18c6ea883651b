"""Rules that several routes share: who owns what, who may write to whom, how much may wait."""
