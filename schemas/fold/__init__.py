"""The parts that the folds of all stream kinds share: outcomes, stream state and request memories.

This package does no input or output. It does not import `schemas.streams` and knows no kind of stream.
"""
