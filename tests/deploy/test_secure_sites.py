"""Secure aggregation over guarded sites: the same models as without it, a policy that asks for it, and crashes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
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
from fedc2i.deploy.audit import SENT, TASK, AuditLog, check_sum
from fedc2i.deploy.partners import Partners
from fedc2i.deploy.policy import SitePolicy
from fedc2i.deploy.site_folder import MASKS, SiteFolder, make_site, read_site
from fedc2i.flower import compat, masking
from fedc2i.flower.masking import COLLECT, UNMASK
from fedc2i.flower.message_format import masking_of

NAMES = ("north", "south", "west")
SECURE: dict[str, Any] = {"secure_aggregation": True, "rounds": 1}


@pytest.fixture
def sites(tmp_path: Path, make_federation: Callable[..., Federation]) -> GuardedSites:
    return GuardedSites(tmp_path, make_federation((12, 9, 7)), names=NAMES)


def models(sites: GuardedSites, out: str, site: str) -> dict[str, torch.Tensor]:
    run = json.loads((sites.folder / out / "run.json").read_text())["run"]
    return load_file(sites.folder / site / "state" / f"{run}-seed0" / "received.safetensors")


def name_partners(sites: GuardedSites) -> dict[str, str]:
    """Each site's policy names the others; returns the fingerprints."""
    prints = {name: read_site(sites.folder / name, ready=False).fingerprint for name in NAMES}
    for name in NAMES:
        file = sites.folder / name / "site.toml"
        others = [own for other, own in prints.items() if other != name]
        file.write_text(file.read_text().replace("partners = []", f"partners = {json.dumps(others)}"))
        assert read_site(sites.folder / name, ready=False).policy.partners == tuple(others)
    return prints


def test_masked_uploads_give_the_models_of_plain_ones(sites: GuardedSites) -> None:
    name_partners(sites)
    sites.run("plain", "fedavg:weighting=samples", rounds=1)
    result = sites.run("secure", "fedavg:weighting=samples", **SECURE)
    for name in NAMES:
        plain, secure = models(sites, "plain", name), models(sites, "secure", name)
        assert plain.keys() == secure.keys()
        for key, tensor in plain.items():
            # Half a step of 128/2^30 in each upload; equal weights would give 6e-8, these are up to twice as far.
            torch.testing.assert_close(secure[key], tensor, rtol=1e-6, atol=3e-7)
            assert not (sites.folder / name / MASKS).exists()
    entries = [own for own in AuditLog(sites.folder / "north").entries() if own.get("secure_aggregation")]
    assert [own.get("stage") for own in entries] == [COLLECT, UNMASK, None]  # None: the last exchange
    plain_upload = [own["upload"] for own in AuditLog(sites.folder / "north").entries() if own.get("upload")]
    assert len(plain_upload) == 2
    assert len(set(plain_upload)) == 1  # the log knows that it was the same upload
    count = sum(tensor.numel() for tensor in plain.values())
    assert entries[0]["bytes"] == {f"upload/{masking.UPLOAD}": 4 * (count + 1)}
    assert entries[1]["sum"] == [0, 1, 2]
    plain_bytes = 4 * count
    assert plain_bytes < result.rounds[-1].bytes_up < plain_bytes + 10_000


def test_a_policy_that_asks_for_masks_refuses_plain_uploads(
    tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    sites = GuardedSites(tmp_path, make_federation((12, 9, 7)), SitePolicy(secure_aggregation=4), NAMES)
    with pytest.raises(UserError, match="answered within"):
        sites.run(rounds=1)
    assert any("lets uploads leave only masked (secure_aggregation)" in line for line in sites.said)
    with pytest.raises(UserError, match="0 of the 3 sites that secure aggregation needs have shared its keys"):
        sites.run("secure", **SECURE)
    assert any("over 3 sites; at least 4 are needed" in line for line in sites.said)
    assert not [own for name in NAMES for own in AuditLog(tmp_path / name).entries() if own.get("upload")]


def test_a_run_that_promised_masks_gets_no_plain_upload(sites: GuardedSites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedc2i.flower.secure_round.SecureRound.collect", lambda own, chosen, tasks: own.ask(1, tasks(chosen), {}, 3)
    )
    with pytest.raises(UserError, match="answered within"):
        sites.run("secure", **SECURE)
    assert any("the run is one with secure aggregation, and this task is not" in line for line in sites.said)


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
    line = {"event": TASK, "run": "r", "round": 2, "outcome": SENT, "sum": [0, 1, 3]}
    others = [{**line, "round": 1, "sum": [0]}, {**line, "run": "x", "sum": [0]}, {**line, "outcome": "no", "sum": [0]}]
    assert check_sum([*others, line], "r", 2, [3, 1, 0]) == [0, 1, 3]
    assert check_sum(others, "r", 2, [1, 2, 4]) == [1, 2, 4]
    with pytest.raises(UserError, match="round 2 of run r was unmasked with sites 1, 2, 4, and with 1, 2, 3"):
        check_sum([line], "r", 2, [0, 1, 2])


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
    with pytest.raises(UserError, match="answered within"):
        sites.run("secure", **SECURE)
    told = "was unmasked with sites 1, 2, 3, 4, and with 1, 2, 3 the difference would show uploads"
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
    own.check([first, second])
    for others, says in (
        ([first, (*stranger.signed(b"keys"), b"keys")], "is none, or comes twice"),
        ([first, first], "is none, or comes twice"),
        ([first, (*Partners(north).signed(b"keys"), b"keys")], "is none, or comes twice"),
        ([first, ("", b"", b"")], "a site without a key is none"),
        ([first, ("ssh-rsa !", b"", b"")], "is none"),
        ([first, (second[0], second[1], b"changed")], "not signed by it"),
        ([first, (second[0], first[1], b"other")], "not signed by it"),
        ([first, (second[0], b"", b"other")], "not signed by it"),
    ):
        with pytest.raises(UserError, match=says):
            own.check(others)
    Partners(north).check([("", b"", b"")])  # its policy names none
    with pytest.raises(UserError, match=r"policy.partners must be as `fedc2i coordinator sites` shows, got 'south'"):
        SitePolicy.read({"partners": ["south"]}, "site.toml")
    assert SitePolicy.read({"partners": [south.fingerprint]}, "x").partners == (south.fingerprint,)


def test_a_coordinator_cannot_play_a_partner(sites: GuardedSites, monkeypatch: pytest.MonkeyPatch) -> None:
    """It relays keys, and puts its own in the place of others."""
    prints = name_partners(sites)

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
