"""One MQTT connection, and what it needs: TLS, login, topics and receipts. Imports no other MQTT package."""
