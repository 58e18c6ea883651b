"""The operator's token: a 0600 file that the gateway makes at its first start."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from schemas.principals import new_token
from schemas.settings import Settings, SettingsError

_SHORTEST: Final = 32


def ensure_operator_token(settings: Settings) -> str:
    """The operator's token from its file, which is made where there is none.

    Of two gateways that start at once, one makes the file and both read it. Raises SettingsError for a file
    that others can read, or that holds no token.
    """
    path = settings.operator_token_file
    try:
        if not path.exists():
            _make(path)
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


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(new_token() + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        # A link does not replace: whoever comes second keeps the first one's token.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
