"""The folders of a federation on one machine, and a run in them that was cut off; no process is started here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr.app")
from typer.testing import CliRunner

from fedc2i import Federation
from fedc2i.cli.flower_local import is_local
from fedc2i.cli.main import app
from fedc2i.core.errors import UserError
from fedc2i.deploy.coordinator_folder import read_coordinator
from fedc2i.deploy.job import Job
from fedc2i.deploy.local_federation import clear, read_job, set_up
from fedc2i.deploy.site_folder import read_site
from support.helpers import write_arrays


@pytest.fixture
def begun(tmp_path: Path, make_federation: Callable[..., Federation]) -> Job:
    """A run over clients a and b of some arrays, set up and not started."""
    data = write_arrays(tmp_path / "arrays", make_federation((12, 9, 7)))
    return set_up(Job(tmp_path / "run", "fedavg", {"rounds": 2}), data, ("a", "b"))


def test_everything_that_a_cut_off_run_needs_lies_in_its_folder(begun: Job, tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "moved")
    assert is_local(tmp_path / "moved")
    job = read_job(tmp_path / "moved")
    assert (job.out, job.sites, job.settings) == (tmp_path / "moved", ("a", "b"), {"rounds": 2})
    assert job.digest == begun.digest
    folder = job.out / job.local
    assert read_coordinator(folder / "coordinator").bind == "127.0.0.1"
    own = [read_site(folder / "sites" / name).load().clients[0] for name in job.sites]
    assert [(one.name, len(one.train)) for one in own] == [("a", 12), ("b", 9)]
    assert (folder / "sites" / "a").stat().st_mode & 0o777 == 0o700
    clear(job)
    assert not folder.exists()


def test_folders_that_are_to_be_kept_lie_elsewhere_and_stay(begun: Job, tmp_path: Path) -> None:
    site = read_site(begun.out / begun.local / "sites" / "a")
    kept = set_up(Job(tmp_path / "other", "fedavg"), site.source["data"], ("a",), tmp_path / "kept")
    assert not (tmp_path / "other" / "federation").exists()
    clear(read_job(tmp_path / "other"))
    assert read_site(kept.out / kept.local / "sites" / "a").folder == tmp_path / "kept" / "sites" / "a"


def refused(*words: str) -> str:
    """The line with which a command refuses."""
    done = CliRunner().invoke(app, list(words))
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--set", "checkpoint_seconds=3"), "checkpoint_seconds=3.0 is for engine=inprocess"),
        (("--set", "wire=float8"), "wire must be float32 | float16"),
        (("--sites", "9"), "--sites must be 1..4"),
        (("--sites", "2", "--min-sites", "3"), "--min-sites must be 1..2"),
        (("--set", "partition=dirichlet:10:0.5"), "a site is one client of the data"),
        (("--set", "scale=federated"), "at real sites allowed are client, none"),
    ],
    ids=str,
)
def test_settings_are_checked_before_any_folder_is_made(
    words: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert line in refused("flower-local", "fedavg", *words)
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_gone_on_with_says_what_to_do(begun: Job, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert refused("resume", str(out), "--device", "cpu") == (
        f"{out}: of `fedc2i flower-local`, which has neither --device nor --track"
    )
    (out / "federation").rename(tmp_path / "lost")
    assert refused("resume", str(out)) == (
        f"{out}/federation: the sites' folders and models are missing; run again with another --out"
    )
    (out / "job.json").write_text(json.dumps({"local": "federation"}))
    assert refused("resume", str(out)) == f"{out}/job.json: cannot be read ('out'); run again with another --out"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"local": ""}', "[" * 100_000, "\0"])
def test_other_folders_are_not_taken_for_such_a_run(text: str, tmp_path: Path) -> None:
    assert not is_local(tmp_path)
    (tmp_path / "job.json").write_text(text)
    assert not is_local(tmp_path)
