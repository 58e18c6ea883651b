"""The format of a record: envelope, ids, JSON, signatures, masking and refusals.

Pure: imports no socket, no Kafka or Delta library, and no other package of `schemas` but `errors`.
"""
