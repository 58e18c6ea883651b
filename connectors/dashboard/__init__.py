"""The dashboard (AM-11 to AM-13): one web page that shows agents, jobs, mailboxes, rejections and the pipeline.

It reads the gateway's live view and the ledger. It must not append records of its own, or import the command
line.
"""
