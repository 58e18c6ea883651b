"""The conformance kit: runs any client of Trunkline behind a line protocol and checks what it does.

It knows vectors, a live stack, and proxies with faults in front of the hub and of the MQTT broker. Must not
import the tests. Only `python_client` imports clients of the library of agents: those are under test.
"""
