"""The command `trunkline-agent`: messages, job events and a loop around any program, without a line of Python.

It uses the public names of the library and the standard library alone. Modules of an extra are imported when a
subcommand needs them.
"""
