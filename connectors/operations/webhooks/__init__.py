"""Webhooks at the gateway: their operations, their metrics, and the messages that the deliverer gets.

Imports how messages are leased from `gateway/messages`, but no other routes.
"""
