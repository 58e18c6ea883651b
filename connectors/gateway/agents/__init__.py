"""HTTP routes for agent definitions, participants and MQTT agents."""
