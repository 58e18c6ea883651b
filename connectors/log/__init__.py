"""Reading and writing the Kafka log: publisher, topic, tails and the end of the log.

Imports nothing else of `connectors` but `terminal`.
"""
