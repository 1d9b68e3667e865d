"""A whole run over sites: its folder, the same numbers as in one process, and resuming after a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.app")
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from fakes import FakeGrid, FakeNode, identity, node, site_app  # noqa: F401
from flwr.app import Context, Message, RecordDict

from fedc2i import Federation, Result, UserError, run
from fedc2i.data.federation import Client, InputSpec
from fedc2i.deploy.client_app import app_in
from fedc2i.deploy.job import Job
from fedc2i.deploy.run_description import understand
from fedc2i.deploy.server_app import run_job
from fedc2i.deploy.site_folder import make_site
from fedc2i.engine.records import POINTS
from fedc2i.flower import site
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.enrolment import common_federation
from fedc2i.flower.message_format import Introduction
from fedc2i.flower.site import Home
from fedc2i.runs.finished_run import read_run
from fedc2i.runs.folder import read_reports
from fedc2i.runs.results import summary as summary_of
from support.helpers import files_below, is_drawn, write_arrays

QUICK: dict[str, Any] = {"model": "lenet5", "rounds": 3, "epochs": 1, "batch_size": 5}
POLICY = Policy(deadline=20.0, poll=0.0)


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedc2i.flower.connections._LOOK", 0.0)
    monkeypatch.setattr("fedc2i.flower.connections._AGAIN", 0.0)
    monkeypatch.setattr("fedc2i.flower.answer_collector.TRIES", 1)


@pytest.fixture
def federation(make_federation: Callable[..., Federation]) -> Federation:
    return make_federation((12, 9, 7), validation=4)


def at_home(client: Client, classes: tuple[str, ...], number: int = 100) -> FakeNode:
    """A node whose data is here, and who learns everything else from the coordinator."""
    app = site.make_app(lambda _: Home(client, classes), lambda task: understand(task.setup))
    return node(number, app)


def grid_of(federation: Federation) -> FakeGrid:
    return FakeGrid({100 + k: at_home(own, federation.classes, 100 + k) for k, own in enumerate(federation.clients)})


def job(out: Path, method: str = "fedc2i", **more: Any) -> Job:
    settings = {**QUICK, **more.pop("settings", {})}
    return Job(out, method, settings, **{"sites": ("a", "b", "c"), "wait": 0.0, "policy": POLICY, **more})


def in_process(federation: Federation, method: str = "fedc2i", **more: Any) -> Result:
    return run(method, federation, executor="looped", device="cpu", **{**QUICK, **more})


def assert_same(got: Result, want: Result) -> None:
    assert got.federation.names == want.federation.names
    for point in POINTS:
        for metric in ("accuracy", "loss", "validation_loss"):
            np.testing.assert_array_equal(got.accuracy(point, metric), want.accuracy(point, metric))
    for seed in want.config.seeds:
        np.testing.assert_array_equal(got.influence(seed=seed), want.influence(seed=seed))


def metrics(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(json.loads(line).values()) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class CrashError(Exception):
    """Not ours to catch."""


def go(grid: FakeGrid, wanted: Job, said: list[str] | None = None) -> Result:
    return run_job(grid, wanted, [].append if said is None else said.append)


def crash(grid: FakeGrid, wanted: Job, number: int, said: list[str] | None = None) -> None:
    """The coordinator dies when it sends its ``number``-th task."""

    def count(to: int, message: Message) -> None:
        if sum(kind == "train" for _, kind in grid.log) == number:
            grid.before = lambda to, message: None
            raise CrashError

    grid.log.clear()
    grid.before = count
    with pytest.raises(CrashError):
        go(grid, wanted, said)
    grid.before = lambda to, message: None


def refusal(grid: FakeGrid, wanted: Job) -> str:
    with pytest.raises(UserError) as refused:
        go(grid, wanted)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# The run folder, and its numbers.


def test_a_run_over_partitions_of_a_data_set(with_figures: None, tmp_path: Path, federation: Federation) -> None:
    data = write_arrays(tmp_path / "arrays", federation)
    app, nodes = app_in(), {}
    for k in range(3):
        own = Context(1, 100 + k, {"partition-id": k}, RecordDict(), {"data": data, "data-dir": ""})
        nodes[100 + k] = FakeNode(app, own)
    said: list[str] = []
    out = tmp_path / "deep" / "run"
    result = go(FakeGrid(nodes), job(out, sites=(), count=3, settings={"seeds": "0,4"}), said)
    assert {name for name, content in files_below(out).items() if content is not None} == {
        *("config.toml", "job.json", "run.json", "metrics.jsonl", "influence.npz", "summary.json", "log.txt"),
        *("accuracy.png", "influence.png", "influence_classes.png", "metrics.prom"),
    }
    counted = (out / "metrics.prom").read_text().splitlines()
    assert {"fedc2i_sites 3", "fedc2i_rounds_total 6", "fedc2i_answers_total 18"} <= {*counted}
    assert not [name for name in files_below(out) if "checkpoints" in name or "rounds" in name]
    assert is_drawn(out / "accuracy.png")
    assert_same(result, in_process(federation, seeds=(0, 4)))
    log = (out / "log.txt").read_text().splitlines()
    assert [line[21:] for line in log] == said
    assert said[0] == "waiting for 3 sites: any"
    assert "a has joined, 12 samples" in said
    assert sum(line.startswith("seed 4, round ") for line in said) == 3
    assert said[-1] == (
        f"finished: mean accuracy before {result.scores('received')['Avg']} %, "
        f"after {result.scores('trained')['Avg']} %"
    )
    told = json.loads((out / "summary.json").read_text())["versions"]
    assert told == {**summary_of(in_process(federation))["versions"], "flwr": version("flwr")}
    again = read_run(out)
    np.testing.assert_allclose(again.accuracy("trained"), result.accuracy("trained"), atol=1e-6)
    assert again.federation.samples()["b"] == {"train": 9, "validation": 4, "test": 9}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["data_checksums"] == {}
    assert summary["bytes_up_per_client_round"] > 10_000


def test_a_run_over_site_folders_with_keys(tmp_path: Path, federation: Federation) -> None:
    data = write_arrays(tmp_path / "arrays", federation)
    nodes, keys = {}, {}
    for k, name in enumerate(("north", "south")):
        make_site(tmp_path / name, name, data, "localhost:9092", client="ab"[k], check=False)
        keys[name] = (tmp_path / name / "site.pub").read_text()
        pem = load_ssh_public_key(keys[name].encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        nodes[100 + k] = node(100 + k, site_app(tmp_path / name), key=pem)
    nodes[109] = at_home(federation.clients[2], federation.classes, 109)  # nobody we know
    said: list[str] = []
    wanted = job(tmp_path / "run", sites=("south", "north"), keys=keys)
    result = go(FakeGrid(nodes), wanted, said)
    a, b, _ = federation.clients
    twins = tuple(Client(name, own.train, own.validation, own.test) for name, own in (("south", b), ("north", a)))
    assert_same(result, in_process(Federation("twins", twins, tuple("0123"))))
    assert any("it calls itself 'c', but holds another site's key" in line for line in said)
    assert (tmp_path / "north" / "state").is_dir()
    kept = sorted(path.name for path in (tmp_path / "north" / "state").glob("*/*.safetensors"))
    assert kept == ["received.safetensors", *(f"round{n:06d}.safetensors" for n in (1, 2, 3)), "trained.safetensors"]


@pytest.mark.parametrize("method", ["fedproto", "fedc2i:gamma=ramp(4),influence=first-order"])
def test_methods_and_options_give_the_same_numbers(method: str, tmp_path: Path, federation: Federation) -> None:
    got, want = go(grid_of(federation), job(tmp_path, method)), in_process(federation, method)
    assert_same(got, want)
    assert (got.label, got.key) == (want.label, want.key)


def test_the_log_has_the_metric_of_the_run(tmp_path: Path, federation: Federation) -> None:
    said = list[str]()
    result = go(grid_of(federation), job(tmp_path / "run", "fedavg", settings={"metric": "loss"}), said)
    score = result.scores("trained", "loss")["Avg"]
    assert any("mean log-loss before" in line and f"after {score.mean:.{score.digits}f}" in line for line in said), said
    assert said[-1].startswith("finished: mean log-loss before")
    assert not [line for line in said if "accuracy" in line or " %" in line]


def test_it_stops_early_as_in_one_process(tmp_path: Path, federation: Federation) -> None:
    more = {"rounds": 9, "patience": 1, "lr": 0.01, "seeds": (0, 1)}
    got, want = go(grid_of(federation), job(tmp_path, settings=more)), in_process(federation, **more)
    assert [(own.seed, own.round) for own in got.rounds] == [(own.seed, own.round) for own in want.rounds]
    assert len(got.rounds) < 18
    assert_same(got, want)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"patience": 2}, "patience=2: no client of 'sites' has validation data"),
        ({"influence_split": "validation"}, "influence_split=validation: client 'a' has no validation data"),
        ({"nonsense": 1}, "unknown setting 'nonsense'"),
        ({"topology": "random:7"}, "topology=random:K: K must be 1..2 for 3 clients, got '7'"),
    ],
    ids=str,
)
def test_what_would_fail_later_is_refused_before_the_first_round(
    settings: dict[str, Any], line: str, tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    grid = grid_of(make_federation((12, 9, 7)))
    assert line in refusal(grid, job(tmp_path, settings=settings))
    assert all(kind == "query" for _, kind in grid.log)
    assert f"error: {line}" in (tmp_path / "log.txt").read_text()


# Resuming.


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param("fedavg", {}, marks=pytest.mark.slow),
        pytest.param("fedc2i", {"evaluate_every": 2}, marks=pytest.mark.slow),
        ("fedc2i", {"clients_per_round": 2}),
    ],
    ids=str,
)
def test_after_a_crash_the_same_command_resumes_to_the_same_end(
    method: str, settings: dict[str, Any], tmp_path: Path, federation: Federation
) -> None:
    more = {"rounds": 4, "seeds": "0,1", **settings}
    want = go(grid_of(federation), job(tmp_path / "whole", method, settings=more))
    grid, said = grid_of(federation), list[str]()
    wanted = job(tmp_path / "broken", method, settings=more)
    for number in (2, 11, 10):  # in the first round of seed 0, in its last, in the second of seed 1
        crash(grid, wanted, number, said)
        assert (wanted.is_unfinished, wanted.is_finished) == (True, False)
    got = go(grid, wanted, said)
    assert (wanted.is_unfinished, wanted.is_finished) == (False, True)
    assert_same(got, want)
    lines = metrics(tmp_path / "broken")
    assert len(lines) == len({line[:5] for line in lines})
    assert lines == metrics(tmp_path / "whole")
    for name in ("influence.npz", "config.toml"):
        if (tmp_path / "whole" / name).exists():
            assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [own.participants for own in got.rounds] == [own.participants for own in want.rounds]
    for seed in (0, 1):
        assert any(line.startswith(f"seed {seed} resumes in round ") for line in said)
    assert not [name for name in files_below(tmp_path / "broken") if "checkpoints" in name or "rounds" in name]


OWN_METHOD = """
from dataclasses import dataclass
from fedc2i.methods.fedavg import FedAvg

@dataclass(frozen=True)
class ChangedSince(FedAvg):
    name = "changed-since"
    title = "Changed since"
"""


def but_the_log(folder: Path) -> dict[str, bytes | None]:
    return {name: content for name, content in files_below(folder).items() if name not in ("log.txt", "metrics.prom")}


def test_a_file_that_was_changed_since_is_refused(tmp_path: Path, federation: Federation) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_METHOD)
    grid, wanted = grid_of(federation), job(tmp_path / "run", f"{file}:ChangedSince")
    crash(grid, wanted, 1)
    before = but_the_log(tmp_path / "run")
    file.write_text(OWN_METHOD + "# another word\n")
    for _ in range(2):
        assert "mine.py, where its method comes from, is not what it was" in refusal(grid, wanted)
    assert but_the_log(tmp_path / "run") == before
    file.write_text(OWN_METHOD)
    crash(grid, wanted, 1)  # it resumes, as far as the sites


def test_after_a_crash_it_waits_for_all_sites_not_for_the_first(tmp_path: Path, federation: Federation) -> None:
    want = go(grid_of(federation), job(tmp_path / "whole"))
    grid, wanted = grid_of(federation), job(tmp_path / "broken", wait=20.0)
    crash(grid, wanted, 5)
    late, looks, real = grid.nodes.pop(102), [], grid.get_nodes

    def come_back() -> Any:
        looks.append(len(looks))
        if len(looks) == 30:
            grid.nodes[102] = late
        return real()

    grid.get_nodes = come_back  # type: ignore[method-assign]
    assert_same(go(grid, wanted), want)


def test_a_run_of_other_settings_is_not_resumed_and_a_finished_one_is_left_alone(
    tmp_path: Path, federation: Federation
) -> None:
    grid = grid_of(federation)
    crash(grid, job(tmp_path), 4)
    before = but_the_log(tmp_path)
    for other in (
        job(tmp_path, "fedavg"),
        job(tmp_path, settings={"lr": 0.5}),
        job(tmp_path, sites=("a", "b")),
        job(tmp_path, policy=Policy(half=True)),
        job(tmp_path, classes=("z",)),
    ):
        assert not other.is_unfinished
        assert "holds a run with other settings; choose another --out" in refusal(grid, other)
    assert but_the_log(tmp_path) == before
    slower = job(tmp_path, policy=Policy(deadline=30.0, poll=0.0, min_sites=2), wait=1.0)
    assert slower.is_unfinished  # how long to wait does not decide the numbers
    go(grid, slower)
    done = files_below(tmp_path)
    assert "this run is finished; choose another --out" in refusal(grid, slower)
    assert files_below(tmp_path) == done


def test_a_damaged_record_of_the_run_is_a_line(tmp_path: Path, federation: Federation) -> None:
    grid, path = grid_of(federation), tmp_path / "run.json"
    crash(grid, job(tmp_path), 1)
    values = json.loads(path.read_text())
    parts = ("sizes", "names", "classes", "input")
    lacking = [{name: own for name, own in values.items() if name != part} for part in (*parts, "run")]
    damaged = [json.dumps(own) for own in (*lacking, *({**values, part: []} for part in parts))]
    (tmp_path / "job.json").unlink()
    for content in ("", "[]", "{}", '{"job": 3}', "\x00", *damaged):
        path.write_text(content)
        refusal(grid, job(tmp_path))
        assert not job(tmp_path).is_unfinished


def test_a_seed_that_was_finished_is_not_scored_again(tmp_path: Path, federation: Federation) -> None:
    """Seed 1 is interrupted; when it resumes, one site is away, which must not change what seed 0 ended with."""
    wanted = job(tmp_path, settings={"seeds": "0,1", "rounds": 2})
    crash(grid_of(federation), wanted, 3 * 3 + 2)  # two rounds and the last exchange of three sites, and one more
    folder = tmp_path / "rounds" / "seed0"
    before = read_reports(folder, len(list(folder.glob("round*.npz"))) + 1)
    assert before
    again = grid_of(federation)
    del again.nodes[max(again.nodes)]
    result = go(again, wanted)
    assert [own.metrics for own in result.rounds if own.seed == 0] == [own.metrics for own in before]


def test_an_answer_to_an_earlier_seed_is_of_no_use_to_the_next(tmp_path: Path, federation: Federation) -> None:
    grid, trained = grid_of(federation), list[int]()

    def slow_down(to: int, message: Message) -> None:
        trained.extend([to] * (message.metadata.message_type == "train"))
        grid.nodes[102].delay = 10**9 if 4 <= len(trained) <= 9 else 0  # from the second round to the end of a seed
        if len(trained) > 8 and to == 100:
            grid.release()

    grid.before = slow_down
    policy = Policy(deadline=0.2, poll=0.001)
    result = go(grid, job(tmp_path, settings={"rounds": 2, "seeds": "0,1"}, policy=policy))
    assert result.last(0).participants == ("a", "b")
    assert_same(result.only(1), in_process(federation, rounds=2, seeds=(1,)))


# Who is there.


def test_too_few_sites_are_a_line(tmp_path: Path, federation: Federation) -> None:
    grid = grid_of(federation)
    late = grid.nodes.pop(101)
    wanted = job(tmp_path, policy=Policy(20.0, min_sites=3, poll=0.0))
    line = "after 0 s 2 of 3 sites are connected; missing: b; at least 3 are needed"
    assert refusal(grid, wanted) == line
    assert not (tmp_path / "run.json").exists()
    grid.nodes[101] = late
    assert_same(go(grid, wanted), in_process(federation))  # the same folder serves


@pytest.mark.parametrize("crashes", [False, True])
def test_a_late_site_takes_part_from_then_on_and_weighs_the_same_after_a_crash(
    crashes: bool, tmp_path: Path, federation: Federation
) -> None:
    """How many samples it has is known from its introduction alone, and decides FedAvg's mean."""

    def course(out: Path, crash_at: int, said: list[str]) -> Result:
        grid, wanted = grid_of(federation), job(out, "fedavg:weighting=samples", settings={"rounds": 4})
        late, sent = grid.nodes.pop(101), list[int]()

        def come(to: int, message: Message) -> None:
            if message.metadata.message_type == "train":
                sent.append(to)
                if len(sent) == 3:  # the second round has started
                    grid.nodes[101] = late
                if len(sent) == crash_at:
                    raise CrashError

        grid.before = come
        if crash_at:
            with pytest.raises(CrashError):
                go(grid, wanted, said)
        return go(grid, wanted, said)

    said = list[str]()
    want = course(tmp_path / "whole", 0, said)
    if crashes:
        assert_same(course(tmp_path / "broken", 9, said), want)
        return
    assert ["".join(own.participants) for own in want.rounds] == ["ac", "ac", "abc", "abc"]
    assert "after 0 s 2 of 3 sites are connected; missing: b; starting without the others" in said
    assert "b has joined, 9 samples" in said
    assert np.isfinite(want.accuracy("trained")).all()


def test_a_site_that_never_comes_is_a_gap_in_the_tables(
    with_figures: None, tmp_path: Path, federation: Federation
) -> None:
    grid = grid_of(federation)
    del grid.nodes[102]
    result = go(grid, job(tmp_path, settings={"rounds": 2}))
    assert np.isnan(result.accuracy("trained")).tolist() == [[False, False, True]]
    assert np.isfinite(read_run(tmp_path).averages("trained")["Avg"]).all()
    assert is_drawn(tmp_path / "accuracy.png")
    assert is_drawn(tmp_path / "influence.png")


def renamed(federation: Federation, names: str) -> tuple[Client, tuple[str, ...]]:
    """A client whose own labels 0 and 1 mean these classes."""
    own = federation.clients[1]
    parts = [part.take((part.y < 2).nonzero().flatten()) for part in (own.train, own.validation, own.test)]
    return Client(names, *parts), tuple(names)


def test_classes_of_sites_have_the_order_of_a_table() -> None:
    """Numbers by size, as in a simulation: with another order of classes, heads start from other weights."""
    spec, samples = InputSpec((3, 8, 8)), {"train": 2, "validation": 0, "test": 1}
    sites = [Introduction("a", samples, ("1", "10"), spec), Introduction("b", samples, ("1", "2", "10"), spec)]
    assert common_federation(sites, ("a", "b"), (), lambda line: None).classes == ("1", "2", "10")


def test_sites_with_different_classes_share_those_they_have(tmp_path: Path, federation: Federation) -> None:
    homes = [renamed(federation, names) for names in ("zb", "ba")]
    grid, said = FakeGrid({k: at_home(*own, k) for k, own in enumerate(homes)}), list[str]()
    result = go(grid, job(tmp_path, sites=("zb", "ba")), said)
    assert "the sites have different classes; the run has all 3 of them: a, b, z" in said
    assert any(line.startswith("classes by site: zb z, b; ba b, a; ") for line in said)
    assert result.federation.classes == ("a", "b", "z")
    clients = []
    for own, classes in homes:
        order = torch.tensor([("a", "b", "z").index(name) for name in classes])
        parts = [type(part)(part.x, order[part.y]) for part in (own.train, own.validation, own.test)]
        clients.append(Client(own.name, *parts))
    assert_same(result, in_process(Federation("union", tuple(clients), ("a", "b", "z"))))


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        ("classes", "bc has the classes b, c, and the run has no c; it has a, b, and --classes can name more"),
        ("images", "bc has images 12x12, the run images 16x16; its site.toml can set image_size"),
    ],
)
def test_a_site_that_does_not_fit_is_rejected_by_name(
    odd: str, line: str, tmp_path: Path, federation: Federation
) -> None:
    good, (own, classes) = renamed(federation, "ab"), renamed(federation, "bc")
    if odd == "images":
        parts = (type(part)(part.x[:, :, :12, :12], part.y) for part in (own.train, own.validation, own.test))
        own, classes = Client("bc", *parts), ("a", "b")
    grid, said = FakeGrid({1: at_home(*good, 1), 2: at_home(own, classes, 2)}), list[str]()
    result = go(grid, job(tmp_path, sites=("ab", "bc"), classes=("a", "b")), said)
    assert sum(said_line.startswith(f"a site is rejected: {line}") for said_line in said) == 1
    assert [own.participants for own in result.rounds] == [("ab",)] * 3


# Jobs as text.


def test_a_job_is_the_same_as_text(tmp_path: Path) -> None:
    wanted = job(
        tmp_path, "fedc2i:gamma=2", classes=("x", "ä"), keys={"a": "ssh-ed25519 AAA"}, settings={"seeds": (1, 2)}
    )
    again = Job.read(wanted.write())
    assert again.digest == wanted.digest
    assert (again.out, again.sites, again.classes, again.policy) == (tmp_path, wanted.sites, wanted.classes, POLICY)
    assert Job.from_config({"job": str(tmp_path / "job.json"), "method": "other"}) == again


KEYS: dict[str, Any] = {
    **{"job": "", "out": "run", "method": "fedavg", "model": "", "rounds": 20, "seeds": "0,1", "set": "lr=0.1 mu=2"},
    **{"sites": 2, "wait": 3.0, "deadline": 9.0, "min-sites": 2, "wire": "float16"},
}


def test_a_job_from_single_keys() -> None:
    found = Job.from_config(KEYS)
    assert (found.out, found.method, found.count, found.wait) == (Path("run"), "fedavg", 2, 3.0)
    assert found.settings == {"lr": "0.1", "mu": "2", "rounds": 20, "seeds": "0,1"}
    assert found.policy == Policy(9.0, 2, half=True)
    with pytest.raises(UserError, match=r"^wire must be float32 \| float16"):
        Job.from_config({**KEYS, "wire": "float8"})


JOBS = ["", "[]", "3", "{}", '{"out": "x", "policy": 3}', '{"out": "x", "policy": {"a": 1}}']


def test_a_configuration_that_cannot_be_read_is_a_line(tmp_path: Path) -> None:
    configurations = [{"job": "nowhere.json"}, {}, {**KEYS, "sites": "two"}, {**KEYS, "wait": None}, {"job": "."}]
    for number, text in enumerate(JOBS):
        (tmp_path / f"{number}.json").write_text(text)
        configurations.append({"job": str(tmp_path / f"{number}.json")})
    for values in configurations:
        with pytest.raises(UserError, match=r"^the run's configuration cannot be read \(\w+: .+\)$"):
            Job.from_config(values)


def test_a_log_that_cannot_be_written_is_a_line(tmp_path: Path, federation: Federation) -> None:
    (tmp_path / "file").write_text("")
    assert "log.txt: cannot be written (Not a directory)" in refusal(
        grid_of(federation), job(tmp_path / "file" / "run")
    )
    assert Job(tmp_path / "file", "fedavg").is_unfinished is False
