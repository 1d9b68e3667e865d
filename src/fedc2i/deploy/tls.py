"""The coordinator's TLS certificates: its own authority, and a server certificate signed by it.

Sites trust only the authority's certificate, so the server certificate can be renewed without new files for them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.deploy import keys  # first: it tells what to install if cryptography is missing

# isort: split
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS, SERVER_DAYS = 3652, 397
WARN_DAYS = 30
MOST_AUTHORITIES = 2
SKEW = timedelta(hours=1)  # a site's clock may be behind
ALWAYS = ("localhost", "127.0.0.1", "::1")  # for processes on the coordinator's own machine


def new_authority(title: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The key and the self-signed certificate of a new authority, valid for ten years."""
    key = keys.new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title[:64])])
    builder = _builder(name, name, key.public_key(), datetime.now(UTC), AUTHORITY_DAYS, signs_certificates=True)
    return key, builder.sign(key, hashes.SHA384())


def server_certificate(
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    public: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    days: int = SERVER_DAYS,
    now: datetime | None = None,
) -> x509.Certificate:
    """A server certificate for these hosts and those in `ALWAYS`; it never outlives its authority."""
    began = now or datetime.now(UTC)
    days = min(days, (authority.not_valid_after_utc - began).days)
    if authority.public_key() != authority_key.public_key():
        raise UserError("ca.key: does not belong to ca.crt")
    if days < 1:
        raise UserError("ca.crt: the authority has expired; `fedc2i coordinator rotate` makes the next one")
    names = [_general(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedc2i coordinator")])
    builder = _builder(subject, authority.subject, public, began, days, signs_certificates=False)
    for extension in (
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName(names),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
    ):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority_key, hashes.SHA384())


def to_pem(certificate: x509.Certificate) -> bytes:
    """The content of its file."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def read_certificate(path: Path, *, authority: bool = False) -> x509.Certificate:
    """Reads a certificate; ``authority`` rejects a server's."""
    try:
        found = x509.load_pem_x509_certificate(keys.read_small(path))
    except keys.DAMAGE:
        raise UserError(f"{path}: not a certificate in PEM format") from None
    is_authority = _is_authority(path, found)
    if authority and not is_authority:
        raise UserError(f"{path}: not the certificate of an authority; the coordinator's ca.crt is needed")
    return found


def _require_authority(path: Path, certificate: x509.Certificate) -> None:
    if not _is_authority(path, certificate):
        raise UserError(f"{path}: not the certificate of an authority; the coordinator's ca.crt is needed")


def _is_authority(path: Path, certificate: x509.Certificate) -> bool:
    """Whether it may sign others; a `UserError` if it is damaged."""
    try:
        extensions = {type(entry.value): entry.value for entry in certificate.extensions}
        certificate.public_key()  # raises for an unknown kind
    except keys.DAMAGE:
        raise UserError(f"{path}: not a certificate in PEM format") from None
    constraints = extensions.get(x509.BasicConstraints)
    return isinstance(constraints, x509.BasicConstraints) and constraints.ca


def read_authorities(path: Path) -> list[x509.Certificate]:
    """The authorities in ``ca.crt``: one, or two while the coordinator changes from one to the next."""
    try:
        found = x509.load_pem_x509_certificates(keys.read_small(path))
    except keys.DAMAGE:
        raise UserError(f"{path}: not a certificate in PEM format") from None
    if not 1 <= len(found) <= MOST_AUTHORITIES:
        raise UserError(f"{path}: has {len(found)} certificates, allowed are 1..{MOST_AUTHORITIES}")
    for one in found:
        _require_authority(path, one)
    return found


def authority_of(key: ec.EllipticCurvePrivateKey, authorities: Sequence[x509.Certificate]) -> x509.Certificate:
    """The authority to which a key belongs; a `UserError` if it is none of these."""
    for one in authorities:
        if one.public_key() == key.public_key():
            return one
    raise UserError("ca.key: does not belong to ca.crt")


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names and addresses that a server certificate is for; empty for an authority."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def describe(certificate: x509.Certificate, now: datetime | None = None) -> list[str]:
    """Its hosts, its last day, its fingerprint, and a warning if it expires within `WARN_DAYS` days."""
    hosts, ends = ", ".join(hosts_of(certificate)), certificate.not_valid_after_utc
    kind = "server certificate" if hosts else "authority"
    days = round((ends - (now or datetime.now(UTC))) / timedelta(days=1))
    lines = [
        f"{kind}{f' for {hosts}' if hosts else ''}: valid until {ends:%Y-%m-%d} ({days} days left)",
        f"its SHA-256: {certificate.fingerprint(hashes.SHA256()).hex(':').upper()}",
    ]
    if days < WARN_DAYS:
        lines.append(f"warning: the {kind} {f'expires in {days} days' if days > 0 else 'has expired'}")
    return lines


def check_server(
    authorities: Sequence[x509.Certificate],
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    now: datetime | None = None,
) -> None:
    """Raises a `UserError` with the reason if sites with these authorities would not accept it for these hosts."""
    advice = "`fedc2i coordinator renew` makes a new one"
    if certificate.public_key() != key.public_key():
        raise UserError(f"server.crt: does not belong to server.key; {advice}")
    issuers = [one for one in authorities if _signed(one, certificate)]
    if not issuers:
        raise UserError(f"server.crt: not signed by the authority of ca.crt; {advice}")
    for name, one in (("server.crt", certificate), ("ca.crt", issuers[0])):
        if not one.not_valid_before_utc <= (now or datetime.now(UTC)) < one.not_valid_after_utc:
            span = f"{one.not_valid_before_utc:%Y-%m-%d} to {one.not_valid_after_utc:%Y-%m-%d}"
            raise UserError(f"{name}: valid from {span}, not today; {advice}")
    missing = [host for host in hosts if host not in hosts_of(certificate)]
    if missing:
        raise UserError(f"server.crt: not valid for {', '.join(missing)}; {advice}")


def _signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except keys.DAMAGE:
        return False
    return True


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    began: datetime,
    days: int,
    signs_certificates: bool,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(began - SKEW).not_valid_after(began + timedelta(days=days))
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    constraints = x509.BasicConstraints(ca=signs_certificates, path_length=0 if signs_certificates else None)
    usage = x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
