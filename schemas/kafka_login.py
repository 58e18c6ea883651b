"""The login at Kafka as the settings have it: what is missing or wrong, and the password's file."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any, Final

# Spark's consumers get both between quotes: no quote, no backslash, nothing that cannot be printed.
_TEXT: Final = re.compile(r"[ !#-\[\]-~]+").fullmatch


def login_fault(protocol: str, username: str | None, password: str | None) -> str | None:
    """What is wrong with user name and password under this security protocol; None when nothing is."""
    if not protocol.startswith("SASL"):
        return None
    for name, value in (("sasl_username", username), ("sasl_password (or sasl_password_file)", password)):
        if value is None:
            return f"{name} is missing, which security_protocol {protocol} needs"
        if _TEXT(value) is None:
            return f"{name}: only printable ASCII without quotes and backslashes is taken"
    return None


def password_in_file(kafka: Any) -> str | None:
    """The password in the file that the section `kafka` names; None where it names none, or has a password.

    Raises ValueError that says how to mend it, and never what the file holds.
    """
    if not isinstance(kafka, dict) or not kafka.get("sasl_password_file") or kafka.get("sasl_password"):
        return None
    path = Path(str(kafka["sasl_password_file"]))
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ValueError(f"{path} is readable by others; run: chmod 600 {path}")
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; make it before the setting names it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {type(error).__name__}") from None
