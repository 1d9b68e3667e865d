"""Secure aggregation over guarded sites: the same models as without it, a policy that asks for it, and crashes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

pytest.importorskip("flwr.app")
from fakes import identity, look_at_once  # noqa: F401
from flwr.app import ConfigRecord, Message, RecordDict
from guarded_sites import GuardedSites, quick  # noqa: F401
from safetensors.torch import load_file

from fedc2i import Federation, UserError
from fedc2i.deploy.audit import SENT, TASK, AuditLog, check_course, check_sum, spent
from fedc2i.deploy.guard import Guard
from fedc2i.deploy.partners import Partners
from fedc2i.deploy.policy import SitePolicy
from fedc2i.deploy.run_description import RunTerms
from fedc2i.deploy.site_folder import MASKS, SiteFolder, make_site, read_site
from fedc2i.flower import compat, masking
from fedc2i.flower.masking import COLLECT, SETUP, SHARE, UNMASK
from fedc2i.flower.message_format import Answer, Task, masking_of

NAMES = ("north", "south", "west")
SECURE: dict[str, Any] = {"secure_aggregation": True, "rounds": 1}


@pytest.fixture
def sites(tmp_path: Path, make_federation: Callable[..., Federation]) -> GuardedSites:
    return GuardedSites(tmp_path, make_federation((12, 9, 7)), names=NAMES)


def models(sites: GuardedSites, out: str, site: str) -> dict[str, torch.Tensor]:
    run = json.loads((sites.folder / out / "run.json").read_text())["run"]
    return load_file(sites.folder / site / "state" / f"{run}-seed0" / "received.safetensors")


def name_partners(folder: Path, names: Sequence[str] = NAMES) -> dict[str, str]:
    """Each site's policy names the others; returns the fingerprints."""
    prints = {name: read_site(folder / name, ready=False).fingerprint for name in names}
    for name in names:
        file = folder / name / "site.toml"
        others = [own for other, own in prints.items() if other != name]
        text = file.read_text().replace("partners = []", f"partners = {json.dumps(others)}")
        file.write_text(text.replace("secure_aggregation = 0", "secure_aggregation = 3"))
        assert read_site(folder / name, ready=False).policy.partners == tuple(others)
    return prints


def test_masked_uploads_give_the_models_of_plain_ones(
    tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    names = (*NAMES, "east")
    sites = GuardedSites(tmp_path, make_federation((12, 9, 7, 8)), names=names)
    sites.run("plain", "fedavg:weighting=samples", rounds=1)
    prints = name_partners(tmp_path, names)
    result = sites.run("secure", "fedavg:weighting=samples", **SECURE)
    for name in names:
        plain, secure = models(sites, "plain", name), models(sites, "secure", name)
        assert plain.keys() == secure.keys()
        for key, tensor in plain.items():
            # Half a step of 128/2^29 in each upload; equal weights would give 1.2e-7, these 1.6e-7.
            torch.testing.assert_close(secure[key], tensor, rtol=1e-6, atol=3e-7)
            assert not (sites.folder / name / MASKS).exists()
    entries = [own for own in AuditLog(sites.folder / "north").entries() if own.get("secure_aggregation")]
    assert [own.get("stage") for own in entries] == [COLLECT, UNMASK, None]  # None: the last exchange
    plain_upload = [own["upload"] for own in AuditLog(sites.folder / "north").entries() if own.get("upload")]
    assert len(plain_upload) == 2
    assert len(set(plain_upload)) == 1  # the log knows that it was the same upload
    count = sum(tensor.numel() for tensor in plain.values())
    assert entries[0]["bytes"] == {f"upload/{masking.UPLOAD}": 4 * (count + 1)}
    assert entries[1]["sum"] == sorted([*(prints[name] for name in names if name != "north"), "this site"])
    assert entries[1]["summed"] == entries[0]["upload"]
    plain_bytes = 4 * count
    assert plain_bytes < result.rounds[-1].bytes_up < plain_bytes + 10_000


def test_a_policy_that_asks_for_masks_refuses_plain_uploads(
    tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    sites = GuardedSites(tmp_path, make_federation((12, 9, 7)), SitePolicy(secure_aggregation=4), NAMES)
    with pytest.raises(UserError, match="answered within"):
        sites.run(rounds=1)
    assert any("lets uploads leave only masked (secure_aggregation)" in line for line in sites.said)
    with pytest.raises(UserError, match="0 of the 3 sites that secure aggregation needs have shared their keys"):
        sites.run("secure", **SECURE)
    assert any("over 3 sites; at least 4 are needed" in line for line in sites.said)
    assert not [own for name in NAMES for own in AuditLog(tmp_path / name).entries() if own.get("upload")]


def test_a_run_that_promised_masks_gets_no_plain_upload(sites: GuardedSites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedc2i.flower.secure_round.SecureRound.collect", lambda own, chosen, tasks: own.ask(1, tasks(chosen), {}, 3)
    )
    with pytest.raises(UserError, match="answered within"):
        sites.run("secure", **SECURE)
    assert any("the run has secure aggregation, and this task has no masks" in line for line in sites.said)


class KilledError(Exception):
    """The coordinator's power cable."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [COLLECT, UNMASK])
def test_a_coordinator_killed_inside_a_round_does_it_again(
    stage: str, sites: GuardedSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(number: int, message: Message) -> None:
        if number == 102 and masking_of(message.content).get("stage") == stage:
            raise KilledError

    monkeypatch.setattr(sites, "before", kill)
    with pytest.raises(KilledError):
        sites.run("secure", **SECURE)
    monkeypatch.setattr(sites, "before", lambda number, message: None)
    found = sites.run("secure", **SECURE)
    assert found.rounds[0].participants == NAMES
    uploads = [own["upload"] for own in AuditLog(sites.folder / "north").entries() if own.get("upload")]
    assert len(uploads) == 2
    assert len(set(uploads)) == 1


def test_a_sum_is_unmasked_again_only_with_the_same_sites() -> None:
    line = {"event": TASK, "run": "r", "round": 2, "outcome": SENT, "sum": ["a", "b", "d"], "summed": "hash"}
    other = {**line, "sum": ["a"], "summed": "other"}
    others = [{**other, "round": 1}, {**other, "run": "x"}, {**other, "outcome": "no"}]
    check_sum([*others, line], "r", 2, "hash", ["a", "b", "d"])
    check_sum(others, "r", 2, "hash", ["b", "c", "e"])
    with pytest.raises(UserError, match="round 2 of run r was unmasked with other sites"):
        check_sum([line], "r", 2, "new", ["a", "b", "c"])
    with pytest.raises(UserError, match="its upload is the one of round 2 of run r, unmasked with other sites"):
        check_sum([line], "another", 7, "hash", ["a", "b", "c"])


class Forger:
    """A coordinator that asks guards what it likes, and numbers sites as it likes."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folders = {name: make_site(folder / name, name, "digits", "h:1", check=False)[0] for name in names}
        self.uploads = {name: {"w": torch.full((3,), float(k))} for k, name in enumerate(names)}
        name_partners(folder, names)
        self.lines: dict[str, list[dict[str, Any]]] = {name: [] for name in names}  # of each site's log

    def ask(self, name: str, run: str, round: int, **asked: Any) -> Answer:
        site = read_site(self.folders[name].folder, ready=False)
        task = Task(run, round, 0, 0, asked["stage"] == COLLECT, False, False, False, "{}")
        line = {"event": TASK, "run": run, "round": round, "noise": 1.0, "outcome": SENT, "terms": ""}
        terms = RunTerms("fedavg", "lenet5", 0, 1, 1.0, 1.0, "", "{}", True, 64.0)
        work = lambda: Answer(self.uploads[name])  # noqa: E731
        guard = Guard(site.folder, None)  # type: ignore[arg-type]
        try:
            return guard._masked(site, task, terms, asked, self.lines[name], work, line)
        except UserError as error:
            line["outcome"] = str(error)
            raise
        finally:
            if asked["stage"] in (COLLECT, UNMASK):
                self.lines[name].append(line)

    def share(self, names: Sequence[str], run: str, round: int, session: str) -> list[dict[str, Any]]:
        """Numbers the sites from 0; returns what each is to be asked next."""
        own = [{"session": session, "site": k} for k in range(len(names))]
        keys = [self.ask(name, run, round, stage=SETUP, **own[k]).masking for k, name in enumerate(names)]
        told: dict[str, Any] = {f"{name}s": [key[name] for key in keys] for name in ("signature",)}
        told |= {"keys1": [key["key1"] for key in keys], "keys2": [key["key2"] for key in keys]}
        told |= {"identities": [key["identity"] for key in keys], "weights": [1.0] * len(names)}
        told["sites"] = list(range(len(names)))
        found = [self.ask(name, run, round, stage=SHARE, **own[k], **told).masking for k, name in enumerate(names)]
        shares = [dict(zip(one["sites"], one["shares"], strict=True)) for one in found]
        for k in told["sites"]:
            others = [j for j in told["sites"] if j != k]
            own[k] |= {"stage": COLLECT, "sources": others, "shares": [shares[j][k] for j in others]}
        return own

    def sum(self, names: Sequence[str], run: str = "r", round: int = 1, session: str = "s") -> None:
        asked = self.share(names, run, round, session)
        for k, name in enumerate(names):
            self.ask(name, run, round, **asked[k])
        unmask = {"stage": UNMASK, "session": session, "active": list(range(len(names))), "dropped": []}
        for k, name in enumerate(names):
            self.ask(name, run, round, **unmask, site=k)


@pytest.fixture
def forger(tmp_path: Path) -> Forger:
    return Forger(tmp_path, "x", "a", "b", "c", "d")


def test_sites_that_change_numbers_are_other_sites(forger: Forger) -> None:
    """Five sums of four of five sites, always numbered from 0, would show every upload."""
    forger.sum(["x", "a", "b", "c"])
    forger.sum(["c", "x", "b", "a"], session="again")  # the same sites
    with pytest.raises(UserError, match="round 1 of run r was unmasked with other sites"):
        forger.sum(["x", "a", "b", "d"], session="other")
    assert [len(line["sum"]) for line in forger.lines["x"] if "sum" in line] == [4, 4]


def test_an_upload_is_in_no_two_sums_of_other_sites_whatever_the_run(forger: Forger) -> None:
    """The first round of two runs with one seed has the same uploads: 4·mean₄ - 3·mean₃ would be one of them."""
    forger.sum(["x", "a", "b", "c"])
    with pytest.raises(UserError, match=r"its upload is the one of round 1 of run r, .* another seed"):
        forger.sum(["x", "a", "b"], run="second")
    forger.uploads = {name: {"w": own["w"] + 1} for name, own in forger.uploads.items()}
    forger.sum(["x", "a", "b"], run="third")


def test_a_masked_upload_that_is_sent_again_counts(forger: Forger) -> None:
    """The first answer may have got lost with its line: the power failed in between."""
    asked = forger.share(["x", "a", "b"], "r", 1, "s")
    first = forger.ask("x", "r", 1, **asked[0])
    (line,) = forger.lines["x"]
    forger.lines["x"].clear()
    second = forger.ask("x", "r", 1, **asked[0])
    assert torch.equal(first.upload[masking.UPLOAD], second.upload[masking.UPLOAD])
    assert forger.lines["x"][0]["upload"] == line["upload"]
    assert spent(forger.lines["x"]).noises == (1.0,)


def test_a_refusal_that_tells_something_of_the_upload_counts(forger: Forger) -> None:
    """A coordinator chooses model and range, so that refusals could show an upload bit by bit."""
    asked = forger.share(["x", "a", "b"], "r", 1, "s")
    for value in (100.0, 200.0, 200.0, 300.0):
        forger.uploads["x"] = {"secret": torch.tensor([value])}
        with pytest.raises(UserError, match="outside of the range of 64") as refused:
            forger.ask("x", "r", 1, **asked[0])
        assert not any(word in str(refused.value) for word in ("secret", "00"))
    lines = forger.lines["x"]
    assert spent(lines).runs == ("r",)
    assert spent(lines).noises == (1.0, 1.0, 1.0)
    with pytest.raises(UserError, match="round 1 of run r was answered with 3 uploads"):
        check_course(lines, "r", "", 1)


def test_secrets_of_a_round_that_never_ended_go_with_the_next_task(sites: GuardedSites) -> None:
    file = sites.folder / "north" / MASKS
    file.write_bytes(b"secret")
    sites.run(rounds=1)
    assert not file.exists()


@pytest.mark.slow
def test_a_round_is_not_unmasked_again_with_other_sites(
    tmp_path: Path, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (*NAMES, "east")
    sites = GuardedSites(tmp_path, make_federation((12, 9, 7, 8)), names=names)

    def kill(number: int, message: Message) -> None:
        if number == 103 and masking_of(message.content).get("stage") == UNMASK:
            raise KilledError

    monkeypatch.setattr(sites, "before", kill)
    with pytest.raises(KilledError):
        sites.run("secure", **SECURE)

    def lose(number: int, message: Message) -> None:
        sites.grid.nodes.pop(103, None)

    monkeypatch.setattr(sites, "before", lose)
    with pytest.raises(UserError, match="0 of the 3 sites needed have helped to remove masks"):
        sites.run("secure", **SECURE)
    told = "was unmasked with other sites, and the difference of two sums would show uploads"
    assert any(told in line for line in sites.said)


def test_policy_values() -> None:
    for count in (1, 2):
        with pytest.raises(UserError, match=r"policy.secure_aggregation must be 3 or more sites, or 0"):
            SitePolicy.read({"secure_aggregation": count}, "site.toml")
    assert SitePolicy.read(tomllib.loads(tomli_w.dumps({"secure_aggregation": 3})), "x").secure_aggregation == 3
    with pytest.raises(UserError, match="could evade"):
        SitePolicy(secure_aggregation=3).check_code(["model_a.py"], [])


# Partners


def partner(folder: Path, name: str) -> SiteFolder:
    return make_site(folder / name, name, "digits", "h:1", check=False)[0]


def test_a_site_adds_up_with_the_partners_that_its_policy_names(tmp_path: Path) -> None:
    north, south, west = (partner(tmp_path, name) for name in ("north", "south", "west"))
    policy = replace(north.policy, partners=(south.fingerprint, west.fingerprint))
    own = Partners(replace(north, policy=policy))
    stranger = Partners(partner(tmp_path, "stranger"))
    first, second = (*Partners(south).signed(b"keys"), b"keys"), (*Partners(west).signed(b"other"), b"other")
    assert own.check([first, second]) == [south.fingerprint, west.fingerprint]
    for others, says in (
        ([first, (*stranger.signed(b"keys"), b"keys")], "is none, or comes twice"),
        ([first, first], "is none, or comes twice"),
        ([first, (first[0] + " x", *first[1:])], "is none, or comes twice"),  # the same key with a comment
        ([first, (*Partners(north).signed(b"keys"), b"keys")], "is none, or comes twice"),
        ([first, ("", b"", b"")], "a site without a key is none"),
        ([first, ("ssh-rsa !", b"", b"")], "is none"),
        ([first, (second[0], second[1], b"changed")], "not signed by it"),
        ([first, (second[0], first[1], b"other")], "not signed by it"),
        ([first, (second[0], b"", b"other")], "not signed by it"),
    ):
        with pytest.raises(UserError, match=says):
            own.check(others)
    assert Partners(north).check([("", b"", b""), first]) == ["", south.fingerprint]  # its policy names none
    with pytest.raises(UserError, match=r"policy.partners must be as `fedc2i coordinator sites` shows, got 'south'"):
        SitePolicy.read({"partners": ["south"], "secure_aggregation": 3}, "site.toml")
    named = {"partners": [south.fingerprint]}
    assert SitePolicy.read({**named, "secure_aggregation": 3}, "x").partners == (south.fingerprint,)
    with pytest.raises(UserError, match=r"policy.partners needs policy.secure_aggregation = 3 or more"):
        SitePolicy.read(named, "site.toml")  # uploads would leave without masks, and no partner would be asked for


def test_a_coordinator_cannot_play_a_partner(sites: GuardedSites, monkeypatch: pytest.MonkeyPatch) -> None:
    """It relays keys, and puts its own in the place of others."""
    prints = name_partners(sites.folder)

    def play(number: int, message: Message) -> None:
        asked = masking_of(message.content)
        if number == 100 and asked.get("stage") == "share":
            first, second = compat.secagg_setup(RecordDict(), 1)
            for name, key in (("keys1", first), ("keys2", second)):
                asked[name] = [asked[name][0], key, asked[name][2]]
            message.content["masking"] = ConfigRecord(asked)

    monkeypatch.setattr(sites, "before", play)
    with pytest.raises(UserError, match="2 of the 3 sites that secure aggregation needs"):
        sites.run("lied", **SECURE)
    assert any(f"the keys of partner {prints['south']} are not signed by it" in line for line in sites.said)
