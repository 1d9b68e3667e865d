"""`fedc2i site pending, approve, revoke, renew, audit`: what a person at a site sees and decides."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr.app")
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.deploy import sandbox
from fedc2i.deploy.approval import CodeStore, sha256
from fedc2i.deploy.audit import AuditLog
from fedc2i.deploy.site_folder import make_site
from support.helpers import call, write_arrays

SOURCE = b"import os\nfrom torch import nn\nprint('\x1b[2Jgone')\n"


@pytest.fixture
def site(tmp_path: Path) -> str:
    make_site(tmp_path / "north", "north", "digits", "fed.example.org:9092", check=False)
    return str(tmp_path / "north")


def test_a_file_is_shown_approved_and_revoked(site: str) -> None:
    assert "Nothing waits for approval." in call("site", "pending", site).out
    with pytest.raises(UserError):
        CodeStore(Path(site)).require_approved({"model_a.py": SOURCE}, "coordinator fed.example.org:9092")
    shown = call("site", "pending", site).out
    for part in (
        f"pending: {sha256(SOURCE)} model_a.py, 49 bytes",
        "from: coordinator fed.example.org:9092",
        "imports: os, torch",
        "| import os",
        "may touch: ",
    ):
        assert part in shown
    assert "\x1b" not in shown
    assert call("site", "approve", site, "123").code == 2
    assert call("site", "approve", site, sha256(SOURCE)[:16]).code == 0
    assert f"approved: {sha256(SOURCE)} model_a.py" in call("site", "pending", site).out
    CodeStore(Path(site)).require_approved({"model_a.py": SOURCE}, "")
    assert call("site", "revoke", site, sha256(SOURCE)).code == 0
    events = [(entry["event"], entry["code"]) for entry in AuditLog(Path(site)).entries()]
    assert events == [("approved", {"model_a.py": sha256(SOURCE)}), ("revoked", {"model_a.py": sha256(SOURCE)})]


def test_the_log_is_shown_verified_and_renewed(site: str) -> None:
    log = AuditLog(Path(site))
    told = {"run": "r", "round": 1, "method": "fedavg", "terms": "t", "upload": "u", "noise": 2.0, "outcome": "sent"}
    log.append("task", **told, bytes={"upload/w": 8}, total=8, scores=["trained.accuracy"], epsilon=4.728)
    log.append("task", **{**told, "outcome": "its policy allows no run with attack"})
    shown = call("site", "audit", site).out
    assert "r round 1, fedavg 0.000 MB in 1 tensors, 1 scores, ε so far 4.728" in shown
    assert "refused: its policy allows no run with attack" in shown
    assert "2 lines, unbroken; since the last renewal: 1 runs, 1 uploads, ε = 4.728 at δ = 1e-05" in shown
    assert json.loads(call("site", "audit", site, "--json").out)[0]["bytes"] == {"upload/w": 8}
    assert "since the last time: 1 runs, 1 uploads" in call("site", "renew", site).out
    assert "since the last renewal: 0 runs, 0 uploads, ε = 0 at" in call("site", "audit", site).out
    log.path.write_bytes(log.path.read_bytes().replace(b"4.728", b"0.001"))
    for command in ("audit", "renew"):
        done = call("site", command, site)
        assert done.code == 2
        assert "line 2 does not follow the line before it" in done.err


def test_a_new_site_has_a_policy_that_explains_itself(site: str) -> None:
    text = (Path(site) / "site.toml").read_text()
    assert tomllib.loads(text)["policy"]["scores"] == "without-noise"
    lines = text.partition("[policy]")[2].splitlines()[1:]
    assert all("  # " in line for line in lines if line)


def test_a_site_in_a_folder_of_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="which the process that handles data can read; move the site"):
        sandbox.require_out_of_reach(tmp_path / "north" / "site.key")


def test_secure_aggregation_is_refused_before_anything_starts(
    tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    data, out = write_arrays(tmp_path / "arrays", make_federation((12, 9, 7))), tmp_path / "out"
    local = ("--data", data, "--model", "lenet5", "--secure-aggregation", "--out", str(out))
    shown = call("flower-local", "fedc2i", *local)
    assert "fedc2i: its server needs each site's upload, and secure aggregation shows only the mean" in shown.err
    shown = call("flower-local", "fedavg", "--sites", "2", *local)
    assert "secure aggregation needs 3 sites or more in a round, and there are 2" in shown.err
    assert not out.exists()
    hub = str(tmp_path / "hub")
    call("coordinator", "init", hub, "--host", "localhost")
    for name in ("north", "south"):
        call("site", "init", str(tmp_path / name), "--name", name, "--data", data, "--coordinator", "h:1", "--no-check")
        call("coordinator", "admit", hub, str(tmp_path / name / f"{name}.csr"))
    shown = call("coordinator", "start", hub, "fedavg", "--secure-aggregation")
    assert "secure aggregation needs 3 sites or more in a round, and there are 2" in shown.err
    shown = call("coordinator", "start", hub, "median", "--set", "secure_aggregation=true", "--min-sites", "1")
    assert "secure aggregation" in shown.err
    assert not (tmp_path / "hub" / "runs").exists()


def test_without_flower_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    shown = call("flower-local", "fedc2i", "--rounds", "5")
    assert shown.code == 2
    (line,) = shown.err.splitlines()
    assert "needs Flower: pip install 'fedc2i[flower]', or in a clone pip install -c constraints.txt" in line
