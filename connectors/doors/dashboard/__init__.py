"""The dashboard (AM-11 to AM-13): one web page that shows agents, jobs, mailboxes, rejections and the pipeline.

It reads the gateway's live view and the ledger. The one change that it offers is the hub's replay of a dead
message. It must not append other records, or import the command line.
"""
