"""Payload classes with their XML, XSD and JSON schema, and the messages between gateway and pump.

It must not import the pump or the gateway.
"""
