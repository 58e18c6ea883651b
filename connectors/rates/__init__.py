"""Limits of rates, for the gateway and the MQTT bridge: token buckets, and few records of refusals.

Must not import other packages of connectors.
"""
