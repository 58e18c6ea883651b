"""Looks for secrets in all files that git knows or would add: `python .ci/secret_scan.py [file ...]`.

Prints file, line and kind of what it finds, never the text, and ends with 1. This file lists each false
positive by file and kind, with the reason. There is no baseline. An exception that nothing needs is an error.
A file is UTF-8 text, whatever its name, or a PNG, which is not looked into; any other is named, and an error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.core.scan import scan_file
from detect_secrets.settings import transient_settings

ROOT = Path(__file__).resolve().parent.parent
HEX, BASE64, KEYWORD = "Hex High Entropy String", "Base64 High Entropy String", "Secret Keyword"
AWS, PRIVATE_KEY, BASIC_AUTH = "AWS Access Key", "Private Key", "Basic Auth Credentials"


class Exempt(NamedTuple):
    """Files, the kinds that may be found there, what the found text must be, and why it is no secret."""

    files: str
    kinds: tuple[str, ...]
    why: str
    text: str = ".*"


EXEMPT = (
    Exempt("tests/.*", (KEYWORD,), "tests make passwords up; what has entropy or the form of a key is found"),
    Exempt("docs/how-to/publish_.*[.]md", (HEX, BASE64, KEYWORD), "the test vectors of job events"),
    Exempt(
        "connectors/agent_sdk/vectors/signing.json",
        (HEX, BASE64, KEYWORD),
        "the same vectors, for the libraries",
    ),
    Exempt("connectors/agent_sdk/vectors/canonical_json.json", (HEX,), "bits and bytes", "[0-9a-f]+"),
    Exempt("connectors/agent_sdk/js/test/.*", (KEYWORD,), "the passwords of its tests"),
    Exempt("docs/how-to/sign_agent_requests.md", (HEX, BASE64), "the test vectors of agents' signatures"),
    Exempt(
        "tests/schemas/agent_signing_vectors.json", (HEX, BASE64), "the same vectors, as the tests read them"
    ),
    Exempt("docs/how-to/use_the_xml_pump.md", (HEX, BASE64), "the test vectors of commands"),
    Exempt(
        "tests/schemas/integrity/test_merkle.py",
        (HEX,),
        "roots of RFC 9162's form over known leaves",
        "[0-9a-f]{64}",
    ),
    Exempt("connectors/cli/shared/declared_requests.py", (HEX,), "the id of an example's token"),
    Exempt(
        "connectors/hub/serving/api_document.py",
        (HEX,),
        "the SHA-256 of an example's content",
        "[0-9a-f]{64}",
    ),
    Exempt(
        "tests/connectors/doors/http_api/test_asyncapi_document.py",
        (BASE64,),
        "the digest of a package",
        "[A-Za-z0-9+/]{86}==",
    ),
    Exempt(
        "tests/connectors/hub/webhooks/(test_webhook_client|webhook_hub).py",
        (BASE64,),
        "the example of the Standard Webhooks specification",
    ),
    Exempt(
        "tests/(connectors/doors/http_api/test_hub_webhooks|schemas/streams/test_webhook_fold).py",
        (BASIC_AUTH,),
        "made-up addresses with a login, which are refused",
    ),
    Exempt(
        "connectors/agent_sdk/vectors/hub.json|tests/connectors/agent_sdk/test_networks.py",
        (BASIC_AUTH,),
        "logins at made-up proxies",
    ),
    Exempt("tests/schemas/hub_records.py", (HEX,), "sixteen digits, four times", "[0-9a-f]{16}"),
    Exempt(
        "tests/(schemas/wire/test_ids|connectors/doors/mqtt_bridge/test_mqtt_bridge).py",
        (HEX,),
        "job ids that are none",
        ".{1,9}",
    ),
    Exempt(
        "tests/connectors/plumbing/mqtt_link/test_mqtt_credentials.py",
        (HEX,),
        "a hash of a made-up token",
        "[0-9a-f]{64}",
    ),
    Exempt(
        "connectors/agent_sdk/trunkline_agent/wire/unsafe_text.py",
        (AWS, PRIVATE_KEY, BASIC_AUTH),
        "examples of what the mask must find",
    ),
    Exempt("connectors/cli/stack/settings_command.py", (KEYWORD,), "the name of a type", "secret"),
)
FILTERS = (
    "heuristic.is_likely_id_string",
    "heuristic.is_not_alphanumeric_string",
    "heuristic.is_potential_uuid",
    "heuristic.is_prefixed_with_dollar_sign",
    "heuristic.is_sequential_string",
    "heuristic.is_templated_secret",
)
# The library always has this one: it skips by a name's ending, also text (`.css`, `.svg`, `.lock`, `.sum`).
SKIPS_BY_NAME = "detect_secrets.filters.heuristic.is_non_text_file"
PNG = b"\x89PNG\r\n\x1a\n"
NOT_READ = "neither UTF-8 text nor a PNG: nobody can look for secrets in it"


def known_files() -> list[str]:
    """Return the files that git tracks or would add, without symbolic links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    named = sorted(name for name in listed.stdout.split("\0") if name)
    return [name for name in named if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


def settings() -> dict[str, list[dict[str, object]]]:
    """All detectors of the library; nothing is asked of a network to find out whether a secret is good."""
    names = sorted({found.__name__ for found in get_mapping_from_secret_type_to_class().values()})
    limits = {"HexHighEntropyString": 3.0, "Base64HighEntropyString": 4.5}
    return {
        "plugins_used": [
            {"name": name} | ({"limit": limits[name]} if name in limits else {}) for name in names
        ],
        "filters_used": [{"path": f"detect_secrets.filters.{name}"} for name in FILTERS],
    }


def found_in(names: list[str]) -> list[tuple[str, int, str, str]]:
    """Return the findings of the detectors in these files, and the files that they cannot read.

    Each item has file, line, kind and the text itself.
    """
    contents = {name: (ROOT / name).read_bytes() for name in names}
    texts = [name for name in names if _is_text(contents[name])]
    others = [name for name in names if name not in texts and not contents[name].startswith(PNG)]
    with transient_settings(settings()) as current:
        current.disable_filters(SKIPS_BY_NAME)
        return [(name, 1, NOT_READ, "") for name in others] + [
            (name, found.line_number, found.type, found.secret_value or "")
            for name in texts
            for found in scan_file(str(ROOT / name))
        ]


def _holds(exempt: Exempt, name: str, kind: str, text: str) -> bool:
    fits = kind in exempt.kinds and re.fullmatch(exempt.files, name) is not None
    return fits and re.fullmatch(exempt.text, text, re.DOTALL) is not None


def main(names: list[str]) -> int:
    """Scan these files, or all."""
    files, processes = names or known_files(), os.cpu_count() or 1
    wrong, needed = [], set()
    with ProcessPoolExecutor(processes) as pool:
        for found in pool.map(found_in, [files[at::processes] for at in range(processes)]):
            for name, line, kind, text in found:
                exempt = next((one for one in EXEMPT if _holds(one, name, kind, text)), None)
                needed.add(exempt)
                if exempt is None:
                    wrong.append(f"{name}:{line}: {kind}")
    if not names:
        wrong += [
            f"nothing needs the exception for {one.files}: {one.why}" for one in EXEMPT if one not in needed
        ]
    for line in sorted(wrong):
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
