"""The side of an agent that speaks MQTT: publisher, outbox, inbox and subscriptions."""
