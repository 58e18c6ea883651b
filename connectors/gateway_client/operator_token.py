"""The operator's token: a 0600 file that the gateway makes at its first start."""

from __future__ import annotations

from typing import Final

from schemas.keys.first_file import make_first
from schemas.settings.settings import Settings, SettingsError
from schemas.streams.principal.principals import new_token

_SHORTEST: Final = 32


def ensure_operator_token(settings: Settings) -> str:
    """The operator's token from its file, which is made where there is none.

    Of two gateways that start at once, one makes the file and both read it. Raises SettingsError for a file
    that others can read, or that holds no token.
    """
    path = settings.operator_token_file
    try:
        if not path.exists():
            make_first(path, new_token() + "\n")
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"gateway.operator_token_file: cannot use {path}: {type(error).__name__}") from None
    if mode & 0o077:
        raise SettingsError(f"gateway.operator_token_file: {path} is readable by others; run: chmod 600 {path}")
    if len(token) < _SHORTEST or not token.isprintable() or " " in token:
        raise SettingsError(
            f"gateway.operator_token_file: {path} holds no token; remove it and start the gateway again"
        )
    return token
