"""Memory and packing of records in Spark's Python workers."""
