"""How sites learn what a run is: whatever can be planned is understood, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr.app")
from fedc2i import __version__
from fedc2i.core.errors import UserError
from fedc2i.core.options import names
from fedc2i.data.federation import InputSpec
from fedc2i.data.remote import RemoteFederation, blank_clients
from fedc2i.deploy.run_description import describe, fingerprint, own_files, reject_local_imports, understand
from fedc2i.methods.base import Method
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.settings import RunSettings

OWN_METHOD = """
from dataclasses import dataclass
from fedc2i import Method, option

@dataclass(frozen=True)
class Shy(Method):
    name = "shy"
    title = "Shy"
    about = "made up"
    shyness: float = option(0.5, "how shy")
"""
OWN_MODEL = """
from torch import nn
import fedc2i

def tiny(classes, image_shape):
    def build():
        net = nn.Sequential()
        net.add_module("flat", nn.Flatten())
        net.add_module("hidden", nn.Linear(image_shape[0] * image_shape[1] * image_shape[2], WIDTH))
        net.add_module("head", nn.Linear(WIDTH, classes))
        return net
    return fedc2i.split(build, head="head", name="tiny")
"""


def plan(method: str = "fedavg", **more: Any) -> Plan:
    federation = RemoteFederation("sites", blank_clients(("a", "b"), InputSpec((3, 16, 16))), ("no", "yes", "λ"))
    return prepare([method], {"model": "lenet5", "rounds": 3, "engine": "flower", **more}, federation)[0]


def assert_understood(planned: Plan, seed: int = 5, root: Path | None = None) -> None:
    assignment, classes = understand(describe(planned, seed), root)
    context, wanted = assignment.context, planned.config
    assert classes == planned.federation.classes
    assert vars(context.method) == vars(planned.method)
    assert (context.seed, context.rounds) == (seed, wanted.rounds)
    for name in set(names(RunSettings, scope="run")) - {"method", "seeds", "attack"}:
        assert getattr(assignment.settings, name) == getattr(wanted, name)
    own = replace(context, method=planned.method, model=planned.model).first_model("x", "common")
    for name, tensor in context.first_model("x", "common").items():
        assert torch.equal(tensor, own[name])


@pytest.mark.parametrize("name", [name for name, own in sorted(Method.registry.items()) if not own.pools_data])
def test_every_method_is_understood(name: str) -> None:
    assert_understood(plan(name, model="lenet5-bn" if name == "fedbn" else "lenet5"))


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedc2i:gamma=2,influence=first-order", {}),
        ("fedc2i:gamma=ramp(10)", {"gamma_class": "perplexity(1.5)"}),
        ("fedc2i:gamma=scaled(3)", {"influence_samples": "all"}),
        ("fedc2i-top-k", {"k": 1, "refresh": 3}),
        ("fedprox", {"mu": 0.01}),
        ("fedavg", {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, "drop_last": True}),
        ("fedavg", {"epochs": 3, "batch_size": 7, "init": "independent", "clients_per_round": "50%"}),
        ("fedavg", {"clients_per_round": 1, "evaluate_every": 2, "patience": 3, "topology": "ring", "threads": 2}),
        ("fedavg", {"seeds": "0-9", "wire": "float16", "deadline": 5, "min_sites": 2}),
        ("fedavg", {"device": "cpu"}),
    ],
    ids=str,
)
def test_options_and_settings_are_understood(method: str, more: dict[str, Any]) -> None:
    assert_understood(plan(method, **more))


def test_settings_of_the_coordinators_machine_do_not_travel() -> None:
    text = describe(plan(seeds="7-9", device="cpu"), 8)
    said = json.loads(text)
    assert not {"data", "data_dir", "device", "seeds", "executor", "workers"} & said["settings"].keys()
    assert said["seed"] == 8


# A user's own files.


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A user's folder with a method and a model, and a Flower App that holds both."""
    monkeypatch.setattr(Method, "registry", dict(Method.registry))
    mine, app = tmp_path / "my.work", tmp_path / "app"
    mine.mkdir()
    (mine / "both.py").write_text(OWN_METHOD)
    (mine / "other.py").write_text(OWN_MODEL.replace("WIDTH", "4"))
    method, model = f"{mine}/both.py:Shy:shyness=0.25", f"{mine}/other.py:tiny"
    for place, source in own_files(method, model).items():
        (app / place).parent.mkdir(parents=True, exist_ok=True)
        (app / place).write_bytes(source.read_bytes())
    return mine, app


def test_own_files_are_understood_from_the_app_alone(own: tuple[Path, Path]) -> None:
    mine, app = own
    planned = plan(f"{mine}/both.py:Shy:shyness=0.25", model=f"{mine}/other.py:tiny")
    text = describe(planned, 1)
    assert str(mine) not in text
    for path in mine.glob("*.py"):
        path.unlink()
    del Method.registry["shy"]  # a site is another process
    assignment, _ = understand(text, app)
    assert vars(assignment.context.method)["shyness"] == 0.25
    assert type(assignment.context.method).__name__ == "Shy"
    assert fingerprint(assignment.context.model.init(1)) == fingerprint(planned.model.init(1))


def test_which_files_an_app_needs(tmp_path: Path) -> None:
    assert own_files("fedavg", None) == own_files("fedc2i:gamma=2", "lenet5") == {}
    both = own_files("a/m.py:X:lr=1,mode=b", "m.py:net")
    assert both == {"plugins/method_m.py": Path("a/m.py"), "plugins/model_m.py": Path("m.py")}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import losses", "losses"),
        ("import torch, losses.near as near", "losses"),
        ("from losses import near", "losses"),
        ("def late():\n    from parts import one", "parts"),
        ("from .losses import near", ".losses"),
        ("from . import losses", ".losses"),
    ],
)
def test_a_file_that_needs_another_beside_it_is_refused_before_anything_starts(
    line: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "losses.py").write_text("near = 1")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "one.py").write_text("")
    own = tmp_path / "own.py"
    own.write_text(f"{line}\n{OWN_METHOD}")
    for method, model in ((f"{own}:Shy:shyness=0.25", None), ("fedavg", f"{own}:tiny")):
        with pytest.raises(UserError) as refused:
            reject_local_imports(method, model)
        assert f"{own}: imports '{name}' from beside it" in str(refused.value)


def test_a_file_that_imports_what_is_installed_may_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies beside it by the same name: the standard library and installed packages come first."""
    for name in ("json", "numpy", "fedc2i"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "notes").mkdir()  # no module
    own = tmp_path / "own.py"
    own.write_text(f"import json, numpy, torch.nn, not_there\nimport notes\n{OWN_METHOD}")
    reject_local_imports(f"{own}:Shy", f"{own}:tiny")
    own.write_text("this is no Python")
    reject_local_imports(f"{own}:Shy", str(tmp_path / "missing.py:tiny"))  # said by whoever loads them
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lonely.py").write_text("")
    own.write_text("import lonely")  # found from here, but at no site
    with pytest.raises(UserError, match="imports 'lonely' from beside it"):
        reject_local_imports(f"{own}:Shy", None)
    (tmp_path / "lonely-1.0.dist-info").mkdir()
    (tmp_path / "lonely-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: lonely\nVersion: 1.0\n")
    (tmp_path / "lonely-1.0.dist-info" / "top_level.txt").write_text("lonely\n")
    reject_local_imports(f"{own}:Shy", None)  # installed, and so it may be at the sites


def test_an_own_model_of_another_shape_or_a_missing_one_is_rejected(own: tuple[Path, Path]) -> None:
    mine, app = own
    text = describe(plan(model=f"{mine}/other.py:tiny"), 1)
    (app / "plugins" / "model_other.py").write_text(OWN_MODEL.replace("WIDTH", "5"))
    with pytest.raises(UserError, match=r"model_other\.py:tiny' has another architecture"):
        understand(text, app)
    (app / "plugins" / "model_other.py").unlink()
    with pytest.raises(UserError, match=r"model_other\.py: no such file$"):
        understand(text, app)


@pytest.mark.parametrize("part", ["method", "model"])
def test_only_files_of_the_app_are_executed(own: tuple[Path, Path], part: str, tmp_path: Path) -> None:
    mine, app = own
    (tmp_path / "evil.py").write_text(f"raise SystemExit(open({str(tmp_path / 'done')!r}, 'w'))")
    said = json.loads(describe(plan(f"{mine}/both.py:Shy", model=f"{mine}/other.py:tiny"), 1))
    for root, place in (
        (app, f"{tmp_path}/evil.py:X"),
        (app, "../evil.py:X"),
        (app, "plugins/../../evil.py:X"),
        (app, "plugins/sub/evil.py:X"),
        (None, f"{tmp_path}/evil.py:X"),
        (None, "plugins/method_both.py:Shy"),
    ):
        said["settings"][part] = place
        with pytest.raises(UserError, match=r"is no file of this run's Flower App$"):
            understand(json.dumps(said), root)
    assert not (tmp_path / "done").exists()


# What a site cannot do.

WHOLE = json.loads(describe(plan(), 0))
OTHER_MODEL = "its model 'lenet5' has another architecture than the coordinator's"


def settings_with(**more: Any) -> dict[str, Any]:
    return {"settings": {**WHOLE["settings"], **more}}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"version": "99.1.0"}, f"this site has fedc2i {__version__}, the coordinator 99.1.0"),
        ({"classes": ["a", "b"]}, OTHER_MODEL),
        ({"input": {"shape": [3, 20, 20], "dtype": "uint8"}}, OTHER_MODEL),
        ({"fingerprint": "0" * 12}, OTHER_MODEL),
        (settings_with(method="nosuch"), "'nosuch'"),
        (settings_with(model="nosuch"), "nosuch"),
        (settings_with(future=1), "unknown setting 'future'"),
        (settings_with(options={"future": 1}), "unknown setting 'future'"),
        (settings_with(lr="fast"), "lr must be a finite number above 0, got 'fast'"),
        (settings_with(rounds=0), "rounds must be"),
    ],
    ids=lambda own: str(own)[-30:],
)
def test_what_does_not_fit_this_site_is_named(more: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        understand(json.dumps({**WHOLE, **more}))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_only_the_last_digit_of_a_version_may_differ() -> None:
    major, minor, *_ = __version__.split(".")
    assert understand(json.dumps({**WHOLE, "version": f"{major}.{minor}.99"}))[1] == ("no", "yes", "λ")


def test_what_is_no_description_is_refused_in_a_line() -> None:
    texts = ["null", "[]", "3", "{", '"text"', "{}", "[" * 10**5, '{"settings": 3}', "\x00", '{"settings": {}}', ""]
    for text in texts:
        with pytest.raises(UserError, match=r"^the run's description is not valid \(\w+: .+\)$"):
            understand(text)


JUNK = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda own: st.lists(own, max_size=2) | st.dictionaries(st.text(max_size=3), own, max_size=2),
    max_leaves=3,
)


@settings(max_examples=60)
@given(st.sampled_from([name for name in WHOLE if name != "seed"]), JUNK)
def test_any_part_that_is_something_else_is_refused_in_a_line(part: str, value: Any) -> None:
    assume(value != WHOLE[part])
    with pytest.raises(UserError) as refused:
        understand(json.dumps({**WHOLE, part: value}))
    assert "\n" not in str(refused.value)
