"""The Delta tables: ledger and views, their columns, and readers that need no JVM.

Above `schemas.streams`; imports no Spark.
"""
