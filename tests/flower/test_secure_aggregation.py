"""Secure aggregation, sites and coordinator together: the mean is right, and nothing else is seen."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr.app")
from flwr.app import RecordDict
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.task_identity import TaskIdentity

from fedc2i import UserError
from fedc2i.core.params import Params
from fedc2i.flower import compat, masking
from fedc2i.flower.masking import COLLECT, LEAST, SETUP, SHARE, UNMASK, SumTerms
from fedc2i.flower.message_format import Answer, Task
from fedc2i.flower.secure_round import SecureRound
from fedc2i.flower.secure_site import SecureSite, Session

SHAPES = (("body.weight", "torch.float32", (7, 5)), ("head.bias", "torch.float32", (3,)))
TASK = Task("run", 1, 0, 0, True, False, False, False, "{}")
Spoil = Callable[[str, int, dict[str, Any]], dict[str, Any] | None]  # None: the message is lost


def some_uploads(sites: int, seed: int = 0, scale: float = 1.0) -> list[Params]:
    random = np.random.default_rng(seed)
    return [
        {name: torch.tensor(scale * random.standard_normal(shape), dtype=torch.float32) for name, _, shape in SHAPES}
        for _ in range(sites)
    ]


class Unsigned:
    """Sites without identities."""

    def signed(self, content: bytes) -> tuple[str, bytes]:
        return "", b""

    def check(self, others: Any) -> list[str]:
        return [""] * len(others)


class Federation:
    """Sites and a coordinator; ``spoil`` is what happens to each message to a site."""

    def __init__(
        self,
        folder: Path,
        uploads: list[Params],
        weights: list[float] | None = None,
        spoil: Spoil = lambda stage, site, asked: asked,
        least: int = LEAST,
    ) -> None:
        self.uploads, self.spoil, self.said = uploads, spoil, list[str]()
        self.files = [folder / f"{site}.bin" for site in range(len(uploads))]
        self.sites = [SecureSite(file, "run", Unsigned(), least) for file in self.files]
        self.weights = weights or [1.0] * len(uploads)
        self.asked: list[tuple[str, int, dict[str, Any]]] = []
        self.sent: list[tuple[str, int, Answer]] = []
        self.trained: list[int] = []

    def ask(
        self, number: int, tasks: Mapping[int, Task], requests: Mapping[int, Mapping[str, Any]], needed: int
    ) -> dict[int, Answer]:
        answers = {}
        for site, request in requests.items():
            stage = str(request["stage"])
            self.asked.append((stage, site, dict(request)))
            spoiled = self.spoil(stage, site, dict(request))
            if spoiled is None:
                continue
            try:
                answers[site] = self.answer(site, spoiled)
            except UserError as error:
                self.said.append(f"{site}: {error}")
        if len(answers) < needed:
            raise UserError(f"{len(answers)} of {needed}")
        return answers

    def answer(self, site: int, request: Mapping[str, Any], round: int = 1) -> Answer:
        def train() -> Answer:
            self.trained.append(site)
            return Answer(self.uploads[site])

        found = self.sites[site].answer(round, request, train)
        passed = Answer.from_record(compat.from_bytes(compat.to_bytes(found.to_record(False))))
        self.sent.append((str(request["stage"]), site, passed))
        return passed

    def collect(self) -> dict[int, Answer]:
        names = [f"site{site}" for site in range(len(self.sites))]

        def tasks(trained: Collection[int]) -> dict[int, Task]:
            return dict.fromkeys(trained, TASK)

        def weights(sites: Any) -> list[float]:
            return [self.weights[site] for site in sites]

        self.round = SecureRound("run", 1, names, self.ask, SHAPES, weights, LEAST, 64.0, self.said.append)
        return self.round.collect(range(len(self.sites)), tasks)

    def mean(self, sites: Collection[int]) -> np.ndarray[Any, Any]:
        total = sum(self.weights[site] for site in sites)
        return np.sum([self.weights[site] / total * masking.flat(self.uploads[site]) for site in sites], axis=0)

    def last(self, stage: str, site: int) -> dict[str, Any]:
        return [asked for name, number, asked in self.asked if (name, number) == (stage, site)][-1]

    def masked(self, site: int) -> np.ndarray[Any, Any]:
        (found,) = [own.upload for stage, number, own in self.sent if (stage, number) == (COLLECT, site)]
        return found[masking.UPLOAD].numpy().view(np.uint32).astype(np.int64)


@pytest.fixture(autouse=True, scope="module")
def names() -> Any:
    """A message carries who made it; Flower's runtime fills this in."""
    with pytest.MonkeyPatch.context() as patch:
        for part in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, part, 1)
        yield


# The mean


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data(), sites=st.integers(3, 7), seed=st.integers(0, 99))
def test_the_mean_is_right_whoever_drops_out(
    data: st.DataObject, sites: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spare = sites - masking.threshold(sites) if sites > LEAST else 0
    gone = data.draw(st.lists(st.integers(0, sites - 1), unique=True, max_size=min(spare, sites - LEAST)))
    least = 0.6 if sites - len(gone) > LEAST else 1.0  # three sites must weigh the same
    weights = data.draw(st.lists(st.floats(least, 1.0), min_size=sites, max_size=sites))
    stage = data.draw(st.sampled_from([SETUP, SHARE, COLLECT, UNMASK]))

    def spoil(name: str, site: int, asked: dict[str, Any]) -> dict[str, Any] | None:
        return None if name == stage and site in gone else asked

    federation = Federation(tmp_path_factory.mktemp("sites"), some_uploads(sites, seed), weights, spoil)
    answers = federation.collect()
    there = [site for site in range(sites) if site not in gone or stage == UNMASK]
    assert sorted(answers) == there
    taking_part = sites - (len(gone) if stage == SETUP else 0)
    step = 64.0 / masking.levels(taking_part) / 0.6  # half a step in each upload, over weights of 0.6 and more
    for own in answers.values():
        assert np.abs(masking.flat(own.upload) - federation.mean(there)).max() < step + 2e-7
        assert {name: (str(one.dtype), tuple(one.shape)) for name, one in own.upload.items()} == {
            name: (dtype, shape) for name, dtype, shape in SHAPES
        }


@pytest.mark.parametrize("sites", [3, 4, 15, 16, 100, 1000])
def test_a_sum_of_the_largest_numbers_does_not_overflow(sites: int) -> None:
    keys = {site: (b"%d" % site, b"-%d" % site) for site in range(sites)}
    terms = SumTerms("run", 1, "s", keys, dict.fromkeys(keys, 1.0), 64.0)
    terms.check(3)
    for value in (64.0, -64.0):
        own = masking.quantised({"w": torch.full((2,), value)}, terms, 0) + terms.levels / 2
        total = np.array([sites * terms.levels, *(sites * own)], np.int64)
        assert total.min() >= 0
        assert total.max() < masking.MODULUS
        np.testing.assert_allclose(masking.mean(total, terms, keys), value, rtol=1e-12)


def test_a_number_outside_the_range_is_refused_and_not_clipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uploads = some_uploads(4)
    uploads[1]["head.bias"][2] = -100.0
    federation = Federation(tmp_path, uploads)
    answers = federation.collect()
    assert sorted(answers) == [0, 2, 3]
    said = (
        "1: its upload has a number that is not finite, or outside of the range of 64; the site's own log names it, "
        "--set secure_range=R allows larger ones"
    )
    assert federation.said == [said]  # neither the number nor where it is: the coordinator chooses model and range
    assert "'head.bias' of the upload holds 100" in capsys.readouterr().out
    uploads[1]["head.bias"][2] = math.nan
    federation = Federation(tmp_path, uploads)
    federation.collect()
    assert federation.said == [said]
    assert "'head.bias' of the upload holds nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "least", "counts"),
    [
        ([1.0, 1.0] + 8 * [1e-12], 10, "2.00"),  # a mean of two
        ([50.0, 50.0, 5.0], 3, "2.19"),
        ([1.0, 1.0, 0.9], 3, "2.99"),
        ([1.0, 1.0, 0.9, 0.1], 3, "3.19"),
        ([1.0] * 10, 10, "10"),
        ([0.1] * 3, 3, "3"),
    ],
)
def test_sites_that_hardly_weigh_do_not_count(weights: list[float], least: int, counts: str) -> None:
    """By the effective number of sites, (Σw)²/Σw²."""
    keys = {site: (b"%d" % site, b"-%d" % site) for site in range(len(weights))}
    terms = SumTerms("run", 1, "s", keys, dict(enumerate(weights)), 64.0)
    if float(counts) >= least:
        terms.check(least)
        return
    with pytest.raises(
        UserError, match=f"by their weights {len(weights)} sites count as {counts} .* {least} are needed"
    ):
        terms.check(least)


# What the coordinator sees


def test_a_masked_upload_is_uniform_and_says_nothing_of_the_model(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    values = random.standard_normal(40_000)
    uploads = [{"w": torch.tensor(values)} for _ in range(3)]  # all send the same
    federation = Federation(tmp_path, uploads)
    shapes = (("w", "torch.float64", (40_000,)),)
    names = ["a", "b", "c"]
    for _ in range(2):
        round = SecureRound("run", 1, names, federation.ask, shapes, lambda s: [1.0] * len(s), 3, 64.0, print)
        answers = round.collect(range(3), lambda trained: dict.fromkeys(trained, TASK))
        np.testing.assert_allclose(answers[0].upload["w"], values, atol=1e-6)
    seen = [own.upload[masking.UPLOAD].numpy().view(np.uint32) for stage, _, own in federation.sent if stage == COLLECT]
    assert len(seen) == 6
    for own in seen:
        for part in (own >> 24, own & 255):  # the highest and the lowest byte
            counts = np.bincount(part, minlength=256)
            expected = len(own) / 256
            assert ((counts - expected) ** 2 / expected).sum() < 360  # χ² with 255 degrees of freedom: p = 2e-5
        assert abs(np.corrcoef(own[1:].astype(float), values)[0, 1]) < 4.5 / math.sqrt(len(values))
    for k in range(6):  # neither another site's nor the same site's in another attempt
        for other in seen[:k]:
            assert (seen[k] == other).mean() < 1e-3


def test_the_keys_of_a_site_that_drops_out_do_not_open_its_late_upload(tmp_path: Path) -> None:
    late = {3: True}
    federation = Federation(
        tmp_path,
        some_uploads(4),
        spoil=lambda stage, site, asked: None if late.get(site) and stage in (COLLECT, UNMASK) else asked,
    )
    assert sorted(federation.collect()) == [0, 1, 2]
    federation.answer(3, federation.last(COLLECT, 3))  # it was only slow
    terms = Session.from_bytes(federation.files[3].read_bytes()).terms
    assert terms is not None
    shares = [
        dict(zip(*masking.read(own.masking, sites=[int], shares=[bytes]), strict=True))
        for stage, _, own in federation.sent
        if stage == UNMASK
    ]
    private = compat.secagg_secret([own[3] for own in shares])
    upload = federation.masked(3)
    for other in range(3):  # 3 is the largest number: it has added all masks
        secret = compat.secagg_pair_secret(private, terms.keys[other][0])
        upload = upload - terms.stream(secret, len(upload))
    with pytest.raises(UserError, match="masks do not cancel"):
        masking.mean(upload, terms, [3])


def test_masks_have_more_than_the_32_bits_of_flowers() -> None:
    """Flower folds a secret to 32 bits: whoever tries them all has every mask."""
    one, other = bytes(32), bytes([*b"abcd" * 2, *bytes(24)])  # equal once folded
    assert np.array_equal(pseudo_rand_gen(one, 2**32, [(9,)])[0], pseudo_rand_gen(other, 2**32, [(9,)])[0])
    terms = SumTerms("run", 1, "s", {}, {}, 64.0)
    assert not np.array_equal(terms.stream(one, 9), terms.stream(other, 9))
    assert len({tuple(SumTerms("run", n, "s", {}, {}, 64.0).stream(one, 2)) for n in range(9)}) == 9


@pytest.mark.parametrize("change", ["weights", "session of one", "key"])
def test_sites_that_are_told_different_things_give_no_mean(change: str, tmp_path: Path) -> None:
    def spoil(stage: str, site: int, asked: dict[str, Any]) -> dict[str, Any]:
        if site == 0 and stage == SHARE:
            if change == "weights":  # the others would hardly count
                asked["weights"] = [1.0, 0.7, 0.7, 0.7]
            elif change == "key":  # of the third site, as the first one sees it
                state = RecordDict()
                first, second = compat.secagg_setup(state, 2)
                for name, key in (("keys1", first), ("keys2", second)):
                    asked[name] = [*asked[name][:2], key, asked[name][3]]
        if change == "session of one" and site == 0:
            asked["session"] = "mine"
        return asked

    federation = Federation(tmp_path, some_uploads(4), spoil=spoil)
    unread = "2 of the 3 sites that secure aggregation needs have sent"  # two cannot read each other's shares
    with pytest.raises(UserError, match=unread if change == "key" else "round 1: the masks do not cancel"):
        federation.collect()


# What a site refuses


@pytest.mark.parametrize(
    ("stage", "change", "says"),
    [
        (UNMASK, {"active": [0, 1, 2, 3], "dropped": [1]}, "names a site twice, as in the sum or dropped out"),
        (UNMASK, {"active": [0, 0, 1, 2, 3], "dropped": []}, "names a site twice, as in the sum or dropped out"),
        (UNMASK, {"active": [1, 2, 3], "dropped": [0]}, "names other sites"),
        (UNMASK, {"active": [0, 1, 2], "dropped": []}, "names other sites"),
        (UNMASK, {"active": [0, 1, 2, 3, 9], "dropped": []}, "names other sites"),
        (
            UNMASK,
            {"active": [0, 1], "dropped": [2, 3]},
            "a sum of 2 sites; this one takes part if there are at least 3",
        ),
        (UNMASK, {"active": [0, True], "dropped": []}, "not a message of secure aggregation"),
        (COLLECT, {"sources": [1, 2, 2]}, "names a site twice"),
        (COLLECT, {"sources": [0, 1, 2]}, "sites that take no part"),
        (COLLECT, {"sources": [], "shares": []}, "a sum of 1 sites"),
        (COLLECT, {"shares": [b"x", b"y", b"z"]}, "secure aggregation failed"),
        (SHARE, {"weights": [1.0, 1e-9, 1e-9, 1e-9]}, "100% of the weight in the mean, which would show its upload"),
        (SHARE, {"weights": [1.0, 1.0, 1.0, -1.0]}, "not positive"),
        (SHARE, {"weights": [1.0, 1.0, 1.0, math.nan]}, "not positive"),
        (SHARE, {"sites": [0, 1, 2, 2]}, "names a site twice"),
        (SHARE, {"sites": [0, 1], "keys1": [b"a", b"b"], "keys2": [b"c", b"d"], "weights": [1.0, 1.0]}, "over 2 sites"),
        (SHARE, {"keys1": [b"a"] * 4}, "a public key that two sites have"),
        (SHARE, {"keys1": [b"a", b"b", b"c", b"d"]}, "secure aggregation failed"),
        (SHARE, {"keys1": "none"}, "not a message of secure aggregation"),
        (SETUP, {"stage": "reveal"}, "no stage 'reveal'"),
        (SETUP, {"site": -1}, "no stage 'setup' for site -1"),
        (UNMASK, {"session": "another"}, "no keys for stage 'unmask' of round 1"),
    ],
)
def test_a_site_refuses_what_would_show_an_upload(stage: str, change: Any, says: str, tmp_path: Path) -> None:
    def spoil(name: str, site: int, asked: dict[str, Any]) -> dict[str, Any]:
        return {**asked, **change} if (name, site) == (stage, 0) else asked

    federation = Federation(tmp_path, some_uploads(4), spoil=spoil)
    answers = federation.collect()
    assert says in federation.said[0]
    assert sorted(answers) == ([0, 1, 2, 3] if stage == UNMASK else [1, 2, 3])  # the others go on without it
    assert not [own for name, site, own in federation.sent if (name, site) == (stage, 0)]


def test_a_site_answers_a_stage_once_and_repeats_the_answer(tmp_path: Path) -> None:
    federation = Federation(tmp_path, some_uploads(3))
    federation.spoil = lambda stage, site, asked: federation.answer(site, asked) and asked  # every answer is lost once
    federation.collect()
    assert federation.trained == [0, 1, 2]
    for stage, site in {(stage, site) for stage, site, _ in federation.sent}:
        first, second = [own for name, number, own in federation.sent if (name, number) == (stage, site)]
        assert first.masking == second.masking
        assert first.upload.keys() == second.upload.keys()
        assert all(torch.equal(first.upload[name], second.upload[name]) for name in first.upload)
    asked, (known, *_) = (
        federation.last(UNMASK, 0),
        [own for name, site, own in federation.sent if (name, site) == (UNMASK, 0)],
    )
    assert federation.answer(0, {**asked, "active": [0, 1], "dropped": [2]}).masking == known.masking
    for stage in (SHARE, COLLECT):  # and never an earlier one
        with pytest.raises(UserError, match="the round must start again"):
            federation.answer(0, federation.last(stage, 0))
    with pytest.raises(UserError, match="the round must start again"):
        federation.answer(0, asked, round=2)


def test_secrets_are_for_the_owner_alone_and_gone_after_the_round(tmp_path: Path) -> None:
    seen: list[bytes] = []
    federation = Federation(tmp_path, some_uploads(3))

    def look(stage: str, site: int, asked: dict[str, Any]) -> dict[str, Any]:
        if stage == UNMASK and site == 0:
            assert stat.S_IMODE(federation.files[0].stat().st_mode) == 0o600
            state = compat.from_bytes(federation.files[0].read_bytes())["secaggplus_state"]
            seen.extend(bytes(state[name]) for name in ("sk1", "sk2", "rd_seed"))
        return asked

    federation.spoil = look
    federation.collect()
    left = federation.files[0].read_bytes()
    assert len(seen) == 3
    assert all(len(own) >= 32 and own not in left for own in seen)
    federation.sites[0].forget()
    assert not federation.files[0].exists()
    federation.sites[0].forget()


def test_a_damaged_file_of_secrets_starts_the_round_again(tmp_path: Path) -> None:
    federation = Federation(tmp_path, some_uploads(4))

    def damage(stage: str, site: int, asked: dict[str, Any]) -> dict[str, Any]:
        if (stage, site) == (SHARE, 2):
            federation.files[2].write_bytes(b"\xff\x00")
        return asked

    federation.spoil = damage
    assert sorted(federation.collect()) == [0, 1, 3]
    assert federation.said == ["2: this site has no keys for stage 'share' of round 1; the round must start again"]


# What becomes of a round


def test_a_round_that_loses_too_many_starts_again_without_them(tmp_path: Path) -> None:
    gone: set[int] = set()

    def spoil(stage: str, site: int, asked: dict[str, Any]) -> dict[str, Any] | None:
        if stage == COLLECT:
            gone.update((3, 4))
        return None if site in gone else asked

    federation = Federation(tmp_path, some_uploads(5), spoil=spoil)
    assert sorted(federation.collect()) == [0, 1, 2]
    assert federation.said == [
        "round 1: 3 of the 4 sites that secure aggregation needs have sent a masked upload; it starts again with the "
        "sites that answer"
    ]


def test_a_round_that_loses_too_many_twice_ends_the_run(tmp_path: Path) -> None:
    federation = Federation(
        tmp_path, some_uploads(4), spoil=lambda stage, site, asked: asked if stage == SETUP or site < 2 else None
    )
    with pytest.raises(
        UserError, match=r"round 1: 2 of the 3 sites .* have shared their keys; the same command resumes"
    ):
        federation.collect()


def test_a_round_whose_sites_vanish_before_masks_are_removed_starts_again(tmp_path: Path) -> None:
    lost: list[int] = []

    def spoil(stage: str, site: int, asked: dict[str, Any]) -> dict[str, Any] | None:
        if stage == UNMASK and site in (1, 2) and site not in lost:
            lost.append(site)
            return None
        return asked

    federation = Federation(tmp_path, some_uploads(4), spoil=spoil)
    assert sorted(federation.collect()) == [0, 1, 2, 3]
    says = "round 1: 2 of the 3 sites needed have helped to remove masks; it starts again with the sites that answer"
    assert federation.said == [says]
    assert federation.trained == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_mean_that_would_be_of_too_few_after_drop_outs_is_not_asked_for(tmp_path: Path) -> None:
    weights = [1.0, 1.0, 0.5, 1.0]  # 3.77 sites; without the last one 2.78
    gone = {3}
    federation = Federation(
        tmp_path,
        some_uploads(4),
        weights,
        lambda stage, site, asked: None if stage == COLLECT and site in gone else asked,
    )
    with pytest.raises(UserError, match=r"by their weights 3 sites count as 2\.78"):
        federation.collect()
    assert UNMASK not in {stage for stage, _, _ in federation.asked}


def test_a_site_that_sends_nonsense_is_ignored(tmp_path: Path) -> None:
    federation = Federation(tmp_path, some_uploads(5))
    honest = federation.ask

    def ask(number: int, tasks: Any, requests: Any, needed: int) -> dict[int, Answer]:
        found = honest(number, tasks, requests, needed)
        stage = next(iter(requests.values()))["stage"]
        broken = {
            SHARE: Answer(masking={"sites": [0, 9], "shares": [b"x", b"y"]}),
            COLLECT: Answer({masking.UPLOAD: torch.zeros(3, dtype=torch.int32)}),
        }
        return {**found, 4: broken[stage]} if 4 in found and stage in broken else found

    federation.ask = ask  # type: ignore[method-assign]
    answers = federation.collect()
    assert sorted(answers) == [0, 1, 2, 3]
    np.testing.assert_allclose(masking.flat(answers[0].upload), federation.mean(range(4)), atol=1e-6)


def test_bytes_are_those_of_all_stages(tmp_path: Path) -> None:
    federation = Federation(tmp_path, some_uploads(3))
    answers = federation.collect()
    for site, own in answers.items():
        assert own.bytes == sum(sent.bytes for _, number, sent in federation.sent if number == site)
    assert federation.round.bytes_down > 3 * 2 * 3 * 100  # two keys of three sites, to each


LISTS = [st.lists(kind, max_size=5) for kind in (st.integers(-1, 4), st.binary(max_size=4), st.floats())]
VALUES = st.one_of(st.integers(-2, 5), st.floats(), st.binary(max_size=4), st.text(max_size=4), st.booleans(), *LISTS)
FIELDS = st.sampled_from(["sites", "keys1", "keys2", "identities", "sources", "shares", "active", "dropped"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(stage=st.sampled_from([SHARE, COLLECT, UNMASK]), change=st.dictionaries(FIELDS, VALUES, min_size=1))
def test_any_other_request_is_refused_in_a_line(
    stage: str, change: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a round that stops before the stage, with any part of the request changed."""
    folder = tmp_path_factory.mktemp("fuzzed")
    if not _prepared:
        for name in (SHARE, COLLECT, UNMASK):
            federation = Federation(folder / name, some_uploads(3))
            federation.spoil = lambda own, site, asked, name=name: None if own == name else asked  # type: ignore[misc]
            with pytest.raises(UserError):
                federation.collect()
            _prepared[name] = federation, federation.last(name, 0), federation.files[0].read_bytes()
    federation, asked, before = _prepared[stage]
    federation.files[0].write_bytes(before)
    if all(asked.get(name) == value for name, value in change.items() if name in asked):
        return
    with pytest.raises(UserError) as refused:
        federation.answer(0, {**asked, **change})
    assert "\n" not in str(refused.value)
    assert federation.files[0].read_bytes() == before  # nothing was spent


_prepared: dict[str, tuple[Federation, dict[str, Any], bytes]] = {}
