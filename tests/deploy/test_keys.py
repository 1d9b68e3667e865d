"""Keys, requests and certificates: Flower, OpenSSH and TLS accept ours, and we refuse what is not sound."""

from __future__ import annotations

import argparse
import importlib
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

import fedc2i.deploy
from fedc2i.core.errors import UserError
from fedc2i.deploy import keys, tls
from fedc2i.deploy.folder_settings import check_address, check_bind, check_host

KEY = keys.new_key()
REQUEST = keys.make_request(KEY, "hospital-a")
DER = x509.load_pem_x509_csr(REQUEST).public_bytes(serialization.Encoding.DER)
AUTHORITY_KEY, AUTHORITY = tls.new_authority("authority of the tests")
NOW = datetime.now(UTC)
FILE = Path(tempfile.mkdtemp()) / "file"
FILE.touch(mode=0o600)


def file(content: bytes) -> Path:
    """A file with this content, until the next call."""
    FILE.write_bytes(content)
    return FILE


def refusal(call: Callable[..., object], *arguments: object, **named: object) -> str:
    """The one line with which a call refuses."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def csr(key: object, *names: str, algorithm: hashes.HashAlgorithm | None = None) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    signed = builder.sign(key, algorithm)  # type: ignore[arg-type]
    return signed.public_bytes(serialization.Encoding.PEM)


def pem(der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).replace("CERTIFICATE", "CERTIFICATE REQUEST").encode()


def test_flower_reads_the_keys(tmp_path: Path) -> None:
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    (tmp_path / "key").write_bytes(keys.to_private(KEY, "OpenSSH"))
    (tmp_path / "pub").write_text(f"{keys.ssh_public(KEY.public_key())} hospital-a\n")
    arguments = argparse.Namespace(
        auth_supernode_private_key=str(tmp_path / "key"), auth_supernode_public_key=None, superlink=""
    )
    found = _try_setup_client_authentication(arguments)
    assert found is not None
    private, public = found
    assert private.private_numbers() == KEY.private_numbers()
    assert try_load_public_key(tmp_path / "pub") == public_key_to_bytes(public)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_ssh_keygen_agrees(tmp_path: Path) -> None:
    public = keys.ssh_public(KEY.public_key())
    (tmp_path / "site.pub").write_text(f"{public} hospital-a\n")
    (tmp_path / "site.key").touch(mode=0o600)
    (tmp_path / "site.key").write_bytes(keys.to_private(KEY, "OpenSSH"))
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", tmp_path / "site.pub"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[:3] == ["384", keys.fingerprint(public), "hospital-a"]
    derived = subprocess.run(["ssh-keygen", "-y", "-f", tmp_path / "site.key"], capture_output=True, text=True)
    assert derived.stdout.split()[:2] == public.split()


def test_private_keys_in_both_formats() -> None:
    for content in (keys.to_private(KEY, "OpenSSH"), keys.to_private(KEY, "PKCS8")):
        assert keys.read_private(file(content)).private_numbers() == KEY.private_numbers()
    small = ec.generate_private_key(ec.SECP256R1())
    assert "P-384" in refusal(keys.read_private, file(keys.to_private(small, "PKCS8")))
    locked = KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )
    for content in (b"", b"nothing", locked, b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"):
        assert refusal(keys.read_private, file(content)) == f"{FILE}: not a private key without a password"


def test_public_keys() -> None:
    public = keys.ssh_public(KEY.public_key())
    assert keys.read_public(file(f"{public} some comment\n".encode())) == public
    assert "OpenSSH" in refusal(keys.read_public, file(b"ecdsa-sha2-nistp384 AAAA"))
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    line = other.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    assert "P-384" in refusal(keys.read_public, file(line))


def test_request_there_and_back() -> None:
    assert keys.read_request(file(REQUEST)) == ("hospital-a", keys.ssh_public(KEY.public_key()))
    longest = "a" * keys.MOST_LETTERS
    assert keys.read_request(file(keys.make_request(KEY, longest))).name == longest


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a certificate request"),
        (tls.to_pem(AUTHORITY), "not a certificate request"),
        (b"x" * 20_000, "longer than 16,384 bytes"),
        (REQUEST + b"\n" * 20_000, "longer than 16,384 bytes"),
        (csr(ec.generate_private_key(ec.SECP256R1()), "a", algorithm=hashes.SHA256()), "P-384"),
        (csr(rsa.generate_private_key(65537, 2048), "a", algorithm=hashes.SHA256()), "P-384"),
        (csr(ed25519.Ed25519PrivateKey.generate(), "a"), "P-384"),
        (csr(KEY, "a", algorithm=hashes.SHA224()), "not signed"),
        (csr(KEY, algorithm=hashes.SHA384()), "0 names"),
        (csr(KEY, "a", "b", algorithm=hashes.SHA384()), "2 names"),
        (csr(KEY, "../../etc/cron.d/x", algorithm=hashes.SHA384()), "'../../etc/cron.d/x' is not allowed"),
        (csr(KEY, "a\x1b[2Jb\n", algorithm=hashes.SHA384()), r"'a\x1b[2Jb\n' is not allowed"),
        (csr(KEY, "hôpital", algorithm=hashes.SHA384()), r"'h\xf4pital' is not allowed"),
        (csr(KEY, "a" * 61, algorithm=hashes.SHA384()), "at most 60"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_requests_that_are_refused(content: bytes, reason: str) -> None:
    assert reason in refusal(keys.read_request, file(content))


def test_another_key_in_a_request_is_refused() -> None:
    def point(key: ec.EllipticCurvePrivateKey) -> bytes:
        return key.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)

    stolen = DER.replace(point(KEY), point(keys.new_key()))
    assert stolen != DER
    assert "not signed" in refusal(keys.read_request, file(pem(stolen)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(DER) - 1), st.integers(1, 255))
def test_no_byte_of_a_request_can_be_changed(place: int, change: int) -> None:
    changed = bytearray(DER)
    changed[place] ^= change
    refusal(keys.read_request, file(pem(bytes(changed))))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300) | st.binary(max_size=300).map(pem))
def test_garbage_is_refused_in_one_line(content: bytes) -> None:
    for read in (keys.read_request, keys.read_public, keys.read_private, tls.read_certificate):
        refusal(read, file(content))


def test_names_that_are_refused() -> None:
    for name in ("", ".", "..", "-x", "a/b", "a  b", " a", "a ", "a\n", "ä", "a" * 61, ".hidden"):
        assert "not allowed as a site" in refusal(keys.make_request, KEY, name)


def test_hosts_and_addresses() -> None:
    kept = {"Fed.Example.org": "fed.example.org", "10.0.0.5": "10.0.0.5", "FD00:0:0::1": "fd00::1", "node_1": "node_1"}
    assert {host: check_host(host) for host in kept} == kept
    wrong = ["", "a:1", "https://a", "*.a.org", "a..b", "10.0.0.300", "0.0.0.0", "::", "fe80::1%eth0", "ä.org"]
    for host in (*wrong, "a" * 64):
        refusal(check_host, host)
    for address in ("fed.example.org:9092", "[fd00::1]:1"):
        check_address(address)
    for address in ("", "a", "a:", ":1", "a:0", "a:65536", "a:1:2", "fd00::1", "https://a:1", "a:1/x", "a:١"):
        refusal(check_address, address)
    assert check_bind("0.0.0.0") == "0.0.0.0"
    refusal(check_bind, "fed.example.org")


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """A TLS handshake in memory, with a server that the client calls by this name."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server, server_hostname=name)]
    ends += [server.wrap_bio(to_server, to_client, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


def test_a_real_handshake(tmp_path: Path) -> None:
    certificate = tls.server_certificate(AUTHORITY_KEY, AUTHORITY, KEY.public_key(), ["fed.example.org", "10.0.0.5"])
    (tmp_path / "server.crt").write_bytes(tls.to_pem(certificate))
    (tmp_path / "server.key").write_bytes(keys.to_private(KEY, "PKCS8"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    default = ssl.create_default_context(cadata=tls.to_pem(AUTHORITY).decode("ascii"))
    default.verify_flags |= ssl.VERIFY_X509_STRICT
    flower = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as Flower's clients make theirs
    flower.load_verify_locations(cadata=tls.to_pem(AUTHORITY).decode("ascii"))
    stranger = tls.new_authority("authority of the tests")[1]
    other = ssl.create_default_context(cadata=tls.to_pem(stranger).decode("ascii"))
    for name in ("fed.example.org", "10.0.0.5", "localhost", "127.0.0.1", "::1"):
        handshake(server, default, name)
        handshake(server, flower, name)
    for name in ("example.org", "10.0.0.6"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(server, default, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, other, "localhost")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_agrees(tmp_path: Path) -> None:
    certificate = tls.server_certificate(AUTHORITY_KEY, AUTHORITY, KEY.public_key(), ["fed.example.org"])
    for name, content in (
        ("ca.crt", tls.to_pem(AUTHORITY)),
        ("server.crt", tls.to_pem(certificate)),
        ("a.csr", REQUEST),
    ):
        (tmp_path / name).write_bytes(content)
    strict = ["openssl", "verify", "-x509_strict", "-check_ss_sig", "-CAfile", "ca.crt"]
    for command in (
        [*strict, "ca.crt"],
        [*strict, "-purpose", "sslserver", "-verify_hostname", "fed.example.org", "server.crt"],
        ["openssl", "req", "-in", "a.csr", "-verify", "-noout"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_certificates_end() -> None:
    server = tls.server_certificate(AUTHORITY_KEY, AUTHORITY, KEY.public_key(), ["a.org"], now=NOW)
    assert tls.read_certificate(file(tls.to_pem(server))) == server
    assert tls.hosts_of(server) == ("a.org", "localhost", "127.0.0.1", "::1")
    assert tls.hosts_of(AUTHORITY) == ()
    for days, words, warning in (
        (0, "(397 days left)", ""),
        (366, "(31 days left)", ""),
        (370, "(27 days left)", "expires in 27 days"),
        (400, "(-3 days left)", "has expired"),
    ):
        lines = tls.describe(server, NOW + timedelta(days=days))
        assert words in lines[0]
        assert [line for line in lines if "warning" in line] == [f"warning: the server certificate {warning}"] * bool(
            warning
        )
    assert tls.describe(AUTHORITY)[0].startswith("authority: valid until ")
    last = tls.server_certificate(AUTHORITY_KEY, AUTHORITY, KEY.public_key(), ["a"], now=NOW + timedelta(days=3600))
    assert last.not_valid_after_utc <= AUTHORITY.not_valid_after_utc
    late = NOW + timedelta(days=3653)
    assert "expired" in refusal(tls.server_certificate, AUTHORITY_KEY, AUTHORITY, KEY.public_key(), ["a"], now=late)


def test_a_server_that_sites_would_refuse() -> None:
    server = tls.server_certificate(AUTHORITY_KEY, AUTHORITY, KEY.public_key(), ["a.org"])
    tls.check_server([AUTHORITY], server, KEY, ["a.org", "127.0.0.1"])
    stranger = tls.new_authority("authority of the tests")[1]
    assert "server.key" in refusal(tls.check_server, [AUTHORITY], server, keys.new_key(), ["a.org"])
    assert "not signed by" in refusal(tls.check_server, [stranger], server, KEY, ["a.org"])
    assert "not valid for b.org" in refusal(tls.check_server, [AUTHORITY], server, KEY, ["a.org", "b.org"])
    for days in (-1, 398):
        assert "not today" in refusal(tls.check_server, [AUTHORITY], server, KEY, (), NOW + timedelta(days=days))
    assert "authority" in refusal(tls.read_certificate, file(tls.to_pem(server)), authority=True)
    assert "ca.key" in refusal(tls.server_certificate, KEY, AUTHORITY, KEY.public_key(), ["a"])


@pytest.mark.parametrize("module", ["keys", "tls", "site_folder", "coordinator_folder"])
def test_without_cryptography_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name.startswith("fedc2i.deploy.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(fedc2i.deploy, name.removeprefix("fedc2i.deploy."), raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert "pip install 'fedc2i[flower]'" in refusal(importlib.import_module, f"fedc2i.deploy.{module}")
