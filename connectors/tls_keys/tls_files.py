"""The files of our own certificate authority: made once, kept while they are good, and made anew when not.

The authority alone is not made anew when it is missing or damaged: every client trusts the one that was there.

In the folder: `ca.crt`, `ca.key`; for each server `<name>.crt` and `<name>.key` (`mosquitto`, `kafka`,
`gateway`), and `kafka.pem` with both, as Java wants it; `kafka-internal.*`, signed by itself;
`clients/<role>.crt` and `.key`; `kafka.password`, that of the local stack's SCRAM user. What is private is made
with mode 0600. The mode of what is kept is told where it is another, and stays: a change of ours would hide
that somebody may have read it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from connectors.tls_keys.tls_authority import (
    LOCAL_HOSTS,
    Pair,
    check_hosts,
    hosts_of,
    new_authority,
    new_client,
    new_lone,
    new_server,
    read_pair,
    why_not_good,
)
from schemas.errors import Refused, TrunklineError, UsageError
from schemas.keys.first_file import make_first

CA: Final = "ca"
KAFKA: Final = "kafka"
SERVERS: Final = ("mosquitto", KAFKA, "gateway")
# What the local stack's Kafka shows to itself, and nobody else has.
KAFKA_INTERNAL: Final = "kafka-internal"
CLIENT_ROLES: Final = ("operator", "bridge", "delegator", "worker", "agent")
KAFKA_PASSWORD: Final = "kafka.password"  # noqa: S105  a file's name
_CLIENTS: Final = "clients"


@dataclass(frozen=True)
class TlsFile:
    """One pair on the disk. `why`: the reason for which it was made now, None when it was kept."""

    name: str
    certificate: Path
    key: Path
    valid_until: str
    hosts: list[str]
    why: str | None


@dataclass(frozen=True)
class TlsFolder:
    """What `create` leaves behind, the authority first. `exposed`: its private files that others can read."""

    folder: Path
    files: list[TlsFile] = field(default_factory=list)
    exposed: list[Path] = field(default_factory=list)

    def of(self, name: str) -> TlsFile:
        """The pair with this name."""
        return next(file for file in self.files if file.name == name)


def create(
    folder: Path,
    hosts: Iterable[str] = (),
    *,
    mutual: bool = False,
    renew: bool = False,
    renew_authority: bool = False,
) -> TlsFolder:
    """Make what is missing or no longer good. A server keeps the hosts that it has, and gets these.

    `mutual`: pairs for the clients as well; they are looked after once they are there. `renew`: all pairs but
    the authority anew; `renew_authority`: that, too. Raises UsageError for what is no host, Refused, before
    anything is written, when the authority that was there is not whole or others can read its key,
    TrunklineError when the folder cannot be written.
    """
    wanted = list(dict.fromkeys([*LOCAL_HOSTS, *hosts]))
    check_hosts(wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = TlsFolder(folder)
        authority, why = _authority(folder, renew_authority)
        found.files.append(_told(folder, CA, authority, why))
        for name in SERVERS:
            known = _known(folder, name)
            kept = [] if known is None else hosts_of(known.certificate)
            named = list(dict.fromkeys([*wanted, *kept]))
            reason = _reason(known, authority, named, renew)
            pair = known if known is not None and reason is None else new_server(authority, name, named)
            if reason is not None:
                _write(folder, name, pair)
            if name == KAFKA:
                _private(
                    folder / f"{name}.pem", pair.key_pem + pair.certificate_pem + authority.certificate_pem
                )
            found.files.append(_told(folder, name, pair, reason))
        found.files.append(_kafka_internal(folder, renew))
        if mutual or (folder / _CLIENTS).is_dir():
            found.files.extend(_client(folder, role, authority, renew) for role in CLIENT_ROLES)
        make_first(folder / KAFKA_PASSWORD, secrets.token_hex(32))
        found.exposed.extend(_exposed(folder))
    except OSError as error:
        raise TrunklineError(f"cannot write below {folder}: {error.strerror}") from error
    return found


def client_name(role: str) -> str:
    """The name of a role's pair."""
    return f"{_CLIENTS}/{role}"


def check_server_key(file: Path) -> None:
    """Raise UsageError when others can read what a server of the local stack would show itself with."""
    if _is_exposed(file):
        raise UsageError(f"{file} is readable by others; run: chmod 600 {file}")


def _exposed(folder: Path) -> list[Path]:
    private = [file for pattern in ("*.key", "*.pem", "*.password") for file in folder.rglob(pattern)]
    return sorted(file for file in private if _is_exposed(file))


def _is_exposed(file: Path) -> bool:
    return bool(file.stat().st_mode & 0o077)


def _authority(folder: Path, renew: bool) -> tuple[Pair, str | None]:
    known = _known(folder, CA)
    why = _reason(known, known, (), renew)
    if known is not None and why is None:
        _check_key_is_ours(folder / f"{CA}.key")
        return known, None
    if known is None and not renew:
        _check_never_made(folder)
    made = new_authority()
    _write(folder, CA, made)
    return made, why


def _check_key_is_ours(key: Path) -> None:
    """Raise Refused when others can read the authority's key. A chmod of ours would hide that somebody may have
    it already: only the operator can know.
    """
    if _is_exposed(key):
        raise Refused(
            f"{key} is readable by others (mode {stat.S_IMODE(key.stat().st_mode):o}), and whoever has it can "
            f"pose as any server: if nobody else can have read it, run chmod 600 {key} and the same again; "
            "else make a new authority by --renew-ca: all clients need its ca.crt"
        )


def _check_never_made(folder: Path) -> None:
    """Raise Refused when there was an authority. A `ca.key` alone is one that was broken off while it was made:
    no server shows anything of it.
    """
    left = [folder / f"{name}.crt" for name in (CA, *SERVERS) if (folder / f"{name}.crt").exists()]
    if left:
        raise Refused(
            f"{left[0]} is there, and {folder / CA}.crt and {CA}.key are no pair that can be read: put back "
            "what is missing or was changed; or make a new authority by --renew-ca: all clients need its ca.crt"
        )


def _kafka_internal(folder: Path, renew: bool) -> TlsFile:
    known = _known(folder, KAFKA_INTERNAL)
    why = _reason(known, known, LOCAL_HOSTS, renew)
    pair = known if known is not None and why is None else new_lone(KAFKA_INTERNAL, LOCAL_HOSTS)
    if why is not None:
        _write(folder, KAFKA_INTERNAL, pair)
    _private(folder / f"{KAFKA_INTERNAL}.pem", pair.key_pem + pair.certificate_pem)
    return _told(folder, KAFKA_INTERNAL, pair, why)


def _client(folder: Path, role: str, authority: Pair, renew: bool) -> TlsFile:
    name = client_name(role)
    known = _known(folder, name)
    why = _reason(known, authority, (), renew)
    pair = known if known is not None and why is None else new_client(authority, role)
    if why is not None:
        _write(folder, name, pair)
    return _told(folder, name, pair, why)


def _reason(known: Pair | None, authority: Pair | None, hosts: Iterable[str], renew: bool) -> str | None:
    if known is None or authority is None:
        return "there was none"
    return "it was asked for" if renew else why_not_good(known, authority, hosts)


def _known(folder: Path, name: str) -> Pair | None:
    try:
        return read_pair((folder / f"{name}.key").read_bytes(), (folder / f"{name}.crt").read_bytes())
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write(folder: Path, name: str, pair: Pair) -> None:
    # Broken off between the two, they do not fit: the next run makes both anew, or says that --renew-ca does.
    _private(folder / f"{name}.key", pair.key_pem)
    _private(folder / f"{name}.crt", pair.certificate_pem)


def _private(path: Path, content: bytes) -> None:
    with suppress(FileNotFoundError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _told(folder: Path, name: str, pair: Pair, why: str | None) -> TlsFile:
    return TlsFile(
        name=name,
        certificate=folder / f"{name}.crt",
        key=folder / f"{name}.key",
        valid_until=f"{pair.certificate.not_valid_after_utc:%Y-%m-%d}",
        hosts=hosts_of(pair.certificate),
        why=why,
    )
