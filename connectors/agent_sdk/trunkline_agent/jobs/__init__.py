"""Jobs: publish a job's events over HTTP or MQTT, and delegate jobs to others."""
