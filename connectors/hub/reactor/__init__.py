"""The reactor: derives further records from settled ones, such as the message about a job's end.

Imports `log`, `live`, `xml_payloads` and the record makers of `mqtt_bridge`, but nothing of the gateway.
"""
