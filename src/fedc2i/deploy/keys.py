"""A site's key, and the request with which it asks the coordinator to be admitted.

A site authenticates with an ECDSA key on P-384, in the format that ``flower-supernode`` reads. To be admitted it sends
a certificate request (PKCS#10) with its name, its public key, and a signature that proves that it holds the private
key, which never leaves its folder. Error messages hold nothing of a key's content.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from fedc2i.core.errors import UserError, how_to_install

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID
except ModuleNotFoundError:
    raise UserError(f"a real federation needs the extra: {how_to_install('flower')}") from None

MOST_BYTES = 16 * 2**10  # of a key, a request or a certificate; real ones have about one thousand
MOST_LETTERS = 60  # of a site's name

# what cryptography raises for a file that is damaged or of another kind
DAMAGE = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion, x509.DuplicateExtension),
    NotImplementedError,  # a point of a curve in another form
)


class Request(NamedTuple):
    """The content of a valid certificate request."""

    name: str
    public: str  # one line as in OpenSSH, without a comment


def read_small(path: Path) -> bytes:
    """The content of a key, request or certificate."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would never end
            raise UserError(f"{path}: not a file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: longer than {MOST_BYTES:,} bytes, which no key, request or certificate is")
    return content


def check_name(name: str, where: str = "name") -> str:
    """Returns the name if a site may have it: it becomes a file's name on the coordinator's machine."""
    if len(name) > MOST_LETTERS or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*( [A-Za-z0-9._-]+)*", name):
        allowed = f"letters, digits, '.', '_', '-' and single spaces, at most {MOST_LETTERS}, first a letter or digit"
        raise UserError(f"{where}: {name[:MOST_LETTERS]!a} is not allowed as a site's name, allowed are {allowed}")
    return name


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new key on P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def to_private(key: ec.EllipticCurvePrivateKey, form: Literal["OpenSSH", "PKCS8"]) -> bytes:
    """The content of a key's file: ``flower-supernode`` reads OpenSSH, ``flower-superlink`` PKCS8."""
    chosen = getattr(serialization.PrivateFormat, form)
    return key.private_bytes(serialization.Encoding.PEM, chosen, serialization.NoEncryption())


def ssh_public(key: ec.EllipticCurvePublicKey) -> str:
    """One line in OpenSSH format, without a comment."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def pem_public(line: str) -> bytes:
    """A public key line in the form in which Flower keeps it (PEM)."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return serialization.load_ssh_public_key(line.encode()).public_bytes(serialization.Encoding.PEM, form)


def read_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key on P-384 in either format, from a file that nobody else can read."""
    content = read_small(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise UserError(f"{path}: other users can read this private key; `chmod 600` it, or make a new one")
    load = serialization.load_ssh_private_key if b"OPENSSH" in content[:64] else serialization.load_pem_private_key
    try:
        key = load(content, None)
    except DAMAGE:
        raise UserError(f"{path}: not a private key without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise UserError(f"{path}: not an ECDSA key on P-384")
    return key


def read_public(path: Path) -> str:
    """A site's public key from its file, as `ssh_public` writes it."""
    try:
        return _site_key(serialization.load_ssh_public_key(read_small(path)), path)
    except DAMAGE:
        raise UserError(f"{path}: not a public key in OpenSSH format") from None


def fingerprint(public: str) -> str:
    """The SHA-256 of a public key line, as ``ssh-keygen -l`` shows it."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def sign(key: ec.EllipticCurvePrivateKey, purpose: bytes, content: bytes) -> bytes:
    """A signature; one for another purpose is not valid for this one."""
    return key.sign(purpose + b"\0" + content, ec.ECDSA(hashes.SHA384()))


def is_signed(public: str, signature: bytes, purpose: bytes, content: bytes) -> bool:
    """Whether the holder of a public key line has signed this."""
    try:
        key = serialization.load_ssh_public_key(public.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, purpose + b"\0" + content, ec.ECDSA(hashes.SHA384()))
    except DAMAGE:
        return False
    return True


def make_request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """The certificate request (PEM) of a site with this name."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name(name))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA384())
    return request.public_bytes(serialization.Encoding.PEM)


def read_request(path: Path) -> Request:
    """The name and the public key in a certificate request, which is signed with that key."""
    try:
        request = x509.load_pem_x509_csr(read_small(path))
        public = _site_key(request.public_key(), path)
        proven = request.is_signature_valid and isinstance(
            request.signature_hash_algorithm, hashes.SHA256 | hashes.SHA384 | hashes.SHA512
        )
        names = [entry.value for entry in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except DAMAGE:
        raise UserError(f"{path}: not a certificate request in PEM format, or a damaged one") from None
    if not proven:
        raise UserError(f"{path}: not signed with the key it holds; ask the site for a new request")
    if len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"{path}: {len(names)} names (CN), a request must have one")
    return Request(check_name(names[0], str(path)), public)


def _site_key(key: object, path: Path) -> str:
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise UserError(f"{path}: not an ECDSA key on P-384, which a site needs")
    return ssh_public(key)
