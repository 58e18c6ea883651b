"""The rules of the wire that agents and Trunkline share: ids, JSON, signatures, verdicts and receipts.

Pure, and needs the standard library alone. `strict_json` is faster where msgspec and orjson are installed.
"""
