"""Launchers: they start, check and stop the processes in which the agents of tasks run (HH-05).

Must not import the gateway, which chooses a launcher and calls it.
"""
