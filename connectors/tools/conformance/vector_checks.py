"""Checks against vectors: canonical JSON and signatures. They need no stack."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from connectors.tools.conformance.client_process import ClientProcess, ClientRefused
from connectors.tools.conformance.scene import CheckFailed, Checks, Scene, expect

VECTORS: Final = Path(__file__).parents[2] / "agent_sdk" / "vectors"
CHECKS: Final = Checks()
NUMBERS: Final = "numbers"


@cache
def vectors(name: str) -> dict[str, Any]:
    """Return the vectors of a file in connectors/agent_sdk/vectors, such as `signing`."""
    found: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_bytes())
    return found


@CHECKS.add("canonical")
def canonical_numbers(scene: Scene) -> None:
    """Check that floats and integers are written as the canonical form says, such as 1e-05, 1e+16, -0.0."""
    _check_accepted(scene, NUMBERS)


@CHECKS.add("canonical")
def canonical_strings(scene: Scene) -> None:
    """Check that texts are escaped as the canonical form says, also astral characters and controls."""
    _check_accepted(scene, "strings")


@CHECKS.add("canonical")
def canonical_key_order(scene: Scene) -> None:
    """Check that keys are sorted by code point, not by UTF-16 units."""
    _check_accepted(scene, "key_order")


@CHECKS.add("canonical")
def canonical_structure(scene: Scene) -> None:
    """Check that spaces are dropped, and that 64 levels are accepted."""
    _check_accepted(scene, "structure")


@CHECKS.add("canonical")
def strict_json(scene: Scene) -> None:
    """Check that JSON that breaks a rule is refused: a key twice, a lone surrogate, 65 levels, NaN."""
    client = scene.client()
    accepted = [one["name"] for one in vectors("canonical_json")["refused"] if not _is_refused(client, one)]
    if accepted:
        raise CheckFailed(f"not refused as malformed: {', '.join(accepted)}")


@CHECKS.add("signing")
def signatures(scene: Scene) -> None:
    """Check that events are signed over the canonical JSON of all keys but data.hmac_sig."""
    client = scene.client()
    wrong = []
    found = vectors("signing")
    for one in (*found["events"], *found["more_events"]):
        given = _base64(one["event"].encode())
        if (
            client.call("sign_event", json_base64=given, secret=one["secret"]).get("hmac_sig")
            != one["hmac_sig"]
        ):
            wrong.append(one["name"])
    if wrong:
        raise CheckFailed(f"another signature than that of the vector: {', '.join(wrong)}")


def _check_accepted(scene: Scene, group: str) -> None:
    client = scene.client()
    found = vectors("canonical_json")
    documents = [one for one in found["canonical"] if one["group"] == group]
    if group == NUMBERS:
        texts = f"[{','.join(one['text'] for one in found['floats'])}]"
        documents.append({"name": "many floats", "json": texts, "canonical": texts})
    for one in documents:
        answer = client.call("canonical", json_base64=_base64(one["json"].encode()))
        try:
            written = base64.b64decode(answer["canonical_base64"], validate=True).decode("utf-8")
        except (KeyError, TypeError, ValueError):
            raise CheckFailed(f"{one['name']}: no canonical_base64 of UTF-8 in {answer!r}") from None
        expect(written, one["canonical"], one["name"])


def _is_refused(client: ClientProcess, vector: dict[str, Any]) -> bool:
    try:
        client.call("canonical", json_base64=_base64(bytes.fromhex(vector["hex"])))
    except ClientRefused as error:
        return error.kind == "malformed"
    return False


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
