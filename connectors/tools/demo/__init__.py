"""The demo: scripted jobs, agents and listeners on a stack of its own. Only the command line imports it."""
