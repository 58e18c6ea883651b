"""A check that only the owner can read the file with a private key of TLS."""

from __future__ import annotations

from pathlib import Path

from schemas.settings.settings import SettingsError
from trunkline_agent.private_files import PrivateFileError, check_private


def check_key_file(settings: str, certfile: Path, keyfile: Path | None) -> None:
    """Check that only the owner can read the file with the private key of a TLS certificate.

    A file that is missing, or whose mode cannot be read, passes: the code that opens it reports the error.

    Args:
        settings: the prefix of the setting's name in the error message, such as `gateway.` for
            `gateway.keyfile`.
        certfile: the file with the certificate.
        keyfile: the file with the private key. None means that it is in `certfile`, too.

    Raises:
        SettingsError: other users can read the file.
    """
    path, name = (certfile, "certfile") if keyfile is None else (keyfile, "keyfile")
    try:
        check_private(path)
    except PrivateFileError as error:
        raise SettingsError(f"{settings}{name}: {error}") from None
    except OSError:
        pass
