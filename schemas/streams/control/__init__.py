"""The control streams: topology, fold switches, and the listeners of the organism."""
