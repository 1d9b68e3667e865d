"""The folders of sites and of the coordinator: made whole, read strictly, and changed by their commands."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedc2i.cli import coordinator as coordinator_command
from fedc2i.cli import site as site_command
from fedc2i.core.errors import UserError
from fedc2i.core.options import names
from fedc2i.data.federation import Federation
from fedc2i.deploy import coordinator_folder, keys, site_folder, tls
from fedc2i.deploy.coordinator_folder import read_coordinator
from fedc2i.deploy.folder_settings import make_folder
from fedc2i.deploy.site_folder import read_site
from fedc2i.runs.settings import RunSettings
from support.helpers import files_below, write_arrays

APP = typer.Typer()
APP.add_typer(site_command.app, name="site")
APP.add_typer(coordinator_command.app, name="coordinator")
CENTRE = "fed.example.org:9092"


def run(*arguments: object) -> str:
    """What a command prints."""
    result = CliRunner().invoke(APP, list(map(str, arguments)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def problem(*arguments: object) -> str:
    """The one line with which a command refuses."""
    result = CliRunner().invoke(APP, list(map(str, arguments)))
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    assert "\n" not in str(result.exception)
    return str(result.exception)


def refusal(call: Callable[..., object], *arguments: object, **named: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def centre(tmp_path: Path) -> Path:
    coordinator_folder.make_coordinator(tmp_path / "centre", ["fed.example.org", "10.0.0.5"])
    return tmp_path / "centre"


@pytest.fixture
def hospital(tmp_path: Path, centre: Path) -> Path:
    authority = centre / "ca.crt"
    site_folder.make_site(tmp_path / "a", "hospital-a", "arrays:x", CENTRE, authority=authority, check=False)
    return tmp_path / "a"


def test_a_site_is_made(tmp_path: Path, federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    write_arrays(tmp_path / "images", federation)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "deep" / "a"
    common = ("--name", "hospital-a", "--data", "arrays:images", "--coordinator", CENTRE)
    assert "must be named: a, b, c" in problem("site", "init", folder, *common)
    assert "no client 'd', allowed are a, b, c" in problem("site", "init", folder, *common, "--client", "d")
    assert not folder.exists()
    printed = run("site", "init", "deep/a", *common, "--client", "b", "--image-size", "12")
    assert "1 client, 4 classes, images 12x12; train/validation/test: hospital-a 20/0/9" in printed
    assert f"Send {folder / 'hospital-a.csr'} to the coordinator" in printed
    assert f"Put the coordinator's ca.crt into {folder}" in printed
    request = keys.read_request(folder / "hospital-a.csr")
    assert request.name == "hospital-a"
    assert keys.fingerprint(request.public) in printed
    assert (folder / "site.pub").read_text() == f"{request.public} hospital-a\n"
    assert (mode(folder), mode(folder / "site.key")) == (0o700, 0o600)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["hospital-a.csr", "logs", "site.key", "site.pub", "site.toml", "state"]
    )
    assert [path.name for path in folder.parent.iterdir()] == ["a"]
    found = read_site(Path("deep/a"), ready=False)
    assert (found.client, found.coordinator, found.state) == ("b", CENTRE, folder / "state")
    defaults = {own.name: own.default for own in fields(RunSettings) if own.name in names(RunSettings, scope="data")}
    assert found.source == {**defaults, "data": f"arrays:{tmp_path / 'images'}", "image_size": 12}
    monkeypatch.chdir("/")
    assert found.load().names == ("hospital-a",)


def test_a_client_need_not_be_named_if_it_is_the_only_one(tmp_path: Path, federation: Federation) -> None:
    data = write_arrays(tmp_path / "images", federation.select(["b"]))
    _, loaded = site_folder.make_site(tmp_path / "a", "hospital-a", data, CENTRE)
    assert loaded is not None
    assert loaded.samples() == {"hospital-a": {"train": 20, "validation": 0, "test": 9}}


@pytest.mark.parametrize("data", ["digit5:mnist", "hapt:1", "amazon:books", "ham10000"])
def test_the_data_folder_is_stored_absolute(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDC2I_DATA", "benchmarks")
    made, _ = site_folder.make_site(tmp_path / "a", "a", data, CENTRE, check=False)
    assert made == read_site(tmp_path / "a", ready=False)
    assert made.source["data_dir"] == str(tmp_path / "benchmarks")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"name": "../a"}, "not allowed as a site"),
        ({"coordinator": "fed.example.org"}, "no address"),
        ({"coordinator": "0.0.0.0:1"}, "cannot be reached"),
        ({"data": "arrays:nowhere"}, "not a readable directory"),
        ({"data": "elsewhere"}, "'elsewhere' is unknown"),
        ({"scale": "federated"}, "at real sites allowed are client, none"),
        ({"scale": "some"}, "scale must be client | federated | none"),
        ({"rounds": 3}, "'rounds' is no setting of a site's data, allowed are data, target"),
        ({"data": "arrays:~nobody-here/x"}, "does not know"),
        ({"data": "arrays:a\udc80", "check": False}, "no text"),
        ({"authority": Path(__file__).with_name("processes_helpers.py")}, "not a certificate"),
    ],
)
def test_no_site_is_made_of_wrong_arguments(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    named = {"name": "a", "data": "digits:scans", "coordinator": CENTRE, **changed}
    assert reason in refusal(site_folder.make_site, tmp_path / "a", **named)
    assert not any(tmp_path.iterdir())


def full(path: Path, content: bytes) -> int:
    """``Path.write_bytes`` on a disk that has room for the first file only."""
    if path.name == "a.key":
        return len(content)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a.key": b"1", "b.toml": b"2"}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    for taken in ("full", "file"):
        assert "not empty" in refusal(make_folder, tmp_path / taken, files)
    (tmp_path / "empty").mkdir(mode=0o755)
    inside = (tmp_path / "empty").stat().st_ino
    make_folder(tmp_path / "empty", files, ("logs",))
    assert (tmp_path / "empty").stat().st_ino == inside
    assert files_below(tmp_path / "empty") == {".": None, "logs": None, "a.key": b"1", "b.toml": b"2"}
    assert mode(tmp_path / "empty" / "a.key") == 0o600
    before = files_below(tmp_path)
    (tmp_path / "void").mkdir()
    monkeypatch.setattr(Path, "write_bytes", full)
    for place in ("new", "void"):
        assert "cannot be written (No space left on device)" in refusal(make_folder, tmp_path / place, files)
    assert files_below(tmp_path) == before | {"void": None}


def test_reading_a_site(hospital: Path) -> None:
    found = read_site(hospital)
    assert (found.name, found.key, found.authority) == ("hospital-a", hospital / "site.key", hospital / "ca.crt")
    (hospital / "site.key").chmod(0o640)
    assert "chmod 600" in refusal(read_site, hospital)
    (hospital / "site.key").chmod(0o600)
    (hospital / "ca.crt").unlink()
    assert "ca.crt must be put there" in refusal(read_site, hospital)
    (hospital / "site.key").unlink()
    assert "cannot be read (No such file or directory)" in refusal(read_site, hospital)
    assert "`fedc2i site init`" in refusal(read_site, hospital / "nowhere")


SITE = {"name": "a", "data": "digits", "coordinator": CENTRE}
COORDINATOR = {"hosts": ["a.org"], "port": 9092, "bind": "127.0.0.1"}


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("site", {"nmae": "x"}, "unknown setting 'nmae', allowed are name, coordinator, client, policy, data"),
        ("site", {"image_size": "12"}, "'image_size' must be a whole number | none, got '12'"),
        ("site", {"image_size": True}, "'image_size' must be a whole number"),
        ("site", {"data": 3}, "'data' must be text"),
        ("site", {"name": "a/b"}, "not allowed as a site"),
        ("site", {"coordinator": "x"}, "no address"),
        ("site", {"coordinator": None}, "'coordinator' must be text, got nothing"),
        ("coordinator", {"hosts": []}, "at least one"),
        ("coordinator", {"hosts": [1]}, "neither a host name"),
        ("coordinator", {"hosts": "a.org"}, "'hosts' must be list"),
        ("coordinator", {"hosts": ["a.org:1"]}, "neither a host name"),
        ("coordinator", {"port": 0}, "port 0 is out of range"),
        ("coordinator", {"port": 1.0}, "'port' must be a whole number"),
        ("coordinator", {"bind": "a.org"}, "no IP address"),
        ("coordinator", {"key": "x"}, "unknown setting"),
    ],
)
def test_settings_that_are_rejected(tmp_path: Path, kind: str, changed: dict[str, Any], reason: str) -> None:
    values = {**(SITE if kind == "site" else COORDINATOR), **changed}
    path = tmp_path / f"{kind}.toml"
    path.write_text(tomli_w.dumps({name: value for name, value in values.items() if value is not None}))
    message = refusal(read_site if kind == "site" else read_coordinator, tmp_path, ready=False)
    assert reason in message
    assert message.startswith(f"{path}: ")


NAMES = [*site_folder.kinds(), *coordinator_folder.SETTINGS]
VALUES = (
    st.text(max_size=20) | st.integers() | st.booleans() | st.floats() | st.lists(st.text(max_size=5) | st.integers())
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), VALUES).map(tomli_w.dumps) | st.text(max_size=99))
def test_any_settings_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name, read in (("site", read_site), ("coordinator", read_coordinator)):
        (folder / f"{name}.toml").write_bytes(text.encode(errors="surrogatepass"))
        with contextlib.suppress(UserError):
            read(folder, ready=False)


def test_a_coordinator_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "centre"
    printed = run("coordinator", "init", folder, "--host", "Fed.Example.org", "--host", "fd00::5", "--port", "9000")
    assert "ca.crt: authority: valid until" in printed
    assert "server.crt: server certificate for fed.example.org, localhost, fd00::5, 127.0.0.1, ::1: valid" in printed
    assert "for this machine alone" in printed
    found = read_coordinator(folder)
    assert (found.hosts, found.port, found.bind) == (("fed.example.org", "fd00::5"), 9000, "127.0.0.1")
    assert [mode(folder / name) for name in ("", "ca.key", "server.key")] == [0o700, 0o600, 0o600]
    assert "not empty" in problem("coordinator", "init", folder, "--host", "a.org")
    for wrong in (("--host", "a.org:1"), ("--host", "a.org", "--port", "0"), ("--host", "a.org", "--bind", "a.org")):
        problem("coordinator", "init", tmp_path / "other", *wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["centre"]
    assert "PRIVATE" not in printed


def test_what_keeps_a_coordinator_from_starting(centre: Path) -> None:
    (centre / "ca.key").chmod(0o644)
    assert "ca.key: other users can read" in refusal(read_coordinator, centre)
    (centre / "ca.key").unlink()  # kept elsewhere, as it may be
    read_coordinator(centre)
    text = (centre / "coordinator.toml").read_text()
    (centre / "coordinator.toml").write_text(text.replace('bind = "127.0.0.1"', 'bind = "10.0.0.9"'))
    assert "not valid for 10.0.0.9; `fedc2i coordinator renew`" in refusal(read_coordinator, centre)
    (centre / "coordinator.toml").write_text(text.replace('bind = "127.0.0.1"', 'bind = "0.0.0.0"'))
    read_coordinator(centre)
    (centre / "server.key").write_bytes(keys.to_private(keys.new_key(), "PKCS8"))
    assert "does not belong to server.key" in refusal(read_coordinator, centre)
    (centre / "server.key").chmod(0o604)
    assert "server.key: other users can read" in refusal(read_coordinator, centre)
    (centre / "server.crt").unlink()
    assert "server.crt: cannot be read" in refusal(read_coordinator, centre)


def test_sites_are_admitted_listed_and_removed(tmp_path: Path, centre: Path, hospital: Path) -> None:
    request = hospital / "hospital-a.csr"
    assert "No site" in run("coordinator", "sites", centre)
    wrong = problem("coordinator", "admit", centre, request, "--fingerprint", "SHA256:other")
    assert "not admitted" in wrong
    own = read_site(hospital).fingerprint
    printed = run("coordinator", "admit", centre, request, "--fingerprint", own)
    assert printed.splitlines() == [f"hospital-a: {own}", "hospital-a is admitted."]
    assert "already" in run("coordinator", "admit", centre, request)
    assert (centre / "sites" / "hospital-a.pub").read_bytes() == (hospital / "site.pub").read_bytes()
    assert run("coordinator", "sites", centre).split() == ["site", "key", "hospital-a", own]
    common = ("--name", "hospital-a", "--data", "digits", "--coordinator", CENTRE, "--no-check")
    printed = run("site", "init", tmp_path / "again", *common, "--ca", centre / "ca.crt")
    assert printed.startswith("The data was not looked at.\n")
    assert "ca.crt: authority: valid until" in printed
    second = tmp_path / "again" / "hospital-a.csr"
    assert f"admitted with another key, {own}; --replace" in problem("coordinator", "admit", centre, second)
    run("coordinator", "admit", centre, second, "--replace")
    key = keys.read_private(tmp_path / "again" / "site.key")
    for name, reason in (("hospital-b", "as 'hospital-a'"), ("Hospital-A", "as 'hospital-a'")):
        (tmp_path / "b.csr").write_bytes(keys.make_request(key, name))
        assert reason in problem("coordinator", "admit", centre, tmp_path / "b.csr", "--replace")
    (tmp_path / "b.csr").write_bytes(keys.make_request(keys.new_key(), "Hospital-A"))
    assert "more than case" in problem("coordinator", "admit", centre, tmp_path / "b.csr", "--replace")
    assert "cannot be read" in problem("coordinator", "admit", centre, tmp_path / "none.csr")
    assert "not a certificate request" in problem("coordinator", "admit", centre, centre / "ca.crt")
    assert "not allowed as" in problem("coordinator", "remove", centre, "../ca")
    assert "is removed" in run("coordinator", "remove", centre, "hospital-a")
    assert "no site 'hospital-a'" in problem("coordinator", "remove", centre, "hospital-a")
    assert coordinator_folder.admitted(read_coordinator(centre)) == {}


def test_what_does_not_belong_among_the_sites(centre: Path, hospital: Path) -> None:
    own, public = read_coordinator(centre), (hospital / "site.pub").read_bytes()
    for name, content, reason in (
        ("hospital-a.csr", b"", "not a NAME.pub file"),
        ("a.pub", b"nothing", "not a public key"),
        ("a  b.pub", public, "not allowed as"),
    ):
        (own.sites / name).write_bytes(content)
        assert reason in refusal(coordinator_folder.admitted, own)
        (own.sites / name).unlink()
    (own.sites / "a.pub").write_bytes(public)
    (own.sites / "b.pub").write_bytes(public)
    assert "another name as well" in refusal(coordinator_folder.admitted, own)


def test_a_certificate_is_renewed(centre: Path) -> None:
    before, old = (centre / "ca.crt").read_bytes(), (centre / "server.crt").read_bytes()
    assert "fed.example.org, localhost, 10.0.0.5" in run("coordinator", "renew", centre)
    assert (centre / "ca.crt").read_bytes() == before
    assert (centre / "server.crt").read_bytes() != old
    run("coordinator", "renew", centre, "--host", "new.example.org", "--days", "10")
    found = read_coordinator(centre)
    assert found.hosts == ("new.example.org",)
    lines = tls.describe(tls.read_certificate(centre / "server.crt"))
    assert lines[-1] == "warning: the server certificate expires in 10 days"
    assert "days is 0" in problem("coordinator", "renew", centre, "--days", "0")
    (centre / "ca.key").unlink()
    assert "ca.key: cannot be read" in problem("coordinator", "renew", centre)


def test_a_key_is_changed_in_two_steps(centre: Path, hospital: Path) -> None:
    run("coordinator", "admit", centre, hospital / "hospital-a.csr")
    assert "no new key waits" in problem("site", "rotate", hospital, "--confirm")
    before = files_below(hospital)
    printed = run("site", "rotate", hospital)
    following = hospital / "next"
    assert f"Send {following / 'hospital-a.csr'} to the coordinator" in printed
    assert (mode(following), mode(following / "site.key")) == (0o700, 0o600)
    assert before.items() <= files_below(hospital).items()
    assert "waits there already" in problem("site", "rotate", hospital)
    run("coordinator", "admit", centre, following / "hospital-a.csr", "--replace")
    new = files_below(following)
    (following / "hospital-a.csr").replace(hospital / "hospital-a.csr")  # as if it had been interrupted
    run("site", "rotate", hospital, "--confirm")
    after = files_below(hospital)
    assert set(after) == set(before)
    assert {name: after[name] for name in new if name != "."} == {name: new[name] for name in new if name != "."}
    assert mode(hospital / "site.key") == 0o600
    public = keys.ssh_public(keys.read_private(hospital / "site.key").public_key())
    assert coordinator_folder.admitted(read_coordinator(centre)) == {"hospital-a": public}


def test_a_site_is_run_by_one_program_at_a_time(tmp_path: Path) -> None:
    own, _ = site_folder.make_site(tmp_path / "a", "a", "digits", CENTRE, client="Scans", check=False)
    with own.locked(), pytest.raises(UserError, match="this site is running already"), own.locked():
        pass
    with own.locked():
        pass
