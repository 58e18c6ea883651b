"""Processes on this machine: process trees, and agent sessions in tmux or in a process tree.

Must not import the gateway, the launcher, the local stack or the command line.
"""
