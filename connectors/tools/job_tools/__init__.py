"""Tools of a job's owner: registration, and the secrets and brokers of jobs on this machine.

Must not import the gateway's packages.
"""
