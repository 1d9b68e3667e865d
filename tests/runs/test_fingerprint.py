"""What decides numbers: another setting, data, code, version or device is another key; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedc2i import Federation, Model, UserError
from fedc2i.runs import fingerprint
from fedc2i.runs.fingerprint import Fingerprint, cache_key, code_digest
from fedc2i.runs.plan import Plan, prepare

NET = """
from torch import nn
import fedc2i

def net(classes, image):
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 5), nn.Tanh(), nn.Linear(5, classes))
    return fedc2i.split(build, head="3", name="net")
"""


@pytest.fixture
def plan(federation: Federation, model: Model) -> Callable[..., Plan]:
    def make(method: str = "fedc2i", data: Federation = federation, **settings: Any) -> Plan:
        own = None if "model" in settings else model
        return prepare([method], {"rounds": 2, "epochs": 1, "device": "cpu", **settings}, data, own)[0]

    return make


def key(planned: Plan) -> str:
    return cache_key(planned.config, planned.federation)


@pytest.mark.parametrize(
    "changed",
    [
        {"gamma": 2.0},
        {"influence": "first-order"},
        {"rounds": 3},
        {"lr": 1e-2},
        {"epochs": 2},
        {"clients_per_round": 2},
        {"executor": "looped"},
    ],
    ids=str,
)
def test_another_setting_is_another_key(plan: Callable[..., Plan], changed: dict[str, Any]) -> None:
    assert key(plan(**changed)) != key(plan())


def test_another_method_or_data_is_another_key(plan: Callable[..., Plan], federation: Federation) -> None:
    assert key(plan("local")) != key(plan("fedavg"))  # whose options are equal
    first, *others = federation.clients
    relabelled = replace(first, test=replace(first.test, y=first.test.y.roll(1)))
    moved = replace(first, train=replace(first.train, x=first.train.x.clone()))
    moved.train.x[0, 0, 0, 0] ^= 1
    changed = (relabelled, moved, replace(first, name="other"))
    datas = [federation, *(replace(federation, clients=(client, *others)) for client in changed)]
    assert len({key(plan(data=data)) for data in datas}) == 4


def test_another_version_code_or_device_is_another_key(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, here = plan(), fingerprint.versions()
    keys = [key(planned)]
    changes: list[tuple[Any, str, Any]] = [
        (fingerprint, "versions", lambda: {**here, "fedc2i": "0.0"}),
        (fingerprint, "versions", lambda: {**here, "torch": "0.0"}),
        (fingerprint, "code_digest", lambda: "other"),
        (type(planned.config), "torch_device", lambda _: torch.device("cuda")),
    ]
    for owner, name, other in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            keys.append(key(planned))
    assert len(set(keys)) == 5


def test_another_triton_is_another_key_on_a_gpu_only(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan()
    here = {name: version for name, version in fingerprint.versions().items() if name != "triton"}
    found: dict[str, list[str]] = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(type(planned.config), "torch_device", lambda _, device=device: torch.device(device))
        for more in ({}, {"triton": "3.6.0"}, {"triton": "3.7.1"}):
            monkeypatch.setattr(fingerprint, "versions", lambda more=more: {**here, **more})
            found.setdefault(device, []).append(key(planned))
    assert len({*found["cpu"]}) == 1
    assert len({*found["cuda"]}) == 3


@pytest.mark.parametrize(
    ("was", "now", "refused"),
    [
        (("cuda", "3.6.0"), ("cuda", "3.6.0"), False),
        (("cuda", "3.6.0"), ("cuda", "3.7.1"), True),
        (("cuda", "3.6.0"), ("cuda", None), True),
        (("cuda", "3.6.0"), ("cpu", None), False),  # another device is asked for by the user
        (("cpu", None), ("cpu", "3.6.0"), False),
    ],
)
def test_a_run_on_a_gpu_resumes_with_its_triton_only(
    was: tuple[str, str | None], now: tuple[str, str | None], refused: bool, tmp_path: Path
) -> None:
    def made(device: str, triton: str | None) -> Fingerprint:
        return Fingerprint("{}", {}, {"torch": "2.13", **({"triton": triton} if triton else {})}, device)

    if not refused:
        made(*was).refuse_others(made(*now), tmp_path)
        return
    with pytest.raises(UserError, match=f"started with triton {was[1]}, and here is {now[1] or 'none'}, which may"):
        made(*was).refuse_others(made(*now), tmp_path)


def test_another_content_of_a_file_is_another_key(plan: Callable[..., Plan], tmp_path: Path) -> None:
    who, net = tmp_path / "who", tmp_path / "net.py"
    keys = []
    for lines in ("a: b\nb: c\nc: a\n", "a: c\nb: c\nc: a\n", "a: b\nb: c\nc: a\n"):
        who.write_text(lines)
        keys.append(key(plan(topology=str(who))))
    assert keys[0] == keys[2] != keys[1]
    net.write_text(NET)
    planned = plan(model=f"{net}:net")
    before = key(planned)
    assert key(planned) == before
    net.write_text(NET + "\n")
    assert key(planned) != before


def test_place_of_the_data_seeds_and_notes_do_not_matter(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    planned = plan()
    config, noted = planned.config, replace(planned.federation, notes=("a stand-in",), averages={"Avg-1": ("a",)})
    same = [
        replace(planned, config=replace(config, data_dir="/elsewhere")),
        replace(planned, config=replace(config, device="auto")),
        replace(planned, federation=noted),
        plan(seeds="0-5"),
    ]
    assert {key(one) for one in same} == {key(planned)}


def write_package(root: Path, **changed: str) -> Path:
    """A package with one module in each of its rooms; ``changed`` are the rooms whose module says something else."""
    for room in ("core", "data", "models", "training", "methods", "engine", "runs", "report"):
        (root / room).mkdir(parents=True)
        (root / room / "one.py").write_text(changed.get(room, '"""About it."""\n\ndef f(x):\n    return x\n'))
    return root


def test_code_that_decides_numbers_counts_and_nothing_else(tmp_path: Path) -> None:
    before = code_digest(write_package(tmp_path / "before"))
    for room in ("core", "data", "models", "training", "methods", "engine"):
        changed = write_package(tmp_path / room, **{room: "def f(x):\n    return x + 1\n"})
        assert code_digest(changed) != before
    commented = '"""Other words."""\n\ndef f(x):\n    """More."""\n    return x  # why\n'
    changed = write_package(tmp_path / "same", core=commented, runs="def f(x): return 2", report="g = 1")
    assert code_digest(changed) == before


def test_a_file_of_the_method_that_is_gone_is_refused_as_a_changed_one(tmp_path: Path) -> None:
    was = Fingerprint('{"method": "own.py:Mine"}', {}, {}, "cpu", files={"method": "ab"})
    was.refuse_others(was, tmp_path)
    for other in ({}, {"method": "cd"}):
        with pytest.raises(UserError, match=r"own\.py, where its method comes from, is not what it was"):
            was.refuse_others(replace(was, files=other), tmp_path)
