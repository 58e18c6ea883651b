"""Pauses between attempts, for every program that waits for another one.

Imports nothing else of this project.
"""
