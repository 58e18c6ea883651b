"""Operations on agent definitions, participants and MQTT agents.

May import the tasks of `connectors.operations.work`, because spawning an agent starts a task. No other route
packages.
"""
