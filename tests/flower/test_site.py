"""A site: its data, how its labels are numbered, the models it keeps, and that every error becomes one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr.app")
from fakes import identity, sent, site_app  # noqa: F401
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file

from fedc2i import Federation, load
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.data.federation import Client, Split
from fedc2i.data.scaling import Scaling
from fedc2i.deploy import client_app
from fedc2i.deploy.client_app import app_in, home_of
from fedc2i.deploy.run_description import describe, understand
from fedc2i.deploy.site_folder import make_site
from fedc2i.deploy.worker import site_home
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.flower import wire
from fedc2i.flower.message_format import Answer, Introduction, Task
from fedc2i.flower.site import Home, make_app
from fedc2i.flower.site_models import KEPT, ContextMemory, FolderMemory, Memory
from fedc2i.runs.plan import Plan, prepare
from support.helpers import write_arrays

EMPTY = wire.pack({})
NO_FOLDER = "this node has no partition-id, or the run no data; a site's folder needs"


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


# Its data.


def home(classes: tuple[str, ...], labels: list[int], side: int = 16) -> Home:
    def split(y: list[int]) -> Split:
        return Split(torch.zeros(len(y), 3, side, side, dtype=torch.uint8), torch.tensor(y, dtype=torch.int64))

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
    with pytest.raises(UserError, match=r"^the run has no class cow, eel; it has "):
        home(("cat", "cow", "eel"), [0, 1]).data(run)


def test_a_site_keeps_how_its_own_inputs_were_standardised() -> None:
    """What `fedc2i export` needs; of images nothing, as models scale them."""
    assignment: Any = SimpleNamespace(context=SimpleNamespace(seed=0), config="")
    data = load("heart")
    texts = Home(data.clients[1], data.classes).predictor(assignment, data.classes).texts
    stored = json.loads(texts["scaling.json"])["clients"]
    assert [*stored] == ["Hungary"]
    by = Scaling.from_json(stored["Hungary"])
    raw = load("heart", scale="none").clients[1].test.x
    assert torch.equal(by.apply(raw), data.clients[1].test.x)
    assert "scaling.json" not in home(("cat",), [0]).predictor(assignment, ("cat",)).texts


@pytest.fixture
def arrays(tmp_path: Path, make_federation: Callable[..., Federation]) -> str:
    """Clients a, b and c as files."""
    return write_arrays(tmp_path / "arrays", make_federation((12, 9, 7), validation=4))


def test_a_node_may_be_one_client_of_the_runs_data(arrays: str) -> None:
    for number, (name, size) in enumerate([("a", 12), ("b", 9), ("c", 7)]):
        found = home_of(context({"data": arrays, "data-dir": ""}, **{"partition-id": number, "num-partitions": 3}))
        told = found.introduction()
        assert (told.name, told.samples["train"], told.samples["validation"]) == (name, size, 4)
        assert (told.input.shape, len(told.classes)) == ((3, 16, 16), 4)
        assert isinstance(found.memory(RecordDict(), "run"), ContextMemory)
    for number in (3, 99, -1):
        with pytest.raises(UserError, match=rf"has 3 clients, and no partition {number}$"):
            home_of(context({"data": arrays}, **{"partition-id": number}))


@pytest.mark.parametrize(
    ("run", "node"),
    [({}, {}), ({"data": "digits"}, {}), ({}, {"partition-id": 0}), ({"data": ""}, {"partition-id": 0})],
)
def test_a_node_with_neither_folder_nor_partition_is_rejected(run: dict[str, Any], node: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{NO_FOLDER}"):
        home_of(context(run, **node))


def test_a_site_folder_is_no_node_of_another_federation(tmp_path: Path, arrays: str) -> None:
    make_site(tmp_path / "site", "north", arrays, "localhost:9092", client="a", check=False)
    with pytest.raises(UserError, match=f"^{NO_FOLDER}"):  # there nobody would check its policy
        home_of(context({}, site=str(tmp_path / "site")))
    found = site_home(tmp_path / "site")
    told = found.introduction()
    assert (told.name, told.classes) == ("north", tuple("0123"))
    found.memory(None, "run").save(1, {"w": torch.zeros(1)})
    assert [path.name for path in (tmp_path / "site" / "state").rglob("*.safetensors")] == ["round000001.safetensors"]


# Its replies.


def planned(data: str, **more: Any) -> Plan:
    settings = {"model": "lenet5", "rounds": 2, "epochs": 1, "engine": "flower", "device": "cpu", **more}
    return prepare(["fedavg"], settings, data)[0]


def task(setup: str, run: str = "run", **more: Any) -> RecordDict:
    values = {"round": 1, "exchange": 0, "position": -1, "train": True, "half": False, **more}
    return Task(run=run, score_received=False, score_trained=True, setup=setup, **values).to_record(EMPTY, EMPTY)


def test_a_site_introduces_itself_and_does_its_part(arrays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads the description of a run once."""
    seen, real = [], client_app.understand
    monkeypatch.setattr(client_app, "understand", lambda text, root: seen.append(text) or real(text, root))
    app, where = app_in(), context({"data": arrays}, **{"partition-id": 1})
    assert Introduction.from_record(greet(app, where)).name == "b"
    plan = planned(arrays)
    answer = Answer.from_record(ask(app, "train", task(describe(plan, 0)), where))
    first = plan.model.init(0)
    assert {name: own.shape for name, own in answer.upload.items()} == {name: own.shape for name, own in first.items()}
    assert set(answer.metrics) == {"trained"}
    assert list(where.state) == ["run.1"]
    Answer.from_record(ask(app, "train", task(describe(plan, 0), round=2), where))
    Answer.from_record(ask(app, "train", task(describe(plan, 1), run="other"), where))
    assert [text == seen[0] for text in seen] == [True, False]


def test_a_site_computes_features_once_and_sends_only_the_head(
    arrays: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))
    app, where, plan = app_in(), context({"data": arrays}, **{"partition-id": 1}), planned(arrays, train="head")
    answer = Answer.from_record(ask(app, "train", task(describe(plan, 0)), where))
    recipe = RunContext(plan.method, plan.model, plan.config, plan.config.rounds, 0)
    own = ClientData.place(plan.federation.clients[1], len(plan.federation.classes), torch.device("cpu"))
    expected = LocalClient(recipe, own).train(recipe.first_model("b", "common"), {}, -1, 1)  # on images
    assert answer.upload.keys() == expected.keys() == {"fc3.weight", "fc3.bias"}
    for name, tensor in expected.items():
        assert torch.allclose(answer.upload[name], tensor, rtol=1e-3, atol=1e-5)
    assert len(list((tmp_path / "cache" / "features").iterdir())) == 1
    other = json.dumps(json.loads(describe(plan, 0)) | {"constants": "0" * 64})
    said = refusal(ask(app, "train", task(other), where))
    assert said == "its model 'lenet5' starts from other weights than the coordinator's"


def test_every_error_becomes_one_line(arrays: str, tmp_path: Path) -> None:
    app, where = app_in(), context({"data": arrays}, **{"partition-id": 0})
    good = describe(planned(arrays), 0)
    nowhere = context({"data": f"arrays:{tmp_path / 'nowhere'}"}, **{"partition-id": 0})
    make_site(tmp_path / "site", "north", arrays, "localhost:9092", client="b", check=False)
    site = site_app(tmp_path / "site")
    for got, want in (
        (refusal(ask(app, "train", RecordDict(), where)), "not a task of this version of fedc2i (KeyError: 'task')"),
        (refusal(ask(app, "train", task("{"), where)), "the run's description is not valid (JSONDecodeError"),
        (refusal(ask(app, "train", task(good), context())), NO_FOLDER),
        (refusal(greet(app, context()), Introduction), NO_FOLDER),
        (refusal(greet(app, nowhere), Introduction), "nowhere"),
        (refusal(ask(site, "train", task(good, run="../up"), context())), "'../up' cannot name a run"),
    ):
        assert want in got


def test_images_that_the_model_does_not_fit_are_named(arrays: str) -> None:
    plan, tiny = planned(arrays), home(("w", "x", "y", "z"), [0, 1], side=4)
    app = make_app(lambda _: tiny, lambda own: understand(own.setup))
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


# The models it keeps.


@pytest.fixture(params=["folder", "context"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Memory]:
    """A run's memory; the same run's again when it is called again, as after a restart."""
    if request.param == "folder":
        return lambda run: FolderMemory(tmp_path / "state", run)
    state = RecordDict({"other": ConfigRecord({"a": 1})})
    return lambda run: ContextMemory(state, run)


def model(round: int) -> Params:
    return {"w": torch.full((2, 3), float(round)), "n": torch.tensor(round)}


def known(memory: Memory, before: int) -> int | None:
    """The round of the model that a round would start from."""
    found = memory.load(before)
    if found is None:
        return None
    assert found["w"].tolist() == model(int(found["n"]))["w"].tolist()
    return int(found["n"])


def fill(memory: Memory, *rounds: int) -> None:
    for number in rounds:
        memory.save(number, model(number))


def test_a_round_starts_from_the_latest_model_before_it(make: Callable[[str], Memory]) -> None:
    assert make("run").load(10**6) is None
    fill(make("run"), 2, 5, 7)
    again = make("run")
    assert [known(again, number) for number in (1, 2, 3, 5, 6, 7, 8, 100)] == [None, None, 2, 2, 5, 5, 7, 7]
    fill(make("run"), *range(8, 13))  # across a digit: the last three are kept
    assert [known(make("run"), number) for number in (10, 11, 12, 13)] == [None, 10, 11, 12]
    assert KEPT == 3


def test_a_round_done_again_replaces_the_model_and_drops_later_ones(make: Callable[[str], Memory]) -> None:
    memory = make("run")
    fill(memory, 4, 5, 6)
    memory.save(5, {"n": torch.tensor(50), "w": torch.full((2, 3), 50.0)})
    assert [known(memory, number) for number in (5, 6, 7, 99)] == [4, 50, 50, 50]


def test_runs_are_kept_apart(make: Callable[[str], Memory]) -> None:
    fill(make("run"), 1)
    fill(make("run-seed1"), 8)
    fill(make("run-seed10"), 9)
    assert [known(make(run), 99) for run in ("run", "run-seed1", "run-seed10", "ru")] == [1, 8, 9, None]


def test_one_tensor_under_two_names_is_kept_twice(make: Callable[[str], Memory]) -> None:
    tied = torch.arange(4.0)
    make("run").save(1, {"encoder": tied, "decoder": tied, "turned": tied.reshape(2, 2).T})
    found = make("run").load(2)
    assert found is not None
    assert {name: own.tolist() for name, own in found.items()} == {
        "encoder": [0, 1, 2, 3],
        "decoder": [0, 1, 2, 3],
        "turned": [[0, 2], [1, 3]],
    }


def test_other_state_of_the_node_is_left_alone() -> None:
    state = RecordDict({"other": ConfigRecord({"a": 1}), "run.note": ConfigRecord({"b": 2})})
    memory = ContextMemory(state, "run")
    fill(memory, *range(1, 6))
    memory.finish({"trained": model(5)})
    assert sorted(state) == ["other", "run.3", "run.4", "run.5", "run.note"]


@pytest.mark.parametrize("damage", [b"", b"noise" * 50, None])
def test_a_damaged_file_counts_as_absent(tmp_path: Path, damage: bytes | None) -> None:
    memory = FolderMemory(tmp_path, "run")
    fill(memory, 1, 2)
    path = tmp_path / "run" / "round000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert known(memory, 3) == 1
    memory.save(2, model(2))
    assert known(memory, 3) == 2


def test_files_of_other_names_stay_and_the_last_models_are_written(tmp_path: Path) -> None:
    memory = FolderMemory(tmp_path, "run")
    fill(memory, 1)
    others = [tmp_path / "run" / name for name in ("round1 (copy).safetensors", "round2.txt", "rounds.safetensors")]
    for path in others:
        path.write_bytes(b"a user's own")
    fill(memory, 2, 3, 4)
    memory.finish({"received": model(1), "trained": model(2)})
    for number, point in enumerate(("received", "trained"), 1):
        assert load_file(tmp_path / "run" / f"{point}.safetensors")["n"] == number
    assert known(memory, 9) == 4
    assert all(path.read_bytes() == b"a user's own" for path in others)


@pytest.mark.parametrize(
    "run", ["", ".", "..", "../up", "a/b", "/abs", "a\\b", ".hidden", "-x", "a\nb", "a\n", "ä", "x" * 101, "a\0b"]
)
def test_a_run_cannot_be_named_out_of_the_folder(run: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot name a run"):
        FolderMemory(tmp_path, run)
    FolderMemory(tmp_path, "20260101-120000-abcdef-seed3")
    FolderMemory(tmp_path, "x" * 100)


def test_a_folder_that_cannot_be_written_is_named_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(UserError, match=r"round000001.safetensors: cannot be written \(Not a directory\)$"):
        fill(FolderMemory(tmp_path / "state", "run"), 1)
