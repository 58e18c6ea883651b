"""HTTP to the hub: plans of requests, which do no input or output, and a sync and an async client of them.

A plan is a generator that yields requests and pauses. So retries and errors exist once for both clients.
"""
