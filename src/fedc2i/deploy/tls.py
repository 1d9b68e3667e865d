"""The coordinator's TLS certificates: its own authority, and a server certificate signed by it.

Sites trust only the authority's certificate, so the server certificate can be renewed without new files for them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from fedc2i.core.errors import UserError
from fedc2i.deploy import keys  # first: it tells what to install if cryptography is missing
from fedc2i.deploy.addresses import check_host

# isort: split
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS, SERVER_DAYS = 3652, 397
WARN_DAYS = 30
SKEW = timedelta(hours=1)  # a site's clock may be behind
ALWAYS = ("localhost", "127.0.0.1", "::1")  # for processes on the coordinator's own machine


def new_authority(title: str, now: datetime | None = None) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """The key and the self-signed certificate (PEM) of a new authority, valid for ten years."""
    key, name = keys.new_key(), _named(title[:64])
    builder = _certificate(name, name, key.public_key(), now or datetime.now(UTC), AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return key, builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def server_certificate(
    authority_key: ec.EllipticCurvePrivateKey,
    authority: bytes,
    public: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    days: int = SERVER_DAYS,
    now: datetime | None = None,
) -> bytes:
    """A server certificate (PEM) for these hosts and those in `ALWAYS`; it never outlives its authority."""
    began, issuer = now or datetime.now(UTC), read_certificate(authority, "ca.crt", authority=True)
    days = min(days, (issuer.not_valid_after_utc - began).days)
    if issuer.public_key() != authority_key.public_key():
        raise UserError("ca.key: does not belong to ca.crt")
    if days < 1:
        raise UserError(
            "ca.crt: the authority has expired; make a new coordinator folder, and send its ca.crt to all sites"
        )
    names = dict.fromkeys((*map(check_host, hosts), *ALWAYS))
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = _certificate(_named("fedc2i coordinator"), issuer.subject, public, began, days)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_general(host) for host in names]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(authority_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def read_certificate(content: bytes, where: str, *, authority: bool = False) -> x509.Certificate:
    """Parses a certificate; ``authority`` rejects a server's."""
    try:
        found = x509.load_pem_x509_certificate(content)
        extensions = {type(entry.value): entry.value for entry in found.extensions}
        found.public_key()  # raises for an unknown kind
    except keys.DAMAGE:
        raise UserError(f"{where}: not a certificate in PEM format") from None
    constraints = extensions.get(x509.BasicConstraints)
    if authority and not (isinstance(constraints, x509.BasicConstraints) and constraints.ca):
        raise UserError(f"{where}: not the certificate of an authority; the coordinator's ca.crt is needed")
    return found


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names and addresses that a server certificate is for; empty for an authority."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))


def describe(certificate: x509.Certificate, now: datetime | None = None) -> list[str]:
    """Its hosts, its last day, its fingerprint, and a warning if it expires within `WARN_DAYS` days."""
    ends, left = certificate.not_valid_after_utc, certificate.not_valid_after_utc - (now or datetime.now(UTC))
    whom = ", ".join(hosts_of(certificate))
    lines = [
        f"{f'server certificate for {whom}' if whom else 'authority'}: valid until {ends:%Y-%m-%d} ({_days(left)})",
        f"its SHA-256: {certificate.fingerprint(hashes.SHA256()).hex(':').upper()}",
    ]
    if left <= timedelta(0):
        lines.append(f"warning: the {'server certificate' if whom else 'authority'} has expired")
    elif left < timedelta(days=WARN_DAYS):
        lines.append(f"warning: the {'server certificate' if whom else 'authority'} expires {_days(left)}")
    return lines


def check_server(
    authority: x509.Certificate,
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    now: datetime | None = None,
) -> None:
    """Raises a `UserError` with the reason if sites would not accept this certificate for these hosts."""
    advice = "`fedc2i coordinator renew` makes a new one"
    if certificate.public_key() != key.public_key():
        raise UserError(f"server.crt: does not belong to server.key; {advice}")
    try:
        certificate.verify_directly_issued_by(authority)
    except keys.DAMAGE:
        raise UserError(f"server.crt: not signed by the authority of ca.crt; {advice}") from None
    for name, one in (("server.crt", certificate), ("ca.crt", authority)):
        if not one.not_valid_before_utc <= (now or datetime.now(UTC)) < one.not_valid_after_utc:
            span = f"{one.not_valid_before_utc:%Y-%m-%d} to {one.not_valid_after_utc:%Y-%m-%d}"
            raise UserError(f"{name}: valid from {span}, not today; {advice}")
    missing = [host for host in hosts if host not in hosts_of(certificate)]
    if missing:
        raise UserError(f"server.crt: not valid for {', '.join(missing)}; {advice}")


def _days(span: timedelta) -> str:
    """``in 12 days`` or ``3 days ago``, to the nearest day."""
    days = round(abs(span) / timedelta(days=1))
    words = f"{days} day{'' if days == 1 else 's'}" if days else "less than a day"
    return f"in {words}" if span > timedelta(0) else f"{words} ago"


def _certificate(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, began: datetime, days: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(began - SKEW).not_valid_after(began + timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
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


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
