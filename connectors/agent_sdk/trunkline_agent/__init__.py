"""The library of agents, jobs and delegators: the distribution `trunkline-agent`.

Imports the standard library, and h11 for HTTP. The package of an extra imports the extra's libraries, too. The
whole product imports the rules of the wire from here, so nothing here may import `schemas`, `connectors` or
`jobs`.
"""
