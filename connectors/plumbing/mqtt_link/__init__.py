"""The MQTT settings of the product's own programs: per-job brokers, and the accounts of the roles."""
