"""A local certificate authority: makes its key, and the certificates of servers and clients.

Pure functions of keys and certificates (X.509, RFC 5280). `tls_files` stores them on the disk.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trunkline_agent.errors import UsageError

CA_DAYS: Final = 3650
LEAF_DAYS: Final = 730
# A certificate that expires sooner is replaced, which leaves time to distribute the new one.
RENEW_DAYS: Final = 30
LOCAL_HOSTS: Final = ("127.0.0.1", "localhost")
# Clocks of other machines may be behind ours.
_BACKDATED: Final = timedelta(hours=1)
_ORGANISATION: Final = "Trunkline"
# An extension of a certificate, and whether it is critical.
_Extension = tuple[x509.ExtensionType, bool]


@dataclass(frozen=True)
class Pair:
    """A private key and its certificate. `certificate` has the public half of `key`."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def key_pem(self) -> bytes:
        """The private key in PEM (PKCS#8, not encrypted), which both Java and OpenSSL read."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def certificate_pem(self) -> bytes:
        """The certificate in PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def read_pair(key_pem: bytes, certificate_pem: bytes) -> Pair:
    """Parse the content of a key file and a certificate file, and return the pair.

    Raises:
        ValueError: The content is invalid, or the key is that of another certificate.
    """
    key = serialization.load_pem_private_key(key_pem, None)
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError("the key is not that of the certificate")
    return Pair(key, certificate)


def new_authority(now: datetime | None = None) -> Pair:
    """Make a new certificate authority: a key and a self-signed certificate, valid for ten years.

    Args:
        now: The time from which it is valid. None: the present time.
    """
    # Two authorities with the same name and different keys would confuse a client that has both certificates.
    name = f"Trunkline CA {x509.random_serial_number() & 0xFFFFFFFF:08x}"
    extensions: list[_Extension] = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
    ]
    return _issued(None, name, CA_DAYS, extensions, now)


def new_leaf(authority: Pair | None, name: str, hosts: Iterable[str] = (), now: datetime | None = None) -> Pair:
    """Make a new key and its certificate for a server or a client, valid for two years.

    A server's certificate is valid for a client, too.

    Args:
        authority: The authority that signs. None: the certificate is self-signed, and a client that trusts it
            trusts no other certificate.
        name: The common name in the certificate.
        hosts: The names and addresses of the server. Empty: the certificate is for a client.
        now: The time from which it is valid. None: the present time.

    Raises:
        UsageError: A host is neither a name nor an IP address.
    """
    names = [_host(host) for host in hosts]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH] if names else []
    extensions: list[_Extension] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([*purposes, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
    ]
    if names:
        extensions.append((x509.SubjectAlternativeName(names), False))
    return _issued(authority, name, LEAF_DAYS, extensions, now)


def check_hosts(hosts: Iterable[str]) -> None:
    """Raise UsageError if one of `hosts` is neither a valid host name nor an IP address."""
    for host in hosts:
        _host(host)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses in a server's certificate. The list is empty for a client's."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found]


def why_not_good(
    pair: Pair, authority: Pair, hosts: Iterable[str] = (), now: datetime | None = None
) -> str | None:
    """Return why a pair must be replaced, or None if it may be kept.

    It may be kept if this authority signed it, it is valid for 30 more days, and it names all hosts.

    Args:
        pair: The pair to check.
        authority: The authority that must have signed it.
        hosts: The names and addresses that the certificate must have.
        now: The time to compare with. None: the present time.
    """
    certificate, at = pair.certificate, now or datetime.now(UTC)
    try:
        certificate.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature):
        return "another authority signed it"
    if certificate.not_valid_before_utc > at:
        return "it is not valid yet"
    if certificate.not_valid_after_utc < at + timedelta(days=RENEW_DAYS):
        return f"it ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
    missing = sorted({str(_host(host).value) for host in hosts} - set(hosts_of(certificate)))
    return f"it does not name {', '.join(missing)}" if missing else None


def _issued(
    authority: Pair | None, name: str, days: int, extensions: list[_Extension], now: datetime | None
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    begins = now or datetime.now(UTC)
    ends = begins + timedelta(days=days)
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _ORGANISATION),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
    signer, issuer = key, subject
    extensions = [(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False), *extensions]
    if authority is not None:
        signer, issuer = authority.key, authority.certificate.subject
        # Not longer than its issuer.
        ends = min(ends, authority.certificate.not_valid_after_utc)
        signed_by = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signed_by)
        extensions.append((identifier, False))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _BACKDATED)
        .not_valid_after(ends)
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, is_critical)
    return Pair(key, builder.sign(signer, hashes.SHA256()))


def _usage(*allowed: str) -> x509.KeyUsage:
    kinds = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{kind: kind in allowed for kind in kinds})


def _host(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.rstrip(".").split(".")
    fits = all(
        label and len(label) <= 63 and label.isascii() and label.replace("-", "").isalnum() for label in labels
    )
    if not fits or len(host) > 253:
        raise UsageError(f"--host: {host[:80]!r} is neither a host's name nor an IP address")
    return x509.DNSName(host.rstrip(".").lower())
