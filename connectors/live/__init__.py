"""The live view: the fold in memory over the log, with rows, feeds and waits."""
