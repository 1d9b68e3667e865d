"""``fedc2i coordinator contribution`` over real processes on loopback, with the data of hospitals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr.app")
import fedc2i
from fedc2i.deploy import keys
from fedc2i.deploy.child_process import free_port
from fedc2i.deploy.coordinator_folder import admit, make_coordinator
from fedc2i.deploy.policy import SitePolicy
from fedc2i.deploy.site_folder import make_site

PROGRAM = (sys.executable, "-m", "fedc2i")
AGREEING = ("Switzerland", "Long Beach")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*PROGRAM, *words], capture_output=True, text=True, timeout=600, env=environment, stdin=subprocess.DEVNULL
    )


@contextmanager
def started(folder: Path) -> Iterator[None]:
    with (folder / "out.txt").open("w") as log:
        running = subprocess.Popen([*PROGRAM, "site", "start", str(folder)], stdout=log, stderr=log)
        try:
            yield
        finally:
            running.terminate()
            running.wait(60)


@pytest.fixture
def coordinator(tmp_path: Path) -> Path:
    """Its folder, with three admitted hospitals beside it, of which two agree."""
    own = make_coordinator(tmp_path / "coordinator", ["localhost"], free_port())
    address, authority = f"127.0.0.1:{own.port}", own.authority
    for name in (*AGREEING, "Hungary"):
        folder, policy = tmp_path / name.replace(" ", "-"), SitePolicy(contribution=name in AGREEING)
        site, _ = make_site(
            folder, folder.name, "heart", address, client=name, authority=authority, check=False, policy=policy
        )
        admit(own, keys.read_request(site.request))
    return own.folder


@pytest.mark.slow
def test_contribution_of_real_hospitals(coordinator: Path) -> None:
    words = ("coordinator", "contribution", str(coordinator), "fedc2i", "--rounds", "2", "--seeds", "0,1", "--json")
    with ExitStack() as sites:
        for name in ("Switzerland", "Long-Beach", "Hungary"):
            sites.enter_context(started(coordinator.parent / name))
        unasked = command(*words)
        assert unasked.returncode == 2
        assert "2 runs over some of them, with 2 seeds and 2 rounds: 8 rounds" in unasked.stderr
        assert "B up and " in unasked.stderr
        assert unasked.stderr.splitlines()[-1].endswith("error: nobody is there to answer; --yes starts without asking")
        done = command(*words, "--yes")
        assert done.returncode == 0, done.stderr
    assert "Hungary takes no part: by its policy" in done.stderr
    found = json.loads(done.stdout)
    assert found["clients"] == ["Long-Beach", "Switzerland"]
    assert any("intervals are over seeds only" in note for note in found["notes"])
    rows = {(row["measure"], row["giver"], row["receiver"], row["metric"], row["point"]): row for row in found["rows"]}
    gain = rows["gain", "", "Switzerland", "loss", "trained"]["value"]
    given = rows["shapley", "Long-Beach", "Switzerland", "loss", "trained"]["value"]
    assert given == pytest.approx(gain)
    results = [
        fedc2i.run(method, "heart:switzerland,va", rounds=2, seeds=(0, 1), device="cpu")
        for method in ("local", "fedc2i")
    ]
    alone, together = (own.accuracy("trained", "loss")[:, 0].mean() for own in results)
    assert gain == pytest.approx(alone - together, abs=0.05)  # names, and so random numbers, are others
    out = coordinator / "runs" / "contribution-fedc2i"
    assert {path.name for path in (out / "coalitions").iterdir()} == {"everyone", "local"}
    again = command(*words)  # nothing is left to run, so nobody is asked
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
    page = command("report", str(out / "coalitions" / "everyone"), "--out", str(coordinator.parent / "report.html"))
    assert page.returncode == 0, page.stderr
    audit = (coordinator.parent / "Switzerland" / "audit.log").read_text()
    assert '"contribution": true' in audit or '"contribution":true' in audit
    assert '"task"' not in (coordinator.parent / "Hungary" / "audit.log").read_text()
