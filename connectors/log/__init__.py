"""Reading and writing the Kafka log: the publisher, the topic, the tails and the end of the log.

It imports `plumbing` and `schemas` alone.
"""
