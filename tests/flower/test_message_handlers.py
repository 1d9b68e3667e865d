"""A site: which data it has, how its labels are numbered, and that every error becomes one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr.app")
from fakes import identity, sent  # noqa: F401
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedc2i import Federation
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Client, Split
from fedc2i.deploy import client_app
from fedc2i.deploy.client_app import app_in, home_of
from fedc2i.deploy.run_description import describe, understand
from fedc2i.deploy.site_folder import make_site
from fedc2i.flower import wire
from fedc2i.flower.message_format import Answer, Introduction, Task
from fedc2i.flower.site import ContextMemory, FolderMemory, Home, make_app
from fedc2i.runs.plan import Plan, prepare
from support.helpers import write_arrays

EMPTY = wire.pack({})


def context(run: dict[str, Any] | None = None, **node: Any) -> Context:
    return Context(1, 7, node, RecordDict(), dict(run or {}))


def refusal(content: RecordDict, kind: Any = Answer) -> str:
    with pytest.raises(UserError) as refused:
        kind.from_record(content)
    assert str(refused.value).isprintable()
    return str(refused.value)


def ask(app: ClientApp, kind: str, content: RecordDict, where: Context) -> RecordDict:
    message = Message(content, 7, kind)
    message.metadata.__dict__["_message_id"] = "1"
    return sent(app(message=sent(message), context=where)).content


def greet(app: ClientApp, where: Context) -> RecordDict:
    return ask(app, "query", RecordDict({"greeting": ConfigRecord({})}), where)


# Labels.


def home(classes: tuple[str, ...], labels: list[int]) -> Home:
    def split(y: list[int]) -> Split:
        return Split(torch.zeros(len(y), 3, 16, 16, dtype=torch.uint8), torch.tensor(y, dtype=torch.int64))

    return Home(Client("a", split(labels), split([]), split(labels[::-1])), classes)


@pytest.mark.parametrize(
    ("run", "labels", "counts"),
    [
        (("cat", "dog"), [0, 1, 1], [1, 2]),
        (("dog", "cat"), [1, 0, 0], [2, 1]),
        (("ant", "dog", "bee", "cat"), [3, 1, 1], [0, 2, 0, 1]),
    ],
)
def test_labels_are_numbered_by_the_runs_classes(run: tuple[str, ...], labels: list[int], counts: list[int]) -> None:
    site = home(("cat", "dog"), [0, 1, 1])
    own = site.data(run)
    assert (own.name, own.train.y.tolist(), own.counts.tolist()) == ("a", labels, counts)
    assert (own.test.y.tolist(), own.validation.y.tolist()) == (labels[::-1], [])
    assert site.client.train.y.tolist() == [0, 1, 1]  # its own data stays unchanged


def test_a_class_that_the_run_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match=r"^the run has no class cow, eel; it has cat, dog$"):
        home(("cat", "cow", "eel"), [0, 1]).data(("cat", "dog"))


# Where the data is.


@pytest.fixture
def arrays(tmp_path: Path, make_federation: Callable[..., Federation]) -> str:
    """Clients a, b and c as files."""
    return write_arrays(tmp_path / "arrays", make_federation((12, 9, 7), validation=4))


def test_a_node_may_be_one_client_of_the_runs_data(arrays: str) -> None:
    for number, (name, size) in enumerate([("a", 12), ("b", 9), ("c", 7)]):
        found = home_of(context({"data": arrays, "data-dir": ""}, **{"partition-id": number, "num-partitions": 3}))
        told = found.introduction()
        assert (told.name, told.samples["train"], told.samples["validation"]) == (name, size, 4)
        assert told.image == (3, 16, 16)
        assert len(told.classes) == 4
        assert found.state is None
        assert isinstance(found.memory(context(), "run"), ContextMemory)


@pytest.mark.parametrize("number", [3, 99, -1])
def test_a_partition_that_is_not_there_is_named(arrays: str, number: int) -> None:
    with pytest.raises(UserError, match=rf"has 3 clients, and no partition {number}$"):
        home_of(context({"data": arrays}, **{"partition-id": number}))


@pytest.mark.parametrize(
    ("run", "node"),
    [({}, {}), ({"data": "embedded"}, {}), ({}, {"partition-id": 0}), ({"data": ""}, {"partition-id": 0})],
)
def test_a_node_with_neither_folder_nor_partition_is_rejected(run: dict[str, Any], node: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^this node has no site folder; start it with `fedc2i site start`, or name"):
        home_of(context(run, **node))


def test_a_site_folder_comes_before_a_partition(tmp_path: Path, arrays: str) -> None:
    make_site(tmp_path / "site", "north", "embedded", "localhost:9092", client="Scans", check=False)
    found = home_of(context({"data": arrays}, **{"site": str(tmp_path / "site"), "partition-id": 0}))
    told = found.introduction()
    assert told.name == "north"
    assert told.classes == tuple("0123456789")
    assert told.samples["train"] > 100
    memory = found.memory(context(), "run")
    assert isinstance(memory, FolderMemory)
    memory.save(1, {"w": torch.zeros(1)})
    assert [path.name for path in (tmp_path / "site" / "state").rglob("*.safetensors")] == ["round000001.safetensors"]


# Replies.


def planned(data: str, **more: Any) -> Plan:
    settings = {"model": "lenet5", "rounds": 2, "epochs": 1, "engine": "flower", "device": "cpu", **more}
    return prepare(["fedavg"], settings, data)[0]


def task(setup: str, run: str = "run", **more: Any) -> RecordDict:
    values = {"round": 1, "exchange": 0, "position": -1, "train": True, "half": False, **more}
    return Task(run=run, score_received=False, score_trained=True, setup=setup, **values).to_record(EMPTY, EMPTY)


def test_a_site_introduces_itself_and_does_its_part(arrays: str) -> None:
    app, where = app_in(), context({"data": arrays}, **{"partition-id": 1})
    assert Introduction.from_record(greet(app, where)).name == "b"
    plan = planned(arrays)
    answer = Answer.from_record(ask(app, "train", task(describe(plan, 0)), where))
    assert {name: own.shape for name, own in answer.upload.items()} == {
        name: own.shape for name, own in plan.model.init(0).items()
    }
    assert set(answer.metrics) == {"trained"}
    assert list(where.state) == ["run.1"]


def test_a_runs_description_is_read_once(arrays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = client_app.understand
    monkeypatch.setattr(client_app, "understand", lambda text, root: seen.append(text) or real(text, root))
    app, where, plan = app_in(), context({"data": arrays}, **{"partition-id": 2}), planned(arrays)
    for number in (1, 2):
        Answer.from_record(ask(app, "train", task(describe(plan, 0), round=number), where))
    Answer.from_record(ask(app, "train", task(describe(plan, 1), run="other"), where))
    assert [text == seen[0] for text in seen] == [True, False]


def test_every_error_becomes_one_line(arrays: str, tmp_path: Path) -> None:
    app, where = app_in(), context({"data": arrays}, **{"partition-id": 0})
    good = describe(planned(arrays), 0)
    nowhere = context({"data": f"arrays:{tmp_path / 'nowhere'}"}, **{"partition-id": 0})
    folder = context(site=str(tmp_path / "no-site"))
    make_site(tmp_path / "site", "north", arrays, "localhost:9092", client="b", check=False)
    lines = {
        refusal(ask(app, "train", RecordDict(), where)): "not a task of this version of fedc2i (KeyError: 'task')",
        refusal(ask(app, "train", task("{"), where)): "the run's description is not valid (JSONDecodeError",
        refusal(ask(app, "train", task(good), context())): "this node has no site folder",
        refusal(greet(app, context()), Introduction): "this node has no site folder",
        refusal(greet(app, nowhere), Introduction): "nowhere",
        refusal(greet(app, folder), Introduction): "no such file; `fedc2i site init` makes such a folder",
        refusal(
            ask(app, "train", task(good, run="../up"), context(site=str(tmp_path / "site")))
        ): "'../up' cannot name a run",
    }
    for got, want in lines.items():
        assert want in got


def test_images_that_the_model_does_not_fit_are_named(arrays: str) -> None:
    small = home(("0", "1", "2", "3"), [0, 1])
    tiny = Client("a", *(Split(own.x[:, :, :4, :4], own.y) for own in (small.client.train,) * 3))
    plan = planned(arrays)
    app = make_app(lambda _: Home(tiny, plan.federation.classes), lambda t: understand(t.setup))
    assert "lenet5" in refusal(ask(app, "train", task(describe(plan, 0)), context()))


def test_a_bug_is_named_and_its_traceback_stays_in_the_sites_log(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError("by\nnothing")

    app = make_app(broken, broken)
    assert refusal(greet(app, context()), Introduction) == "ZeroDivisionError: by nothing"
    assert "Traceback" in capsys.readouterr().err


def test_nothing_is_kept_of_a_task_that_failed(arrays: str) -> None:
    where, plan = context({"data": arrays}, **{"partition-id": 0}), planned(arrays)
    content = task(describe(plan, 0), exchange=1)
    content["shared"] = wire.pack({name: torch.zeros(1) for name in plan.model.init(0)})
    assert refusal(ask(app_in(), "train", content, where)).startswith("RuntimeError: ")
    assert list(where.state) == []
