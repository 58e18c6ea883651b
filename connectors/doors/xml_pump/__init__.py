"""The XML message pump (XP-01 to XP-15): a process that leases messages and runs the handlers of listeners.

    @payload(namespace="urn:example:calculator:1")
    @dataclass
    class Calculate:
        expression: str

    pipeline = Pipeline(payload_type_of(Calculate))
    pipeline.run(document).value

The pipeline is a pure library: bytes in, values out. The pump talks to the gateway over HTTP and must not
import it.
"""

from connectors.doors.xml_pump.pipeline import Pipeline, Text
from connectors.plumbing.xml_payloads.payload_types import payload, payload_type_of, to_xml

__all__ = ["Pipeline", "Text", "payload", "payload_type_of", "to_xml"]
