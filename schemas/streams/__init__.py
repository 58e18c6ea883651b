"""One package per kind of stream, and the fold that dispatches to them.

Pure: imports no socket, no Kafka or Delta library. A kind does not import this package's modules.
"""
