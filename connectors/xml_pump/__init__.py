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

from connectors.xml_payloads.huh import Huh
from connectors.xml_payloads.payload_types import (
    PayloadType,
    cached_schema,
    from_element,
    payload,
    payload_type_of,
    to_xml,
)
from connectors.xml_pump.pipeline import Pipeline
from connectors.xml_pump.text_messages import Text
from connectors.xml_wire.envelope import open_answer, open_document, text_payload, wrapped
from connectors.xml_wire.faults import Faulty, XmlLimits, XmlRefused

__all__ = [
    "Faulty",
    "Huh",
    "PayloadType",
    "Pipeline",
    "Text",
    "XmlLimits",
    "XmlRefused",
    "cached_schema",
    "from_element",
    "open_answer",
    "open_document",
    "payload",
    "payload_type_of",
    "text_payload",
    "to_xml",
    "wrapped",
]
