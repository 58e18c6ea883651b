"""Operations on agent definitions, participants and MQTT agents.

Of the other families it imports `work`, because spawning an agent starts a task, and `rules`.
"""
