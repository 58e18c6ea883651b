"""Network, machine, terminal, TLS, and formats of XML and MQTT, for all floors. It imports `schemas`."""
