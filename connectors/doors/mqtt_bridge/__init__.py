"""The MQTT bridge: events from MQTT brokers into the log, and receipts and messages back.

It reaches the gateway by HTTP only. Must not import the gateway's packages, the agents' SDK or mqtt_accounts.
"""
