"""How large a document of the pump may be (XP-03)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class XmlLimits:
    """What is larger is refused as `too_large`, before anything costly is done with it.

    `attributes` counts those of one tag, namespace declarations among them: canonicalization sorts them by
    insertion, and a hundred thousand cost 18 s. A namespace is repeated in canonical form wherever its
    prefix is used, so a long one times many elements would be a bomb without any entity.
    """

    document_bytes: int = 1024 * 1024
    depth: int = 64
    attributes: int = 64
    namespace_bytes: int = 256
    payloads: int = 100


DEFAULT_LIMITS = XmlLimits()
