"""Small agents that show how to use the hub, MCP and MQTT. Product code must not depend on them."""
