"""The interface and the base class of the background services that the gateway runs.

Imports only `schemas`, so that every package may define such a service.
"""
