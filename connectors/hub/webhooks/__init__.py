"""Calls of webhooks: which addresses may be called, signed requests, and the tasks that deliver messages.

Imports nothing of the gateway, which gives the messages through the protocol `Mailboxes`.
"""
