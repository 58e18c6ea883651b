"""The parts that the folds of all stream kinds share: outcomes, stream state and request memories.

Pure, and below `schemas.streams`: it knows no kind of stream.
"""
