"""The routes of the HTTP door that are no operation: streams, verdicts and uploads."""
