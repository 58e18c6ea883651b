"""The programs: gateway, local stack, and hosts of sessions. They import doors and below."""
