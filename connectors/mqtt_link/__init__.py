"""An MQTT connection: client, TLS, login, topics and receipts. Knows neither the bridge nor the accounts."""
