"""The operator's token: a file with mode 0600 that the gateway makes at its first start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from schemas.settings.settings import Settings, SettingsError
from schemas.streams.principal.principals import new_token
from trunkline_agent.errors import UsageError
from trunkline_agent.private_files import PrivateFileError, make_first, read_private

TOKEN_VARIABLE: Final = "TRUNKLINE_TOKEN"  # noqa: S105  a variable's name
_SHORTEST: Final = 32


def ensure_operator_token(settings: Settings) -> str:
    """Return the operator's token from its file. If the file does not exist, write it with a new token first.

    When two gateways start at once, one writes the file and both read it. Raises SettingsError for a file that
    cannot be read or written, that others can read, or that has no valid token.
    """
    path = settings.operator_token_file
    try:
        if not path.exists():
            make_first(path, new_token() + "\n")
        token = read_private(path).decode("ascii").strip()
    except PrivateFileError as error:
        raise SettingsError(f"gateway.operator_token_file: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"gateway.operator_token_file: cannot use {path}: {type(error).__name__}") from None
    if len(token) < _SHORTEST or not token.isprintable() or " " in token:
        raise SettingsError(
            f"gateway.operator_token_file: {path} holds no token; remove it and start the gateway again"
        )
    return token


def read_token(settings: Settings) -> str | None:
    """Return the token for requests to the gateway, from the variable TRUNKLINE_TOKEN or the operator's file.

    The variable comes first. None means that the variable is empty or unset and the file is empty or missing.
    Raises UsageError for a file that cannot be read or that others can read, and for a text that cannot be a
    token.
    """
    found = os.environ.get(TOKEN_VARIABLE, "").strip()
    return _checked(found, TOKEN_VARIABLE) if found else read_token_file(settings.operator_token_file)


def read_token_file(file: Path) -> str | None:
    """Return the token in a file, None if the file is empty or missing.

    Raises UsageError for a file that cannot be read or that others can read, and for a text that cannot be a
    token.
    """
    try:
        found = read_private(file).decode("utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {file}: {type(error).__name__}") from None
    return _checked(found, str(file))


def _checked(found: str, where: str) -> str | None:
    if not found.isascii() or not found.isprintable() or " " in found:
        raise UsageError(f"{where} holds no token: one printable ASCII word")
    return found or None
