"""What code from a coordinator can do at a site: nothing before a person approves it, and little after that."""

from __future__ import annotations

import io
import os
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr.app")
from fakes import identity, look_at_once  # noqa: F401
from guarded_sites import SITES, GuardedSites, quick  # noqa: F401

from fedc2i import Federation, UserError
from fedc2i.deploy import approval, sandbox
from fedc2i.deploy.approval import CodeStore
from fedc2i.deploy.audit import AuditLog
from fedc2i.deploy.policy import SitePolicy
from fedc2i.flower import compat
from fedc2i.methods.base import method_names

sandboxed = pytest.mark.skipif(bool(sandbox.missing()), reason=f"no {sandbox.missing()}")

CACHE = "os.environ.get('TORCHINDUCTOR_CACHE_DIR', '')"  # that torch makes when its compiler is imported
HONEST = """
import torch
import fedc2i


def build(classes, shape):
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0] * shape[1] * shape[2], 8))
    return fedc2i.split(torch.nn.Sequential(body, torch.nn.Linear(8, classes)), head="1")
"""

# At the coordinator the same file is harmless: it looks where it lies.
EVIL = (
    HONEST
    + """
import os, socket, subprocess, sys
from pathlib import Path

here = Path(__file__).parent
if here.name == "plugins":
    site = next(path for path in here.parents if (path / "site.pub").parent.name in ("north", "south"))
    other = site.parent / {"north": "south", "south": "north"}[site.name]
    attempts = {
        "key": lambda: (site / "site.key").read_bytes(),
        "mode of key": lambda: (site / "site.key").chmod(0o644),
        "noise key": lambda: (site / "state" / "noise.key").read_bytes(),
        "policy": lambda: (site / "site.toml").write_text("x"),
        "log": lambda: (site / "audit.log").open("ab"),
        "evidence": lambda: next((site / "code" / "approved").glob("*")).write_text("x"),
        "approval": lambda: (site / "code" / "approved" / "x.py").write_text("x"),
        "itself": lambda: Path(__file__).write_text("x"),
        "beside itself": lambda: (here / "x.py").write_text("x"),
        "package": lambda: (Path(fedc2i.__file__).parent / "evil.py").write_text("x"),
        "neighbour": lambda: os.listdir(other),
        "home": lambda: os.listdir(Path.home()),
        "network": lambda: socket.create_connection(("127.0.0.1", 9)),
        "local service": lambda: socket.socket(socket.AF_UNIX),
        "program": lambda: subprocess.run(["true"], check=True),
        "process": lambda: os.fork(),
        "signal": lambda: os.kill(os.getppid(), 0),
        "memory of parent": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
    }
    done = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except (OSError, StopIteration, subprocess.SubprocessError):
            pass
        else:
            done.append(name)
    raise RuntimeError(f"reached: {done} of {len(attempts)}")
"""
)


@pytest.fixture
def sites(tmp_path: Path, make_federation: Callable[..., Federation]) -> GuardedSites:
    return GuardedSites(tmp_path, make_federation((12, 9, 7)))


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return f"{folder / name}:build"


def approve_everywhere(sites: GuardedSites) -> None:
    for name in SITES:
        store = CodeStore(sites.folder / name)
        (entry,) = store.pending()
        store.approve(entry.hash[:12], "a test")


def test_code_from_a_file_runs_only_after_approval_and_is_unpacked_afresh(
    sites: GuardedSites, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, "mine.py", f"{HONEST}\nimport os\nprint('executed', os.path.isdir({CACHE}))")
    with pytest.raises(UserError, match="sites"):
        sites.run(model=model)
    waiting = "code from a file runs here only after a person has approved it: model_mine.py"
    assert any(waiting in line for line in sites.said)
    told = capfd.readouterr().out
    assert f"fedc2i site: {waiting}" in told
    assert "approved code" not in told
    (entry,) = CodeStore(tmp_path / "north").pending()
    assert entry.name == "model_mine.py"
    assert entry.imports((tmp_path / "mine.py").read_bytes()) == ["fedc2i", "os", "torch"]
    assert entry.sender.startswith("coordinator localhost:9092")
    approve_everywhere(sites)
    sites.run("other", model=model)
    assert "approved code: executed True" in capfd.readouterr().out
    assert list((tmp_path / "north" / "code" / "unpacked").iterdir()) == []
    written(tmp_path, "mine.py", f"{HONEST}\n# another byte")
    with pytest.raises(UserError):
        sites.run("third", model=model)
    assert [entry.name for entry in CodeStore(tmp_path / "north").pending()] == ["model_mine.py"]


@sandboxed
def test_approved_code_reaches_neither_key_nor_log_nor_network(
    sites: GuardedSites, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, "evil.py", EVIL)
    with pytest.raises(UserError):
        sites.run(model=model)
    approve_everywhere(sites)
    before = {path: path.read_bytes() for path in (tmp_path / "north" / "code").rglob("*.*") if path.is_file()}
    with pytest.raises(UserError):
        sites.run("other", model=model)
    refusals = [line for line in sites.said if "reached" in line]
    assert refusals
    assert all("reached: [] of 18" in line for line in refusals), refusals
    assert {path: path.read_bytes() for path in before} == before
    assert "reached: [] of 18" in AuditLog(tmp_path / "north").entries()[-1]["outcome"]


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in method_names() if name not in ("pooled", "fedbn")])
def test_every_method_runs_in_the_sandbox(
    method: str, tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    policy = SitePolicy(class_counts=True, prototypes=True)
    found = GuardedSites(tmp_path, make_federation((12, 9, 7)), policy).run(method=method)
    assert {report.round for report in found.rounds} == {1, 2}


def repacked(bundle: bytes, **changes: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(bundle)) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.namelist():
            if entry not in changes:
                new.writestr(entry, old.read(entry))
        for entry, text in changes.items():
            new.writestr(entry, text)
    return made.getvalue()


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("fedc2i_app/client_app.py", "raise SystemExit"),
        ("fedc2i_app/extra.py", ""),
        ("fedc2i_app/plugins/../client_app.py", "raise SystemExit"),
        ("fedc2i_app/plugins/other.py", ""),
        ("fedc2i_app/plugins/model_a/b.py", ""),
        ("pyproject.toml", "[project]"),
        ("/etc/x", ""),
    ],
)
def test_an_app_that_is_not_the_installed_one_is_refused(place: str, text: str) -> None:
    honest = compat.bundle(approval.APP)
    assert approval.own_files_in(honest) == {}
    with pytest.raises(UserError, match="not the one installed at this site"):
        approval.own_files_in(repacked(honest, **{place: text}))


def test_an_app_that_is_no_archive_or_far_too_large_is_refused() -> None:
    honest = compat.bundle(approval.APP)
    for wrong in (b"", b"PK", honest[:-30], honest[:200]):
        with pytest.raises(UserError, match="cannot be read"):
            approval.own_files_in(wrong)
    nameless = repacked(honest, **{"?.py": ""}).replace(b"?.py", b"\0.py")  # a name ends at its first zero
    with pytest.raises(UserError, match="not the one installed at this site"):
        approval.own_files_in(nameless)
    with pytest.raises(UserError, match="more than 4,194,304 bytes"):
        approval.own_files_in(repacked(honest, **{"fedc2i_app/plugins/model_a.py": " " * 5_000_000}))


def test_another_app_is_never_executed(sites: GuardedSites, tmp_path: Path) -> None:
    other = repacked(compat.bundle(approval.APP), **{"fedc2i_app/client_app.py": f"open({str(tmp_path / 'x')!r}, 'w')"})
    with pytest.raises(UserError):
        sites.run(bundle=other)
    assert not (tmp_path / "x").exists()
    assert any("the run's app is not the one installed at this site" in line for line in sites.said)


def test_an_approval_is_of_one_content(tmp_path: Path) -> None:
    store = CodeStore(tmp_path)
    with pytest.raises(UserError, match=r"model_a\.py"):
        store.require_approved({"model_a.py": b"a"}, "someone")
    (entry,) = store.pending()
    for wrong in (entry.hash[:11], "", "f" * 64):
        with pytest.raises(UserError, match="at least 12 digits"):
            store.approve(wrong, "me")
    assert store.approve(entry.hash.upper()[:12], "me").decided.endswith("by me")
    store.require_approved({"model_b.py": b"a"}, "someone else")
    path = tmp_path / "code" / "approved" / f"{entry.hash}.py"
    path.write_bytes(b"b")  # changed on the disk
    with pytest.raises(UserError, match="approved"):
        store.require_approved({"model_a.py": b"a"}, "someone")
    store.revoke(entry.hash)
    assert not store.approved() + store.pending()


def test_what_a_killed_site_left_is_removed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with approval.unpacked({"model_a.py": b"a"}, tmp_path) as folder:
            if (folder / "plugins" / "model_a.py").stat().st_mode & 0o777 == 0o400:
                os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert list((tmp_path / "code" / "unpacked").rglob("model_a.py"))
    approval.clear_unpacked(tmp_path)
    assert not list((tmp_path / "code" / "unpacked").iterdir())


def test_files_that_wait_do_not_fill_the_disk(tmp_path: Path) -> None:
    store = CodeStore(tmp_path)
    for number in range(approval.MOST_PENDING):
        with pytest.raises(UserError, match="approved"):
            store.require_approved({"model_a.py": str(number).encode()}, "someone")
    with pytest.raises(UserError, match="takes no more"):
        store.require_approved({"model_a.py": b"one more"}, "someone")
    assert len(store.pending()) == approval.MOST_PENDING
