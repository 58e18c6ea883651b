"""Settling records in Spark: the stateful query, its state and its sink."""
