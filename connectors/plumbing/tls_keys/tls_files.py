"""Writes the local certificate authority's files: creates, keeps and renews keys and certificates.

A missing or damaged authority is not replaced without request, because every client trusts the former one.

The folder has `ca.crt` and `ca.key`; for each server `<name>.crt` and `<name>.key` (`mosquitto`, `kafka`,
`gateway`), and `kafka.pem` with both, as Java needs it; `kafka-internal.*`, which is self-signed;
`clients/<role>.crt` and `.key`; and `kafka.password` for the local stack's SCRAM user. Private files are
created with mode 0600. An existing private file with another mode is reported and not changed: a new mode
would hide that other users may have read it.
"""

from __future__ import annotations

import fcntl
import secrets
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from connectors.plumbing.tls_keys.tls_authority import (
    LOCAL_HOSTS,
    Pair,
    check_hosts,
    hosts_of,
    new_authority,
    new_leaf,
    read_pair,
    why_not_good,
)
from trunkline_agent.errors import Refused, TrunklineError
from trunkline_agent.private_files import check_private, make_first, replace_file

CA: Final = "ca"
KAFKA: Final = "kafka"
SERVERS: Final = ("mosquitto", KAFKA, "gateway")
# The local stack's Kafka uses this pair for its connections to itself. No other program has it.
KAFKA_INTERNAL: Final = "kafka-internal"
CLIENT_ROLES: Final = ("operator", "bridge", "delegator", "worker", "agent")
KAFKA_PASSWORD: Final = "kafka.password"  # noqa: S105  a file's name
_CLIENTS: Final = "clients"


@dataclass(frozen=True)
class TlsFile:
    """One key and certificate on the disk.

    Attributes:
        name: The name of the pair, such as `gateway` or `clients/bridge`.
        certificate: The path of the certificate.
        key: The path of the private key.
        valid_until: The certificate's last day, as ISO 8601.
        hosts: The names and addresses in the certificate; empty for a client.
        why: Why the pair was made now. None: the existing one was kept.
    """

    name: str
    certificate: Path
    key: Path
    valid_until: str
    hosts: list[str]
    why: str | None


@dataclass(frozen=True)
class TlsFolder:
    """The result of `create`.

    Attributes:
        folder: The folder of all files.
        files: The pairs, the authority first.
        exposed: The private files that other users can read. They were not changed.
    """

    folder: Path
    files: list[TlsFile] = field(default_factory=list)
    exposed: list[Path] = field(default_factory=list)

    def of(self, name: str) -> TlsFile:
        """Return the pair named `name`, such as `gateway`. An unknown name raises StopIteration."""
        return next(file for file in self.files if file.name == name)


def create(
    folder: Path,
    hosts: Iterable[str] = (),
    *,
    mutual: bool = False,
    renew: bool = False,
    renew_authority: bool = False,
) -> TlsFolder:
    """Create or renew the keys and certificates that are missing or not valid for 30 more days.

    Other valid files are kept. The password of the local stack's Kafka user is created, too.

    Args:
        folder: the folder of the files.
        hosts: names or addresses for the certificates of servers, in addition to those that they have.
        mutual: create pairs for the clients, too. Existing ones are always kept up to date.
        renew: replace all pairs but the authority.
        renew_authority: replace the authority, and with it all pairs.

    Returns:
        All pairs, with the reason of each new one, and the private files that others can read.

    Raises:
        UsageError: a host is neither a name nor an address.
        Refused: the existing authority is incomplete, or others can read its key. Nothing was written.
        TrunklineError: the folder cannot be written.
    """
    wanted = list(dict.fromkeys([*LOCAL_HOSTS, *hosts]))
    check_hosts(wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = TlsFolder(folder)
        authority, why = _authority(folder, renew_authority)
        found.files.append(_described(folder, CA, authority, why))
        for name in SERVERS:
            pair, file = _ensured(folder, name, authority, renew, wanted)
            if name == KAFKA:
                chain = authority.certificate_pem
                _private(folder / f"{name}.pem", pair.key_pem + pair.certificate_pem + chain)
            found.files.append(file)
        found.files.append(_kafka_internal(folder, renew))
        if mutual or (folder / _CLIENTS).is_dir():
            for role in CLIENT_ROLES:
                found.files.append(_ensured(folder, client_name(role), authority, renew)[1])
        make_first(folder / KAFKA_PASSWORD, secrets.token_hex(32))
        found.exposed.extend(_exposed(folder))
    except OSError as error:
        raise TrunklineError(f"cannot write below {folder}: {error.strerror}") from error
    return found


def ensure_kafka_internal(folder: Path) -> None:
    """Create the key pair by which nodes of the local stack's Kafka know each other, unless there is one.

    An old pair is kept: nodes that run know only that one. `create` renews it.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / f"{KAFKA_INTERNAL}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # each node may be a process of its own
        if not (folder / f"{KAFKA_INTERNAL}.pem").exists():
            _kafka_internal(folder, renew=False)


def _kafka_internal(folder: Path, renew: bool) -> TlsFile:
    pair, file = _ensured(folder, KAFKA_INTERNAL, None, renew, LOCAL_HOSTS)
    _private(folder / f"{KAFKA_INTERNAL}.pem", pair.key_pem + pair.certificate_pem)
    return file


def client_name(role: str) -> str:
    """Return the name of the pair for clients of a role: `clients/<role>`."""
    return f"{_CLIENTS}/{role}"


def check_server_key(file: Path) -> None:
    """Check that no other user can read `file`, the private key of a server of the local stack.

    Raises:
        UsageError: Another user can read the file. The message has the command that changes its mode.
        FileNotFoundError: There is no such file.
    """
    check_private(file)


def _exposed(folder: Path) -> list[Path]:
    private = [file for pattern in ("*.key", "*.pem", "*.password") for file in folder.rglob(pattern)]
    return sorted(file for file in private if _is_exposed(file))


def _is_exposed(file: Path) -> bool:
    return bool(file.stat().st_mode & 0o077)


def _authority(folder: Path, renew: bool) -> tuple[Pair, str | None]:
    known = _known(folder, CA)
    why = _reason(known, known, (), renew)
    key = folder / f"{CA}.key"
    if known is not None and why is None:
        # Another mode would hide that someone may have read the key. Only the operator can know.
        if _is_exposed(key):
            raise Refused(
                f"{key} is readable by others (mode {stat.S_IMODE(key.stat().st_mode):o}), and with it anyone "
                f"can pose as any server: if no other user can have read it, run chmod 600 {key} and then this "
                "command again; else make a new authority with --renew-ca: all clients need its ca.crt"
            )
        return known, None
    # A `ca.key` alone is left from an interrupted start: no certificate of that authority exists.
    left = [folder / f"{name}.crt" for name in (CA, *SERVERS) if (folder / f"{name}.crt").exists()]
    if known is None and left and not renew:
        raise Refused(
            f"{left[0]} exists, but {folder / CA}.crt and {CA}.key are no valid pair: restore the missing or "
            "changed file; or make a new authority with --renew-ca: all clients need its ca.crt"
        )
    made = new_authority()
    _write(folder, CA, made)
    return made, why


def _ensured(
    folder: Path, name: str, authority: Pair | None, renew: bool, hosts: Sequence[str] = ()
) -> tuple[Pair, TlsFile]:
    """Return a pair from its files, or make and write a new one.

    A pair without an `authority` is self-signed. A new one has the wanted hosts and those of the old one.
    """
    known = _known(folder, name)
    names = list(dict.fromkeys([*hosts, *([] if known is None else hosts_of(known.certificate))]))
    why = _reason(known, authority or known, names, renew)
    pair = known if known is not None and why is None else new_leaf(authority, Path(name).name, names)
    if why is not None:
        _write(folder, name, pair)
    return pair, _described(folder, name, pair, why)


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
    # If this is interrupted between the two, they do not match. The next run replaces both, or asks for
    # --renew-ca.
    _private(folder / f"{name}.key", pair.key_pem)
    _private(folder / f"{name}.crt", pair.certificate_pem)


def _private(path: Path, content: bytes) -> None:
    with suppress(FileNotFoundError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(path, content)


def _described(folder: Path, name: str, pair: Pair, why: str | None) -> TlsFile:
    return TlsFile(
        name=name,
        certificate=folder / f"{name}.crt",
        key=folder / f"{name}.key",
        valid_until=f"{pair.certificate.not_valid_after_utc:%Y-%m-%d}",
        hosts=hosts_of(pair.certificate),
        why=why,
    )
