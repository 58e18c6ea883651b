"""Webhooks at the gateway: their operations, their metrics, and the messages that the deliverer gets.

Of the other families it imports `messages` and `rules` alone.
"""
