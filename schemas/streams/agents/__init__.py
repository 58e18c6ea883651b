"""The agent stream: definitions, participants with keys, and agents that are reached over MQTT."""
