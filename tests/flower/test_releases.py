"""After a coordinator fell back to an earlier checkpoint: every different upload that left a site is counted in ε."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr.app")
from fakes import FakeGrid, identity, node  # noqa: F401
from flwr.app import Message
from test_server_app import CrashError, job, look_at_once  # noqa: F401

from fedc2i.core.params import Params
from fedc2i.data.federation import Federation
from fedc2i.deploy.job import Job
from fedc2i.deploy.run_description import understand
from fedc2i.deploy.server_app import run_job
from fedc2i.engine.accountant import epsilon
from fedc2i.flower import site
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.message_format import Answer, Task
from fedc2i.runs.finished_run import read_run

PRIVATE: dict[str, Any] = {"rounds": 5, "clip": 0.3, "noise": 2.0, "evaluate_every": 0}
Released = dict[tuple[int, int], list[Params]]  # by site and round


class Sites:
    """Real sites, each with a folder of its own, and all that ever left them."""

    def __init__(self, federation: Federation, root: Path) -> None:
        self.released: Released = {}
        self.silent: set[tuple[int, int]] = set()  # these sites do not answer these rounds
        self.grid = FakeGrid({})
        for k, client in enumerate(federation.clients):
            home = site.Home(client, federation.classes, root / client.name, torch.device("cpu"))
            app = site.make_app(lambda context, own=home: own, lambda task: understand(task.setup))  # type: ignore[misc]
            self.grid.nodes[k] = node(k, app)
            self.grid.nodes[k].spoil = lambda reply, k=k: self._answered(k, reply)  # type: ignore[misc]
        self.grid.before = self._asked
        self._round: dict[int, int] = {}
        self.crash_at: tuple[int, int] | None = None

    def _asked(self, to: int, message: Message) -> None:
        if "task" in message.content:
            self._round[to] = Task.from_record(message.content)[0].round
            if self.crash_at == (to, self._round[to]):
                self.crash_at = None
                raise CrashError

    def _answered(self, site: int, reply: Message) -> Message | None:
        if "upload" not in reply.content:
            return reply
        number, answer = self._round[site], Answer.from_record(reply.content)
        if (site, number) in self.silent:
            return None
        if answer.upload:
            seen = self.released.setdefault((site, number), [])
            if not any(all(torch.equal(answer.upload[name], own[name]) for name in own) for own in seen):
                seen.append(answer.upload)
        return reply

    def different_uploads(self) -> int:
        """Of the site that released most."""
        by_site = [sum(len(own) for (k, _), own in self.released.items() if k == site) for site in self.grid.nodes]
        return max(by_site)


@pytest.fixture
def sites(make_federation: Callable[..., Federation], tmp_path: Path) -> Sites:
    return Sites(make_federation((12, 9, 7)), tmp_path / "sites")


def quick(out: Path) -> Job:
    return job(out, "fedavg", settings=PRIVATE, policy=Policy(deadline=0.5, poll=0.01))


def lose_the_newest(out: Path) -> None:
    newest = max((out / "checkpoints" / "seed0").glob("*.safetensors"))
    newest.write_bytes(b"")


def run_to_the_end(sites: Sites, out: Path) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    result = run_job(sites.grid, quick(out), said.append)
    again = read_run(out)
    assert again.privacy == result.privacy
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary, said


def crash(sites: Sites, out: Path, site: int, number: int) -> None:
    """The coordinator dies when it asks this site for this round."""
    sites.crash_at = site, number
    with pytest.raises(CrashError):
        run_job(sites.grid, quick(out), lambda line: None)


def test_asked_the_same_again_sites_release_nothing_new(sites: Sites, tmp_path: Path) -> None:
    """Killed within a round, and once with the newest checkpoint lost: the same uploads, bit for bit."""
    crash(sites, tmp_path / "run", 1, 3)
    crash(sites, tmp_path / "run", 2, 4)
    lose_the_newest(tmp_path / "run")
    summary, said = run_to_the_end(sites, tmp_path / "run")
    assert sites.different_uploads() == 5
    assert summary["privacy"]["uploads"] == 5
    assert "asked_again" not in summary
    assert not any("ε counts" in line for line in said)


def test_other_answers_after_a_fallback_are_counted(sites: Sites, tmp_path: Path) -> None:
    """A site that answered round 3 is away when it is done again; what the others do in round 4 is another upload."""
    out = tmp_path / "run"
    crash(sites, out, 2, 4)  # the first two have answered round 4
    lose_the_newest(out)  # of round 3
    sites.silent = {(2, 3)}
    summary, said = run_to_the_end(sites, out)
    assert sites.different_uploads() == 6
    assert summary["privacy"]["uploads"] == 6
    assert summary["privacy"]["epsilon"] == pytest.approx(epsilon(2.0, 6))
    assert summary["asked_again"] == [{"seed": 0, "round": 4, "times": 2}]
    assert "round 4 is asked for again after other answers than before; ε counts it once more" in said
    assert any(line.startswith("finished") for line in said)


def test_without_noise_nothing_is_noted(sites: Sites, tmp_path: Path) -> None:
    wanted = job(tmp_path / "run", "fedavg", settings={**PRIVATE, "noise": 0.0})
    sites.crash_at = 1, 3
    with pytest.raises(CrashError):
        run_job(sites.grid, wanted, lambda line: None)
    assert not list((tmp_path / "run").rglob("asked*"))
