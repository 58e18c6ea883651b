"""Kafka clients for the log: options, login and topic checks, for kafka-python and confluent-kafka."""
