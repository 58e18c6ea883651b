"""The record: envelope, bodies, partitions. The parts that agents need, too, are in `trunkline_agent.wire`.

Pure: imports no socket, no Kafka or Delta library, and no other package of `schemas`.
"""
