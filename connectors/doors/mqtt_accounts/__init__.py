"""Accounts of the stack's own Mosquitto: its password file and ACL file follow the live jobs and agents.

Must not import the gateway's packages or mqtt_bridge: the gateway runs it and passes its live view in.
"""
