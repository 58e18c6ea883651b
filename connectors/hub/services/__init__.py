"""The services of the gateway: indexes of the live view, background services, and `Hub`, which creates them.

Must not import routes.
"""
