"""Reading and writing the Kafka log: the publisher, the topic, the tails and the end of the log.

Imports nothing else of `connectors` but `retry`.
"""
