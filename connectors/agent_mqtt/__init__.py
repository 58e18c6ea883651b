"""The clients of jobs and agents over MQTT: publisher (also over HTTP), outbox, inbox and subscription.

Of the bridge it imports only the translation of messages to records. Must not import the gateway or the log.
"""
