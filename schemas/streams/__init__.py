"""One package per kind of stream (job, task, mailbox and so on), and the fold that dispatches to them.

These packages do no input or output and import no Kafka or Delta library. A kind does not import `fold`.
"""
