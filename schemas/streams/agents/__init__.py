"""The agent stream: definitions, participants with keys, and agents that take part over MQTT."""
