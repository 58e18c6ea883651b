"""Payload types of listeners: dataclasses to and from XML, their XSDs, and answers about faults."""
