"""The topic stream: subscriptions, and messages that are published to all subscribers."""
