"""What stays at the coordinator after a run: no models in the SuperLink's database, and a run folder of its own."""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from fedc2i.cli.main import main
from fedc2i.core.errors import UserError
from fedc2i.deploy import superlink
from fedc2i.flower import compat
from fedc2i.flower.compat import _MESSAGES, erase_messages


def database(path: Path) -> sqlite3.Connection:
    """Flower's own tables, with its way of writing them."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.superlink.federation import NoOpFederationManager

    state = SqlLinkState(str(path), NoOpFederationManager(), None)  # type: ignore[arg-type]
    state.initialize()
    found = sqlite3.connect(path, isolation_level=None)
    found.execute("PRAGMA journal_mode = WAL")
    found.execute("PRAGMA wal_autocheckpoint = 0")
    found.execute("PRAGMA secure_delete = OFF")
    return found


def holding(folder: Path, what: bytes) -> list[str]:
    return [path.name for path in sorted(folder.iterdir()) if what in path.read_bytes()]


def test_no_bytes_of_models_stay_in_the_database(tmp_path: Path) -> None:
    path = tmp_path / "superlink.db"
    found = database(path)
    tables = {name for (name,) in found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert {"objects", "message_ins", "message_res", "node"} <= tables
    assert set(_MESSAGES) & tables == set(_MESSAGES), "Flower has other tables than this version of compat.py knows"
    models = [os.urandom(50_000) for _ in range(4)]
    for k, model in enumerate(models):
        found.execute("INSERT INTO objects (object_id, content, is_available) VALUES (?, ?, 1)", (f"o{k}", model))
    found.execute("PRAGMA wal_checkpoint(FULL)")
    found.execute("DELETE FROM objects WHERE object_id IN ('o0', 'o1')")  # as Flower does when a message was fetched
    found.execute("INSERT INTO objects (object_id, content, is_available) VALUES ('late', ?, 1)", (models[0][::-1],))
    pieces = [own[1000:1200] for own in (*models, models[0][::-1])]
    found.execute("CREATE TABLE kept (value TEXT)")
    found.execute("INSERT INTO kept VALUES ('a node')")
    assert all(holding(tmp_path, piece) for piece in pieces), "the rows of some are deleted, their bytes are there"
    # The SuperLink was killed: its write-ahead log is there, and nobody is connected.
    copy = tmp_path / "after"
    copy.mkdir()
    for file in tmp_path.glob("superlink.db*"):
        (copy / file.name).write_bytes(file.read_bytes())
    found.close()
    erase_messages(copy / "superlink.db")
    assert not [piece for piece in pieces if holding(copy, piece)]
    again = sqlite3.connect(copy / "superlink.db")
    assert again.execute("SELECT value FROM kept").fetchall() == [("a node",)]
    assert again.execute("SELECT count(*) FROM objects").fetchone() == (0,)
    again.close()


def test_a_database_that_is_damaged_or_absent(tmp_path: Path) -> None:
    erase_messages(tmp_path / "superlink.db")
    assert not list(tmp_path.iterdir())
    (tmp_path / "superlink.db").write_bytes(b"no database" * 999)
    with pytest.raises(UserError, match="its messages cannot be erased"):
        erase_messages(tmp_path / "superlink.db")


def in_use(path: Path) -> sqlite3.Connection:
    """A database with a model in it, to which a process is connected."""
    found = sqlite3.connect(path, isolation_level=None)
    found.execute("PRAGMA journal_mode = WAL")
    found.execute("CREATE TABLE objects (content TEXT)")
    found.execute("INSERT INTO objects VALUES ('model')")
    return found


def test_a_superlink_that_is_about_to_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, waits = in_use(tmp_path / "superlink.db"), list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            found.close()

    monkeypatch.setattr(compat.time, "sleep", wait)
    erase_messages(tmp_path / "superlink.db")
    assert len(waits) == 3
    assert not holding(tmp_path, b"model")


def test_a_database_that_remains_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_use(tmp_path / "superlink.db")
    monkeypatch.setattr(compat, "_PATIENCE", 0.0)
    with pytest.raises(UserError, match=r"its messages cannot be erased \(database is locked\)"):
        erase_messages(tmp_path / "superlink.db")
    found.close()


@pytest.mark.parametrize("out", [False, True])
def test_the_run_folder_of_a_coordinator_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: bool
) -> None:
    from fedc2i.deploy import coordinator_folder, keys
    from fedc2i.deploy.site_folder import make_site

    own = coordinator_folder.make_coordinator(tmp_path / "hub", ["localhost"])
    for name in ("north", "south"):
        site, _ = make_site(tmp_path / name, name, "digits", "localhost:9092", check=False)
        coordinator_folder.admit(own, keys.read_request(site.request))

    def stop(*_: object) -> None:
        raise UserError("as far as this test goes")

    monkeypatch.setattr(superlink, "open_superlink", stop)
    words = ["coordinator", "start", str(tmp_path / "hub"), "fedavg"]
    words += ["--out", str(tmp_path / "mine")] if out else []
    monkeypatch.setattr(sys, "argv", ["fedc2i", *words])
    before = os.umask(0)
    try:
        with pytest.raises(SystemExit):
            main()
    finally:
        os.umask(before)
    assert "as far as this test goes" in capsys.readouterr().err
    (folder,) = [tmp_path / "mine"] if out else (tmp_path / "hub" / "runs").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
