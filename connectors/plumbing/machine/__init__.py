"""Processes and services of this machine, the state of its stack, and the logs of programs."""
