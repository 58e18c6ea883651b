"""Rates and turns, for the gateway and the MQTT bridge: token buckets, few records of refusals, turns of keys.

Must not import other packages of connectors.
"""
