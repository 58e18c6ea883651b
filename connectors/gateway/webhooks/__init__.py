"""Webhooks at the gateway: their HTTP routes, their metrics, and the messages that the deliverer gets.

Imports how messages are leased from `gateway/messages`, but no other routes.
"""
