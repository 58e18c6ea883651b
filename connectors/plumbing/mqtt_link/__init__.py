"""The MQTT settings of the product's own programs, and the payloads of the bridge."""
