"""The MQTT bridge: events from MQTT brokers into the log, and receipts and messages back."""
