"""Clipping and noise on uploads: what they do to numbers, and that other data moves an upload by 2·clip at most."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, row, stack
from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.clip_noise import (
    KEY_BYTES,
    check,
    clip_and_noise,
    from_secret,
    from_seed,
    normal,
    protect,
    reference,
    secret_in,
)
from fedc2i.engine.exchange import Server
from fedc2i.engine.upload import process
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_top_k import FedC2ITopK
from fedc2i.methods.fedproto import FedProto
from fedc2i.methods.local import Local
from fedc2i.methods.messages import Download
from fedc2i.models.model import Model
from support.method_checks import CPU, TRAINING, place, run

NOT_COVERED = ("fedc2i-plus", "fedproto", "fedpac", "fedic", "fedc2i-top-k")  # class counts, flags or reports


def no_noise(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values)


# One upload.


def test_all_entries_together_are_scaled_down_to_the_norm() -> None:
    upload = {"a": numbers(4.0), "b": numbers(1.0, 5.0)}
    known = {"a": numbers(1.0), "b": numbers(1.0, 1.0)}  # away by 3 and 4: norm 5
    sent = clip_and_noise(upload, known, 1.0, 0.0, no_noise)
    assert sent["a"].tolist() == pytest.approx([1.6])
    assert sent["b"].tolist() == pytest.approx([1.0, 1.8])


def test_within_the_norm_and_without_noise_it_stays_as_it_is() -> None:
    upload = {"a": torch.randn(50, generator=torch.Generator().manual_seed(0))}
    sent = clip_and_noise(upload, {"a": torch.full((50,), 0.1)}, 1e6, 0.0, no_noise)
    assert sent["a"] is upload["a"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_upload_is_sent_as_what_was_known(value: float) -> None:
    sent = clip_and_noise({"a": numbers(value, 2.0)}, {"a": numbers(1.0, 1.0)}, 1.0, 0.0, no_noise)
    assert sent["a"].tolist() == [1.0, 1.0]


def test_huge_numbers_are_scaled_down_too() -> None:
    upload = {"a": torch.tensor([3e300, 4e300], dtype=torch.float64)}
    sent = clip_and_noise(upload, {"a": torch.zeros(2, dtype=torch.float64)}, 1.0, 0.0, no_noise)
    assert sent["a"].norm() <= 1.0


@pytest.mark.parametrize("source", ["seed", "secret"])
def test_noise_is_gaussian_of_the_stated_deviation(source: str) -> None:
    upload, known = {"a": torch.zeros(60_000), "b": torch.zeros(2, 20_000)}, {"a": torch.ones(60_000)}
    known["b"] = torch.ones(2, 20_000)
    draw = from_seed(0, "a", 1) if source == "seed" else from_secret(b"k" * 32, upload, known, 0.5, 3.0)
    sent = clip_and_noise(upload, known, 0.5, 3.0, draw)
    quiet = clip_and_noise(upload, known, 0.5, 0.0, no_noise)
    drawn = torch.cat([(sent[name] - quiet[name]).flatten() for name in upload]).double().numpy()
    assert len(drawn) == 100_000
    assert np.std(drawn) == pytest.approx(1.5, rel=0.01)  # its own deviation is 0.22 %
    assert stats.kstest(drawn / 1.5, "norm").pvalue > 0.01
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    assert sent["a"].dtype == torch.float32


def test_noise_of_the_seed_depends_on_client_round_and_seed() -> None:
    first = from_seed(0, "a", 1)(100)
    assert torch.equal(first, from_seed(0, "a", 1)(100))
    for other in (from_seed(0, "b", 1), from_seed(0, "a", 2), from_seed(1, "a", 1)):
        assert not torch.isclose(first, other(100)).any()


def test_noise_of_a_secret_is_the_same_for_the_same_question_alone() -> None:
    upload, known, key = {"a": numbers(1.0, 2.0)}, {"a": numbers(0.0, 0.0)}, b"k" * 32
    first = from_secret(key, upload, known, 1.0, 2.0)(100)
    assert torch.equal(first, from_secret(key, upload, known, 1.0, 2.0)(100))
    others = [
        from_secret(b"l" * 32, upload, known, 1.0, 2.0),
        from_secret(key, {"a": numbers(1.0, 2.0000002)}, known, 1.0, 2.0),
        from_secret(key, upload, {"a": numbers(0.0, 1e-30)}, 1.0, 2.0),
        from_secret(key, upload, known, 1.5, 2.0),
        from_secret(key, upload, known, 1.0, 2.5),
        from_secret(key, {"b": upload["a"]}, {"b": known["a"]}, 1.0, 2.0),
    ]
    for other in others:
        assert not torch.isclose(first, other(100)).any()


def test_a_site_makes_its_key_once_and_for_itself(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    key = secret_in(folder)
    assert len(key) == KEY_BYTES
    assert secret_in(folder) == key
    assert secret_in(tmp_path / "other") != key
    assert [path.name for path in folder.iterdir()] == ["noise.key"]
    assert (folder / "noise.key").stat().st_mode & 0o077 == 0
    (folder / "noise.key").write_bytes(b"short")
    with pytest.raises(UserError, match="not a key of 32 bytes"):
        secret_in(folder)


# What the server knows beforehand.


def test_the_reference_is_what_was_sent_else_the_first_model_else_zero() -> None:
    upload = {name: torch.zeros(2) for name in ("a", "head/b", "buffer/c", "d", "e", "statement/a")}
    received = {"a": numbers(1, 2), "b": numbers(3, 4), "c": torch.tensor([[1.0, 2], [3, 4], [9, 9]])}
    received["valid"] = torch.tensor([True, True, False])
    first = {"d": numbers(5, 6), "a": numbers(7, 7)}
    known = reference(upload, received, lambda: first)
    assert {name: tensor.tolist() for name, tensor in known.items()} == {
        "a": [1, 2],
        "head/b": [3, 4],
        "buffer/c": [2, 3],  # the mean of the valid ones
        "d": [5, 6],
        "e": [0, 0],
        "statement/a": [0, 0],
    }


def test_a_first_model_of_another_shape_is_no_reference() -> None:
    upload, first = {"w": numbers(1.0, 2.0), "head/v": numbers(3.0)}, {"w": numbers(5.0, 5.0, 5.0), "v": numbers(4.0)}
    known = reference(upload, {}, lambda: first)
    assert {name: own.tolist() for name, own in known.items()} == {"w": [0.0, 0.0], "head/v": [4.0]}


def test_with_no_valid_model_the_reference_is_the_first_one() -> None:
    received = {"a": torch.zeros(2, 3), "valid": torch.tensor([False, False])}
    assert reference({"a": torch.zeros(3)}, received, lambda: {"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]


# Every method: another data set moves what leaves, apart from its noise, by 2·clip at most.


def make_recipe(method: Method, model: Model) -> RunContext:
    return RunContext(method, model, TRAINING, rounds=3, seed=0)


def history(method: Method, model: Model, federation: Federation, settings: EngineSettings) -> list[Download]:
    """What the server sent before each of three rounds of a protected run, step by step."""
    recipe = make_recipe(method, model)
    data = [place(federation, k) for k in range(len(federation.clients))]
    own = {k: recipe.first_model(one.name, settings.init) for k, one in enumerate(data)}
    server = Server(method, torch.tensor([one.samples for one in data]), stack(list(own.values())))
    downloads = [server.download]
    for number in (1, 2, 3):
        uploads = []
        for k, one in enumerate(data):
            own[k], sent, _ = one_round(LocalClient(recipe, one), own[k], downloads[-1], k, number, settings)
            uploads.append(sent)
        server.mailbox.receive(range(len(data)), stack(uploads), number)
        downloads.append(server.combine(number))
    return downloads[:-1]


def one_round(
    client: LocalClient, own: Params, download: Download, k: int, number: int, settings: EngineSettings
) -> tuple[Params, Params, Params]:
    """The model after a client's round, what leaves it, and the model the round started from."""
    received, position = download.to(k), download.position(k)
    start = client.personalise(own, received, position, number - 1)[0] if number > 1 else own
    trained = client.train(start, received, position, number)
    upload = client.upload(trained, start, received, position, number)
    sent = process(stack([upload]), {}, [client.data.name], number, client.context, settings, lambda k: received)
    return trained, row(sent, 0), start


def replay(
    client: LocalClient, downloads: list[Download], settings: EngineSettings
) -> list[tuple[Params, Params, Params]]:
    """The first client's rounds on what the server sent in another course of events."""
    own, found = client.context.first_model(client.data.name, settings.init), []
    for number, download in enumerate(downloads, 1):
        own, sent, start = one_round(client, own, download, 0, number, settings)
        found.append((own, sent, start))
    return found


def other_data(client: Client) -> Client:
    """As many samples with nothing in common with the client's own: inverted images, other labels."""

    def other(part: Split) -> Split:
        return Split(255 - part.x.flip(0), (3 - part.y).clamp(min=0))

    return Client(client.name, other(client.train), other(client.validation), other(client.test))


def distance(one: Params, other: Params) -> float:
    return sum(float((one[name].double() - other[name].double()).square().sum()) for name in one) ** 0.5


@pytest.mark.parametrize(
    ("name", "init"),
    [
        *((name, "common") for name in sorted(set(Method.registry) - {*NOT_COVERED, "local", "pooled"})),
        ("fedavg", "independent"),
        ("fedc2i", "independent"),
    ],
)
def test_other_data_moves_an_upload_by_twice_the_clip_at_most(
    name: str, init: Any, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    method, model = Method.registry[name](), make_model(batch_norm=name == "fedbn")
    federation = make_federation(sizes=(12, 9, 7), validation=3)
    settings = EngineSettings(rounds=3, **vars(TRAINING), init=init, clip=0.01, noise=0.7)
    check(method, model, federation, settings)
    downloads = history(method, model, federation, settings)
    changed = ClientData.place(other_data(federation.clients[0]), len(federation.classes), CPU)
    clients = [LocalClient(make_recipe(method, model), data) for data in (place(federation), changed)]
    for (mine, sent, _), (yours, other, _) in zip(*(replay(one, downloads, settings) for one in clients), strict=True):
        assert distance(mine, yours) > 0.02  # the models themselves are further apart
        moved = distance(sent, other)  # the noise, drawn from the seed, is the same in both
        assert 0 < moved <= 0.02 * (1 + 1e-3)  # rounding to float32


def test_a_start_that_saw_data_would_be_no_reference(model: Model, make_federation: Callable[..., Federation]) -> None:
    """Why the reference is not the start: with it, FedC²I's uploads move further than the noise was made for."""
    federation, settings = (
        make_federation(sizes=(12, 9, 7)),
        EngineSettings(rounds=3, **vars(TRAINING), clip=0.01, noise=0.7),
    )
    downloads = history(FedC2I(), model, federation, replace(settings, clip=0.0, noise=0.0))
    changed = ClientData.place(other_data(federation.clients[0]), len(federation.classes), CPU)
    ends = []
    for data in (place(federation), changed):
        client = LocalClient(make_recipe(FedC2I(), model), data)
        trained, _, start = replay(client, downloads, replace(settings, clip=0.0, noise=0.0))[1]
        ends.append(clip_and_noise(trained, start, 0.01, 0.0, no_noise))
    assert distance(*ends) > 0.02 * 2


# Whole runs.


@pytest.mark.parametrize("method", [FedAvg(), FedC2I()], ids=["fedavg", "fedc2i"])
def test_looped_and_stacked_draw_the_same_noise(method: Method, model: Model, federation: Federation) -> None:
    private = {"rounds": 3, "clip": 0.5, "noise": 0.2, "clients_per_round": 2}
    looped, _ = run(method, model, federation, **private)
    stacked, _ = run(method, model, federation, executor="stacked", **private)
    bare, _ = run(method, model, federation, rounds=3, clients_per_round=2)
    for name, want in looped.received.items():
        assert torch.dist(stacked.received[name], want) <= 1e-4 * want.norm() + 1e-6
        assert torch.dist(bare.received[name], want) > 0.1


@pytest.mark.parametrize("method", [FedAvg(), FedC2I(), Local()], ids=["fedavg", "fedc2i", "local"])
def test_a_bound_that_nothing_reaches_changes_no_bit(method: Method, model: Model, federation: Federation) -> None:
    plain, _ = run(method, model, federation)
    bounded, _ = run(method, model, federation, clip=1e6)
    assert all(torch.equal(bounded.trained[name], want) for name, want in plain.trained.items())


def test_what_arrives_is_within_the_clip_of_what_was_sent(model: Model, federation: Federation) -> None:
    """With a clip next to nothing, everyone's model stays where the first one was."""
    held, _ = run(FedC2I(), model, federation, rounds=3, clip=1e-4)
    first = model.init(0, "init")
    for k in range(len(federation.clients)):
        assert distance(row(held.received, k), first) <= 3e-4 * (1 + 1e-2)


# What is refused.


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (FedProto(), "class_present"),
        (FedProto(weighting="counts"), "class_counts"),
        (FedC2ITopK(k=1), "influence_vector, influence_matrix"),
        *((Method.registry[name](), "do not cover") for name in NOT_COVERED),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_what_clipping_does_not_cover_is_refused(
    method: Method, says: str, model: Model, federation: Federation
) -> None:
    check(method, model, federation, EngineSettings())
    with pytest.raises(UserError, match=says) as caught:
        check(method, model, federation, EngineSettings(clip=1.0))
    assert "\n" not in str(caught.value)


def test_a_site_refuses_to_send_what_is_not_covered() -> None:
    upload = {"prototypes": torch.zeros(3), "class_counts": torch.tensor([1, 2])}
    with pytest.raises(UserError, match="do not cover class_counts"):
        clip_and_noise(upload, upload, 1.0, 1.0, no_noise)


def test_noise_on_running_variances_is_refused(make_model: Callable[..., Model], federation: Federation) -> None:
    model = make_model(batch_norm=True)
    check(FedAvg(), model, federation, EngineSettings(clip=1.0))
    check(Method.registry["fedbn"](), model, federation, EngineSettings(clip=1.0, noise=1.0))
    with pytest.raises(UserError, match="BatchNorm statistics of model 'tiny'"):
        check(FedAvg(), model, federation, EngineSettings(clip=1.0, noise=1.0))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clip": -1.0}, "clip must be"),
        ({"clip": math.inf}, "clip must be"),
        ({"clip": math.nan}, "clip must be"),
        ({"clip": 1.0, "noise": -0.1}, "noise must be"),
        ({"noise": 1.0}, "in units of clip"),
    ],
    ids=str,
)
def test_bad_bounds_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        EngineSettings(**settings)  # type: ignore[arg-type]


def test_noise_of_a_secret_is_finite_and_symmetric_to_its_last_bit() -> None:
    ends = normal(bytes(8) + b"\xff" * 8)
    assert torch.isfinite(ends).all()
    assert ends[0] == -ends[1]
    steps = np.arange(2**64 - 5 * 2**12, 2**64, 2**12, dtype=np.uint64)  # neighbours at the upper end
    assert (normal(steps.astype("<u8").tobytes()).diff() > 0).all()


def test_without_a_valid_model_every_client_is_held_against_its_own_first_one(model: Model) -> None:
    """As a site does, which knows no other client; with initial models of their own these differ."""
    recipe, settings = RunContext(FedAvg(), model, TRAINING, 1, 0), EngineSettings(init="independent", clip=1e-9)
    upload = recipe.first_model("z", "independent")
    relayed = {name: torch.stack([tensor, tensor]) for name, tensor in upload.items()}
    for flags in ((False, False), (True, False)):
        received = {**relayed, "valid": torch.tensor(flags)}
        sent = protect(stack([upload] * 2), ("a", "b"), 1, recipe, settings, lambda k, all=received: all)
        for k, client in enumerate(("a", "b")):
            known = upload if any(flags) else recipe.first_model(client, "independent")
            for name, tensor in known.items():
                torch.testing.assert_close(row(sent, k)[name], tensor, rtol=0, atol=1e-6)


def test_clients_of_a_round_are_held_against_their_own_mail_and_get_noise_of_their_own(model: Model) -> None:
    recipe, settings = RunContext(FedAvg(), model, TRAINING, 5, 7), EngineSettings(clip=0.5, noise=2.0)
    mail = [{"w": numbers(1.0, 2.0, 3.0)}, {"w": numbers(-4.0, 0.0, 9.0)}]
    for number in (1, 2):
        sent = protect(stack(mail), ("a", "b"), number, recipe, settings, mail.__getitem__)["w"]
        for k, client in enumerate(("a", "b")):
            noise = from_seed(7, client, number)(3)
            torch.testing.assert_close(sent[k], (mail[k]["w"] + 2.0 * 0.5 * noise).float())
