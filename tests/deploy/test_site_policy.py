"""A site's policy: what it refuses, at both ends, and what it keeps from leaving."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr.app")
from fakes import identity, look_at_once  # noqa: F401
from flwr.app import ConfigRecord, RecordDict
from guarded_sites import GuardedSites, quick  # noqa: F401

from fedc2i import Federation, UserError
from fedc2i.deploy.audit import RENEWED, AuditLog
from fedc2i.deploy.guard import Guard
from fedc2i.deploy.job import Job
from fedc2i.deploy.policy import COMMENTED, OPEN, SitePolicy, Spent
from fedc2i.deploy.run_description import RunTerms, read_terms
from fedc2i.deploy.site_folder import read_site
from fedc2i.deploy.superlink import _app
from fedc2i.deploy.worker import Worker
from fedc2i.engine.accountant import epsilon
from fedc2i.flower import compat
from fedc2i.flower.message_format import GREETING, Answer, Introduction, Task
from fedc2i.runs.finished_run import read_run

TERMS = RunTerms("fedc2i", "lenet5", 0, 20, 1.0, 2.0, "", "{}")
TASK = Task("run", 1, 0, 0, True, False, False, False, "{}")
NOON = datetime(2026, 1, 1, 12, 0)


def test_the_commented_policy_is_the_default_and_names_every_setting() -> None:
    written = tomllib.loads(COMMENTED)["policy"]
    assert set(written) == {own.name for own in fields(SitePolicy)}
    assert SitePolicy.read(written, "here") == SitePolicy() == SitePolicy.read({}, "here")
    assert SitePolicy.read(OPEN.to_toml(), "here") == OPEN


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"nosie": 1.0}, "policy has no 'nosie', allowed are methods"),
        ({"least_noise": "2"}, "policy.least_noise must be a number"),
        ({"least_noise": -1.0}, "least_noise"),
        ({"least_noise": float("nan")}, "least_noise"),
        ({"least_noise": True}, "least_noise"),
        ({"scores": "yes"}, "policy.scores must be"),
        ({"class_counts": 1}, "class_counts"),
        ({"methods": "fedavg"}, "methods"),
        ({"methods": [1]}, "methods"),
        ({"runs": -1}, "runs"),
        ({"runs": 1.5}, "runs"),
        ({"hours": "24:00-06:00"}, "policy.hours must be such as 18:00-06:00"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        SitePolicy.read(values, "site.toml")


@pytest.mark.parametrize(
    ("policy", "terms", "says"),
    [
        ({"methods": ("fedavg", "fedrep")}, {}, "allows the methods fedavg, fedrep, not 'fedc2i'"),
        ({"models": ()}, {}, "allows the models none, not 'lenet5'"),
        ({"largest_clip": 0.5}, {}, "clip of at most 0.5, the run has 1"),
        ({"largest_clip": 0.5}, {"clip": 0.0}, "the run has 0"),
        ({"least_noise": 3.0}, {}, "noise of at least 3, the run has 2"),
        ({}, {"attack": "sign-flip@a"}, "attack"),
        ({}, {"contribution": True, "noise": 0.0}, "nobody measure contributions"),
        ({"contribution": True}, {"contribution": True}, "lets no scores leave"),
        ({"contribution": True, "scores": "never"}, {"contribution": True, "noise": 0.0}, "lets no scores leave"),
        ({"hours": "18:00-06:00"}, {}, "from 18:00 to 06:00, it is 12:00 there"),
        ({"hours": "06:00-12:00"}, {}, "it is 12:00 there"),
        ({"runs": 2}, {}, "allows 2 runs, which are used up"),
        ({"epsilon": 8.0}, {}, "allows ε = 8 in all, and with this upload it would be"),
        ({"epsilon": 8.0}, {"noise": 0.0}, "would be inf"),
        ({}, {"rounds": 0}, "round 1 of a run with 0 rounds"),
    ],
)
def test_tasks_that_are_refused(policy: dict[str, Any], terms: dict[str, Any], says: str) -> None:
    own, spent = SitePolicy(**policy), Spent(("a", "b"), (2.0, 2.0))
    with pytest.raises(UserError, match=says):
        own.check_task(TASK, replace(TERMS, **terms), spent, NOON)


@pytest.mark.parametrize(
    "policy",
    [
        {"methods": ("fedc2i",), "models": ("lenet5",)},
        {"largest_clip": 1.0, "least_noise": 2.0},
        {"hours": "12:00-13:00"},
        {"hours": "11:59-11:58"},
        {"runs": 3},
        {"epsilon": 20.0},
    ],
)
def test_tasks_at_the_limit_are_done(policy: dict[str, Any]) -> None:
    SitePolicy(**policy).check_task(TASK, TERMS, Spent(("a", "b"), (2.0, 2.0)), NOON)


def test_a_site_agrees_to_contributions_if_its_policy_does_and_scores_leave() -> None:
    free = replace(TERMS, contribution=True, noise=0.0)
    SitePolicy(contribution=True).check_task(TASK, free, Spent(), NOON)
    SitePolicy(contribution=True, scores="always").check_task(TASK, replace(free, noise=2.0), Spent(), NOON)
    assert SitePolicy(contribution=True).agrees
    assert not SitePolicy().agrees
    for excluding in ({"scores": "never"}, {"secure_aggregation": 3}, {"least_noise": 1.0}, {"epsilon": 8.0}):
        assert not SitePolicy(contribution=True, **excluding).agrees  # type: ignore[arg-type]


def test_a_run_that_was_begun_is_not_cut_off_by_the_number_of_runs() -> None:
    SitePolicy(runs=2).check_task(TASK, TERMS, Spent(("a", "run")), NOON)


def test_files_need_a_sandbox_and_no_promise_of_noise() -> None:
    SitePolicy().check_code(["model_a.py"], [])
    SitePolicy(files="never", least_noise=1.0).check_code([], ["Landlock"])
    SitePolicy(sandbox="optional").check_code(["model_a.py"], ["Landlock"])
    for policy, lacks, says in (
        (SitePolicy(files="never"), [], "no method or model from a file"),
        (SitePolicy(least_noise=1.0), [], "could leave out"),
        (SitePolicy(), ["Landlock"], "lacks Landlock"),
    ):
        with pytest.raises(UserError, match=says):
            policy.check_code(["model_a.py"], lacks)


def test_what_may_not_leave_does_not() -> None:
    scores = {"trained": {"accuracy": 50.0}}
    plain = Answer({"head.weight": torch.ones(3)}, {}, scores, 12)
    assert SitePolicy().filtered(plain, 0.0) == plain
    assert SitePolicy().filtered(plain, 1.0).metrics == {}
    assert SitePolicy(scores="always").filtered(plain, 1.0) == plain
    assert SitePolicy(scores="never").filtered(plain, 0.0).metrics == {}
    for name, setting in (("class_counts", "class_counts"), ("class_present", "class_counts"), ("prototypes",) * 2):
        answer = Answer({name: torch.ones(3)}, {}, {}, 12)
        with pytest.raises(UserError, match=rf"\({setting}\), the method sends {name}"):
            SitePolicy().filtered(answer, 0.0)
        assert replace(OPEN).filtered(answer, 0.0) == answer
    with pytest.raises(UserError, match=r"allows 1e-05 MB in an answer, this has 1\.2e-05"):
        SitePolicy(largest_upload=1e-5).filtered(plain, 0.0)


def test_settings_are_read_as_the_run_would_read_them() -> None:
    text = '{"settings": {"method": "fedc2i:gamma=2", "model": "lenet5", "noise": "1e0", "clip": 1}, "seed": 3}'
    assert read_terms(text).noise == 1.0
    for wrong in (
        '{"settings": {"method": "fedavg:noise=0", "model": "lenet5", "noise": 1, "clip": 1}, "seed": 3}',
        "[]",
    ):
        with pytest.raises(UserError):
            read_terms(wrong)


# Whole runs


def change_policy(folder: Path, **values: Any) -> None:
    path = folder / "site.toml"
    head, _, _ = path.read_text().partition("[policy]")
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in values.items()
    ]
    path.write_text("\n".join([head, "[policy]", *lines]))
    read_site(folder, ready=False)


def test_a_refused_task_is_a_line_at_both_ends_and_in_the_log(
    tmp_path: Path, make_federation: Callable[..., Federation], capfd: pytest.CaptureFixture[str]
) -> None:
    sites = GuardedSites(tmp_path, make_federation((12, 9, 7)))
    for name in ("north", "south"):
        change_policy(tmp_path / name, methods=["fedrep"])
    with pytest.raises(UserError, match="0 of the 2 sites needed"):
        sites.run()
    says = "its policy allows the methods fedrep, not 'fedavg'"
    assert f"round 1: north failed: {says}" in sites.said
    assert f"fedc2i site: {says}" in capfd.readouterr().out
    assert AuditLog(tmp_path / "north").entries()[-1]["outcome"] == says


def test_a_run_with_noise_sends_no_scores_and_adds_up_in_the_log(
    tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    sites = GuardedSites(tmp_path, make_federation((12, 9, 7)))
    for name in ("north", "south"):
        change_policy(tmp_path / name, least_noise=2.0, largest_clip=1.0, epsilon=7.5)
    result = sites.run(rounds=1, clip=1.0, noise=2.0, seeds="0,1")
    log = AuditLog(tmp_path / "north")
    tasks = [entry for entry in log.entries() if entry["event"] == "task"]
    assert all(entry["scores"] == [] for entry in tasks)
    assert all(not own for report in result.rounds for metrics in report.metrics.values() for own in metrics)
    trained = [entry for entry in tasks if entry["upload"]]
    assert [entry["epsilon"] for entry in trained] == pytest.approx([epsilon(2.0, n) for n in (1, 2)])
    assert result.privacy is not None
    assert (result.privacy.uploads, result.privacy.epsilon) == (2, pytest.approx(trained[-1]["epsilon"]))
    assert sum(trained[0]["bytes"].values()) == pytest.approx(trained[0]["total"], rel=0.1)
    with pytest.raises(UserError):
        sites.run("again", rounds=1, clip=1.0, noise=2.0)
    assert any("its policy allows ε = 7.5 in all" in line for line in sites.said)
    for name in ("north", "south"):
        AuditLog(tmp_path / name).append(RENEWED, by="a test")
    sites.run("renewed", rounds=1, clip=1.0, noise=2.0)
    found = read_run(tmp_path / "renewed")
    assert str(found.scores("trained")["Avg"]) == "–"
    assert sites.said[-1] == "finished: the sites' policies let no scores leave"


def test_patience_needs_scores(tmp_path: Path, make_federation: Callable[..., Federation]) -> None:
    sites = GuardedSites(tmp_path, make_federation((12, 9, 7), validation=4), SitePolicy(scores="never"))
    with pytest.raises(UserError, match="patience"):
        sites.run(rounds=3, patience=1)


def test_the_introduction_says_whether_a_site_agrees_to_contributions(
    tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    sites = GuardedSites(tmp_path, make_federation((8, 8)), SitePolicy(contribution=True))
    change_policy(tmp_path / "south", contribution=True, scores="never")
    with _app(Job(tmp_path / "run", "fedavg")) as app:
        bundle = compat.bundle(app)
    said = {}
    for name in ("north", "south"):
        greeting = RecordDict({"greeting": ConfigRecord({"rejected": ""})})
        said[name] = Introduction.from_record(Guard(tmp_path / name, Worker()).answer(bundle, GREETING, greeting))
    assert (said["north"].contribution, said["south"].contribution) == (True, False)
    assert sites.said == []
