"""Processes and services of this machine, and the state of its stack."""
