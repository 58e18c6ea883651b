"""The reactor: derives further records from settled ones, such as the message about a job's end.

Of the rest of the hub it imports `live` alone.
"""
