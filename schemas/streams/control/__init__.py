"""The control streams: the topology of the log, switches of the fold version, and the organism's listeners."""
