"""Starts and stops agents that take part with a key of their own, and shows which agents there are.

  trunkline agents spawn "sum up the mail" --name mailer    starts an agent here, and waits until it runs
  trunkline agents join builder --new-key builder.pem       admits an agent that runs elsewhere
  trunkline agents active                                   the agents that take part now
  trunkline agents status mailer                            one of them, with its keys
  trunkline agents stop mailer                              ends it and revokes its keys
  trunkline agents rotate builder builder.pem               gives it a new key; the old one is valid for an hour
  trunkline agents mqtt builder --out builder.json          a mailbox over MQTT: topics, user, secret
  trunkline agents mqtt-remove builder                      revokes that secret
  trunkline agents list                                     the definitions in conf/agents/, for tasks
  trunkline agents show echo --json

The setting agent_mcp.spawn_image names the program that 'spawn' starts. A definition is a JSON file in
conf/agents/ where the gateway runs; the gateway applies a change there at once. A file with a fault defines no
agent: 'list' names it on stderr, with the fault.

Exit codes: 0; 2 wrong arguments; 3 no such agent; 4 refused, or not started; 5 the gateway does not answer.
"""

from __future__ import annotations

from typing import Final

from connectors.cli.agents import definitions, mqtt_mailboxes, participants

ACTIONS: Final = (*participants.ACTIONS, *mqtt_mailboxes.ACTIONS, *definitions.ACTIONS)
