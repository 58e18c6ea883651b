"""Pauses between attempts, and rates of events, for every program that waits for another one.

Imports nothing else of this project.
"""
