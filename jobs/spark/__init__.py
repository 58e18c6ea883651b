"""Kafka records on their way into Spark's Python workers, and the memory of these.

Imports nothing else of the jobs.
"""
