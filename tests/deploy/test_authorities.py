"""A change of the coordinator's authority: sites that trust both connect before, between and after."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
from fedc2i.core.errors import UserError
from fedc2i.deploy import coordinator_folder, tls
from fedc2i.deploy.coordinator_folder import CoordinatorFolder, make_coordinator, read_coordinator
from fedc2i.deploy.site_folder import make_site, read_site


@pytest.fixture
def own(tmp_path: Path) -> CoordinatorFolder:
    return make_coordinator(tmp_path / "hub", ["fed.example.org"])


def connects(trusted: bytes, folder: Path) -> bool:
    """Whether a site that trusts these authorities accepts the coordinator's certificate, over real TLS."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cadata=trusted.decode())
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(ours, server_hostname="fed.example.org").close()
    except ssl.SSLCertVerificationError:
        return False
    finally:
        ours.close()
        thread.join()
    return True


def test_sites_connect_before_between_and_after(own: CoordinatorFolder) -> None:
    first = own.authority.read_bytes()
    coordinator_folder.rotate(own)
    both = own.authority.read_bytes()
    assert len(tls.read_authorities(own.authority)) == 2
    read_coordinator(own.folder)  # it can start
    assert connects(first, own.folder)
    assert connects(both, own.folder)
    coordinator_folder.renew(own)  # still by the first
    assert connects(first, own.folder)
    coordinator_folder.confirm(own)
    last = own.authority.read_bytes()
    read_coordinator(own.folder)
    assert [connects(trusted, own.folder) for trusted in (first, both, last)] == [False, True, True]
    coordinator_folder.renew(own)
    assert [connects(trusted, own.folder) for trusted in (first, both, last)] == [False, True, True]
    assert len(tls.read_authorities(own.authority)) == 1
    assert (own.folder / "ca.key").stat().st_mode & 0o777 == 0o600
    assert not (own.folder / "next-ca.key").exists()
    coordinator_folder.rotate(own)  # and once more
    coordinator_folder.confirm(own)
    assert connects(own.authority.read_bytes(), own.folder)


def test_each_step_is_taken_once(own: CoordinatorFolder) -> None:
    with pytest.raises(UserError, match="no next authority waits"):
        coordinator_folder.confirm(own)
    coordinator_folder.rotate(own)
    before = own.authority.read_bytes()
    with pytest.raises(UserError, match="holds the next authority already"):
        coordinator_folder.rotate(own)
    assert own.authority.read_bytes() == before


@pytest.mark.parametrize("files", [1, 2], ids=["after the certificate", "after the key"])
def test_a_confirmation_that_was_interrupted_is_repeated(
    own: CoordinatorFolder, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator_folder.rotate(own)
    both = own.authority.read_bytes()
    real, written = coordinator_folder.write_atomically, list[Path]()

    def once(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) == files and files == 2:
            raise KeyboardInterrupt
        real(path, content)
        if len(written) == files:
            raise KeyboardInterrupt

    monkeypatch.setattr(coordinator_folder, "write_atomically", once)
    with pytest.raises(KeyboardInterrupt):
        coordinator_folder.confirm(own)
    monkeypatch.undo()
    read_coordinator(own.folder)  # it can start in this state, too
    assert connects(both, own.folder)
    coordinator_folder.confirm(own)
    assert connects(own.authority.read_bytes(), own.folder)
    assert connects(both, own.folder)


def test_an_authority_that_expired_is_replaced_by_the_next(
    own: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one in use may have expired: sites accept the certificate of the next one alone."""
    monkeypatch.setattr(tls, "AUTHORITY_DAYS", -1)
    monkeypatch.setattr(tls, "SKEW", 3 * tls.SKEW * 24)
    key, expired = tls.new_authority("expired")
    monkeypatch.undo()
    from fedc2i.deploy import keys

    own.authority.write_bytes(tls.to_pem(expired))
    (own.folder / "ca.key").write_bytes(keys.to_private(key, "PKCS8"))
    with pytest.raises(UserError, match=r"has expired; `fedc2i coordinator rotate`"):
        coordinator_folder.renew(own)
    coordinator_folder.rotate(own)
    coordinator_folder.confirm(own)
    read_coordinator(own.folder)
    assert connects(own.authority.read_bytes(), own.folder)


def test_a_site_takes_a_file_with_two_authorities(own: CoordinatorFolder, tmp_path: Path) -> None:
    coordinator_folder.rotate(own)
    where = {"coordinator": "fed.example.org:9092", "authority": own.authority, "check": False}
    made, _ = make_site(tmp_path / "north", "north", "digits", **where)  # type: ignore[arg-type]
    assert made.authority.read_bytes() == own.authority.read_bytes()
    read_site(tmp_path / "north")
    made.authority.write_bytes(3 * own.authority.read_bytes())
    with pytest.raises(UserError, match="has 6 certificates"):
        read_site(tmp_path / "north")
    made.authority.write_bytes(own.authority.read_bytes() + (own.folder / "server.crt").read_bytes())
    with pytest.raises(UserError, match="has 3 certificates"):
        read_site(tmp_path / "north")
