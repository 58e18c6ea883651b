"""The engine that answers usual requests in the protocol's own callback, without ASGI, tasks and models."""
