"""Checkpoints to start from: what is taken, and that tensors which do not fit are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.data.federation import InputSpec
from fedc2i.models import networks, weights
from fedc2i.models.model import Model, split
from support.helpers import blank_federation

IMAGE = InputSpec((3, 16, 16))


def saved(path: Path, model: Model, seed: int = 5, **other: Tensor) -> dict[str, Tensor]:
    """Writes a model drawn with another seed; tensors in ``other`` are written in place of its own."""
    tensors = model.init(seed) | {name.replace("__", "."): tensor for name, tensor in other.items()}
    save_file(tensors, path)
    return tensors


def test_all_seeds_start_from_the_file(tmp_path: Path) -> None:
    model = networks.build("lenet5-bn", 3, IMAGE)
    tensors = saved(tmp_path / "own.safetensors", model)
    started = weights.given_to(model, str(tmp_path / "own.safetensors"))
    for seed in (0, 1):
        own = started.init(seed)
        assert all(torch.equal(own[name], tensor) for name, tensor in tensors.items())


def test_a_head_for_other_classes_stays_fresh(tmp_path: Path) -> None:
    model, other = networks.build("lenet5", 3, IMAGE), networks.build("lenet5", 7, IMAGE)
    tensors = saved(tmp_path / "own.safetensors", other)
    for path in (tmp_path / "own.safetensors", tmp_path / "body.safetensors"):
        started = weights.given_to(model, str(path)) if path.exists() else None
        if started is None:  # no head at all
            save_file({name: tensor for name, tensor in tensors.items() if name not in model.head_names}, path)
            started = weights.given_to(model, str(path))
        zero, one = started.init(0), started.init(1)
        assert torch.equal(zero["fc3.weight"], model.init(0)["fc3.weight"])
        assert not torch.equal(zero["fc3.weight"], one["fc3.weight"])
        assert all(torch.equal(zero[name], tensors[name]) for name in model.body_names)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model, path = networks.build("lenet5", 3, IMAGE), tmp_path / "own.safetensors"
    tensors = model.init(0) | {"conv1.weight": torch.zeros(6, 1, 5, 5), "extra.bias": torch.zeros(2)}
    del tensors["fc1.bias"]
    save_file(tensors, path)
    with pytest.raises(
        UserError,
        match=r"own.safetensors: its tensors do not fit the model; missing: fc1.bias; not in the model: extra.bias; of "
        r"another shape: conv1.weight 6x1x5x5, in the model 6x3x5x5$",
    ):
        weights.given_to(model, str(path))


def test_files_that_are_missing_or_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))
    model = networks.build("lenet5", 3, IMAGE)
    with pytest.raises(UserError, match=r"no such file; put it there, or at .*cache/weights/own.safetensors$"):
        weights.given_to(model, "some/own.safetensors")
    with pytest.raises(UserError, match=r"ending in .safetensors$"):
        weights.given_to(model, "own.pth")
    (tmp_path / "cache" / "weights").mkdir(parents=True)
    (tmp_path / "cache" / "weights" / "own.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        weights.given_to(model, "some/own.safetensors")
    saved(tmp_path / "cache" / "weights" / "own.safetensors", model)
    weights.given_to(model, "some/own.safetensors")


def test_a_run_names_the_file_by_its_content(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4), nn.ReLU(), nn.Linear(4, 3))
    model = split(net)
    assert model.head_layer == "3"  # found by itself
    for name in ("one", "two"):
        saved(tmp_path / f"{name}.safetensors", model)
    files = [str(tmp_path / f"{name}.safetensors") for name in ("one", "two")]
    configs = [
        fedc2i.run("local", blank_federation("ab"), model=model, weights=file, rounds=1).config for file in files
    ]
    assert configs[0].decisive()["weights"] == configs[1].decisive()["weights"]
    assert len(configs[0].decisive()["weights"]) == 64
