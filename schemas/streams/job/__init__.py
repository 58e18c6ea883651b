"""The job stream: registration, events, picks, secret rotation and cancellation."""
