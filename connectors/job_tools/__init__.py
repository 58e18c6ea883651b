"""Tools of a job's owner: registration, secrets and brokers on this machine, and submission to an agent.

Must not import the gateway's packages; it uses gateway_client.
"""
