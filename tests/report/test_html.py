"""The page as a file: what it says, what it never does, and the command that writes it; no browser needed."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import io
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedc2i
from fedc2i import Federation, UserError, load
from fedc2i.data.federation import Client
from fedc2i.data.remote import RemoteFederation, blank_clients
from fedc2i.engine.records import POINTS
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.report.html import page as report
from fedc2i.report.html.rerun_command import rerun_command
from fedc2i.report.html.sample_images import sample_images
from fedc2i.runs.finished_run import read_run
from support.helpers import blank_federation, call, made_up, write_arrays

NAN = float("nan")
EVIL = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
ABC = blank_federation(("a", "b", "c"))
SEEN = {"influence_vector": {0: [[[0.6, 0.3, 0.1], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6]]]}}


class Reader(html.parser.HTMLParser):
    """The page's elements by tag, and the text that a person reads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data.replace("\N{NO-BREAK SPACE}", " ")


def read(result: Any, **options: Any) -> Reader:
    return Reader(report.make(result if isinstance(result, list) else [result], **options))


def test_the_page_says_the_verdict_and_how_to_run_it_again() -> None:
    page = read(made_up(ABC, {0: [[50, 60, 70]]}, influence=SEEN))
    for words in (
        "FedC²I reaches 61.00 % on toy after 1 round.",
        "least c with a: λ 0.10, 0.3 times an equal share.",
        "fedc2i run fedc2i --data toy --model lenet5 --metric accuracy --device cpu --rounds 1 --seeds 0",
        "The data came from a Python program",
        'data = "toy"',
        "8 B",
    ):
        assert words in page.text


def test_nothing_is_fetched() -> None:
    page = report.make([made_up(ABC, {0: [[50, 60, 70]]}, influence=SEEN)])
    reader = Reader(page)
    for tag, attributes in reader.tags:
        for name in ("src", "href", "action", "data", "poster"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:")) or not value, (tag, value)
    policies = [a["content"] for tag, a in reader.tags if tag == "meta" and "http-equiv" in a]
    assert policies
    policy = dict(part.split(maxsplit=1) for part in (policies[0] or "").split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["base-uri"] == policy["form-action"] == "'none'"
    assert "connect-src" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)  # what a browser may run, and nothing else
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert policy["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert len(scripts) == 3


def test_names_are_text_whatever_they_hold() -> None:
    federation = replace(blank_federation((EVIL, "b", "c")), classes=("<b>", "y", "z"), notes=(EVIL,))
    page = report.make([made_up(federation, {0: [[50, 60, 70]]}, influence=SEEN)])
    reader = Reader(page)
    assert EVIL in reader.text
    assert len([tag for tag, _ in reader.tags if tag == "script"]) == 4
    assert not any(attributes.get("onerror") or attributes.get("src") == "x" for _, attributes in reader.tags)


def test_five_clients_and_twenty_rounds_fit_into_six_megabytes() -> None:
    federation = blank_federation("abcde", classes=10)
    generator = np.random.default_rng(0)
    seen = {
        "influence_vector": {seed: generator.dirichlet(np.ones(5), (20, 5)) for seed in range(3)},
        "influence_matrix": {seed: generator.random((20, 5, 5, 10)) for seed in range(3)},
    }
    accuracy = {seed: generator.random((20, 5)) for seed in range(3)}
    assert len(report.make([made_up(federation, accuracy, influence=seen)], with_samples=True).encode()) < 6e6


def test_the_glance_says_of_the_first_name_how_often_it_is_first() -> None:
    (usual,) = SEEN["influence_vector"][0]
    other = [[0.6, 0.1, 0.3], *usual[1:]]
    seen = {"influence_vector": {0: [usual], 1: [other], 2: [usual]}}
    page = read(made_up(ABC, {seed: [[50, 60, 70]] for seed in range(3)}, influence=seen))
    assert "b (0.23; first in 2 of 3 seeds)c (0.17)" in page.text
    assert "largest weights hereits largest weights" in page.text  # some are below an equal share: no "weighs most"


def test_methods_without_influence_say_so() -> None:
    page = read([made_up(ABC, {0: [[1, 2, 3]]}, method=FedAvg()), made_up(ABC, {0: [[4, 5, 6]]}, influence=SEEN)])
    assert "No influence of clients on each other is measured by FedAvg." in page.text
    assert "least c with a: λ 0.10" in page.text
    assert "Side by side" in page.text


def test_clients_that_were_not_there_leave_gaps() -> None:
    """As after rounds on Flower that went on without a site, in which others measured nothing of it."""
    seen = {"influence_vector": {0: np.full((2, 3, 3), NAN)}}
    seen["influence_vector"][0][1, 0] = [0.3, NAN, 0.7]
    result = made_up(ABC, {0: [[50, 60, 70], [51, 61, 71]]}, influence=seen)
    last = result.rounds[-1]
    metrics = {point: [{}, *last.metrics[point][1:]] for point in POINTS}
    result.rounds[-1] = replace(last, metrics=metrics)
    page = read(result)
    assert "FedC²I reaches 67.00 %" in page.text  # of the two that answered
    assert "c weighs most with a: λ 0.70" in page.text
    assert "nan" not in page.text


def test_nobody_scored_is_said_in_words() -> None:
    page = read(made_up(ABC, {0: [[NAN] * 3], 1: [[NAN] * 3]}))
    assert "no client was scored after the last round" in page.text
    assert "nan" not in page.text


def test_settings_and_data_that_differ_are_said() -> None:
    first, second = made_up(ABC, {0: [[1, 2, 3]]}), made_up(ABC, {0: [[1, 2, 3]]}, method=FedAvg())
    assert "Not on equal terms" not in read([first, second]).text
    second = replace(second, config=replace(second.config, lr=0.5), federation=blank_federation(("a", "b", "c"), 3))
    assert "Not on equal terms" in read([first, second]).text


def test_plotly_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'fedc2i\[report\]'"):
        report.write([made_up(ABC, {0: [[1, 2, 3]]})], tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


# Intervals of λ that lie in the run folder.

INTERVALS = {
    "version": 1,
    "seed": 0,
    "level": 0.95,
    "draws": 50,
    "clients": ["a", "b", "c"],
    "samples": {"a": 30, "b": 40, "c": 30},
    "share": [0.333333, 0.333333, 0.333333],
    "vector": {
        "estimate": [[0.6, 0.3, 0.1], [0.1, 0.7, 0.2], [None, None, None]],
        "low": [[0.5, 0.2, 0.05], [0.0, 0.6, 0.1], [None, None, None]],
        "high": [[0.7, 0.4, 0.15], [0.2, 0.8, 0.4], [None, None, None]],
        "differs": [[True, False, True], [True, True, False], [False, False, False]],
    },
    "matrix": None,
    "notes": ["The intervals are over samples only."],
}


def test_weights_that_are_not_told_from_an_equal_share_are_grey(tmp_path: Path) -> None:
    result = made_up(ABC, {0: [[50, 60, 70]]}, influence=SEEN)
    assert "Intervals of λ" not in read(result, folders=[tmp_path]).text
    (tmp_path / "influence-intervals.json").write_text(json.dumps(INTERVALS), encoding="utf-8")
    page = report.make([result], folders=[tmp_path])
    assert "4 of 6 weights differ from an equal share by 95 % intervals (bootstrap over 30 to 40 samples" in page
    cells = re.findall(r'<td class="number( same)?">([\d.–]+)<small class="below">(.*?)</small>', page)
    assert cells[:3] == [("", "0.60", "0.50 to 0.70"), (" same", "0.30", "0.20 to 0.40"), ("", "0.10", "0.05 to 0.15")]
    assert cells[6:] == [(" same", "–", "")] * 3


def test_what_is_the_equal_share_whatever_the_samples_is_not_counted(tmp_path: Path) -> None:
    """As `fedc2i influence show` counts, with own_weight=equal."""
    vector = {name: [list(row) for row in rows] for name, rows in INTERVALS["vector"].items()}  # type: ignore[attr-defined]
    for name, value in (("estimate", 0.333333), ("low", 0.333333), ("high", 0.333333), ("differs", False)):
        vector[name][0][0] = vector[name][1][1] = value
    (tmp_path / "influence-intervals.json").write_text(json.dumps({**INTERVALS, "vector": vector}), encoding="utf-8")
    text = read(made_up(ABC, {0: [[50, 60, 70]]}, influence=SEEN), folders=[tmp_path]).text
    assert "2 of 4 weights differ from an equal share" in text
    assert "Not counted: 2 that are the equal share whatever the samples say." in text


@pytest.mark.parametrize(
    "change",
    [
        {"clients": ["x", "b", "c"]},
        {"version": 2},
        {"vector": {}},
        {"samples": {}},
        {"samples": [1, 2, 3]},
        {"samples": {"a": 1e999}},
        {"share": 3},
    ],
)
def test_intervals_of_another_run_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "influence-intervals.json").write_text(json.dumps({**INTERVALS, **change}), encoding="utf-8")
    with pytest.raises(UserError, match="influence show"):
        report.make([made_up(ABC, {0: [[50, 60, 70]]}, influence=SEEN)], folders=[tmp_path])


# Samples.


def cells(page: str, name: str) -> list[list[tuple[str, str]]]:
    """The rows of a table: of each cell its text and its class."""
    body = re.search(rf'<table id="{name}">(.*?)</table>', page, re.DOTALL)
    assert body
    rows = re.findall(r"<tr>(.*?)</tr>", body[1], re.DOTALL)
    return [[(text, own) for own, text in re.findall(r'<t[hd][^>]*?(?:class="(.*?)")?>(.*?)<', row)] for row in rows]


def test_samples_of_each_class_are_counted_and_lacks_are_marked() -> None:
    """By hand: a has no class 1 to train on, b has six samples of it."""
    y = {"a": [0, 0, 2], "b": [0, 1, 1, 1, 1, 1, 1, 2]}
    full = ABC.clients[0].test
    clients = tuple(Client(name, full.take(own), full.take([]), full) for name, own in y.items())
    federation = Federation("toy", clients, ABC.classes)
    head, first, second = cells(report.make([made_up(federation, {0: [[50, 60]]})]), "counts")
    assert [text for text, _ in head] == ["client", "class 0", "class 1", "class 2", "train", "validation", "test"]
    assert [text for text, _ in first] == ["a", "2", "0", "1", "3", "0", "3"]
    assert [text for text, _ in second] == ["b", "1", "6", "1", "8", "0", "3"]
    assert [text for row in (first, second) for text, own in row if "lack" in own] == ["0"]


def test_samples_of_each_class_are_not_shown_where_they_are_not_known_or_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {name: {"train": 5, "validation": 0, "test": 2} for name in ABC.names}
    blank = RemoteFederation("sites", blank_clients(ABC.names), ABC.classes, sizes=sizes)
    result = made_up(blank, {0: [[50, 60, 70]]})
    shown = ["client", "train", "validation", "test"]
    assert [text for text, _ in cells(report.make([result]), "counts")[0]] == shown
    monkeypatch.setattr(report, "MOST_COUNTS", 8)
    page = report.make([made_up(ABC, {0: [[50, 60, 70]]})])
    assert [text for text, _ in cells(page, "counts")[0]] == shown
    assert "3 clients and 3 classes do not fit" in page


def test_samples_show_the_first_test_image_of_each_class() -> None:
    found = sample_images(made_up(ABC, {0: [[1, 2, 3]]}), wanted=True)
    assert [strip.client for strip in found.strips] == ["a", "b", "c"]
    picture = base64.b64decode(found.strips[0].source.removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(picture)) as image:
        assert image.size == (120, 40)
        assert [image.getpixel((40 * c + 20, 20))[:3] for c in range(3)] == [(40,) * 3, (130,) * 3, (220,) * 3]


@pytest.mark.parametrize(
    ("data", "engine", "wanted", "words"),
    [
        ("digits:scans,ink", "inprocess", False, "--no-samples"),
        ("folder:x", "inprocess", None, "only if you ask"),
        ("folder:x", "inprocess", True, "cannot be loaded here"),
        ("digits:scans,ink", "flower", True, "at the sites"),
    ],
)
def test_why_there_are_no_images(data: str, engine: str, wanted: bool | None, words: str) -> None:
    result = made_up(ABC, {0: [[1, 2, 3]]})
    blank = RemoteFederation(data, blank_clients(("a", "b", "c")), ABC.classes, digests={"a": "other"})
    result = replace(result, federation=blank, config=replace(result.config, data=data, engine=engine))
    found = sample_images(result, wanted)
    assert not found.strips
    assert words in found.reason


def test_images_that_have_changed_since_are_not_shown(
    make_federation: Callable[..., Federation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_arrays(Path("data"), make_federation((12, 20, 7)))
    known = load(data)
    result = made_up(known, {0: [[1, 2, 3]]})
    for digests, shown in ((known.checksums, True), ({**known.checksums, "a": "other"}, False)):
        blank = RemoteFederation(data, blank_clients(known.names), known.classes, digests=digests)
        found = sample_images(replace(result, federation=blank), wanted=True)
        assert bool(found.strips) == shown
        assert ("is not what the run was trained on" in found.reason) != shown


# The command.


@pytest.fixture
def runs(make_federation: Callable[..., Federation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A comparison of two methods with two seeds, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    write_arrays(Path("data"), make_federation((12, 20, 7)))
    settings = ("--data", "arrays:data", "--model", "lenet5", "--rounds", "1", "--seeds", "0,1", "--set", "epochs=1")
    assert call("compare", "fedc2i:gamma=2", "fedavg", *settings, "--out", "runs").code == 0
    return Path("runs")


def test_report_command_and_the_run_that_its_command_repeats(runs: Path) -> None:
    answer = call("report", "runs", "--out", "out/page.html", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    page = Path(found["page"]).read_text(encoding="utf-8")
    assert found["bytes"] == len(page.encode())
    assert found["runs"] == ["runs/fedc2i-gamma=2.0", "runs/fedavg"]  # in the order of the comparison
    assert found["influence"][1] == "FedAvg measures no influence of clients on each other."
    text = Reader(page).text
    (command,) = [line for line in text.splitlines() if line.strip().startswith("fedc2i run fedc2i")][:1]
    command = re.sub(r"Copy$", "", command.strip())
    assert call(*shlex.split(command)[1:], "--out", "again").code == 0
    for name in ("config.toml", "metrics.jsonl"):
        assert Path("again", name).read_text() == (runs / "fedc2i-gamma=2.0" / name).read_text()

    assert call("report", "runs/fedavg", "again", "--out", "out/page.html", "--samples").code == 0  # replaces it
    text = Reader(Path("out/page.html").read_text(encoding="utf-8")).text
    assert "2 runs on arrays:data" in text
    assert "The first test image of each class" in text
    assert [path.name for path in Path("out").iterdir()] == ["page.html"]


def test_a_folder_named_from_inside_and_one_named_twice(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = call("report", "runs/fedavg", "runs", str(runs.absolute() / "fedavg"), "--json")
    assert json.loads(answer.out)["runs"] == [str(runs.absolute() / "fedavg"), "runs/fedc2i-gamma=2.0"]
    monkeypatch.chdir(runs / "fedavg")
    assert call("run", "--config", "config.toml", "--data", "arrays:../../data", "--out", "../../again").code == 0
    answer = call("report", ".", "../../again")
    assert answer.code == 0, answer.err
    assert "FedAvg [fedavg]" in answer.out
    assert "FedAvg [again]" in answer.out


def test_runs_that_are_not_finished_are_missed(runs: Path) -> None:
    (runs / "fedavg" / "summary.json").unlink()
    answer = call("report", "runs")
    assert answer.code == 0, answer.err
    resume = "if it was interrupted, `fedc2i resume {}` resumes it"
    assert f"runs: 1 of its runs is not finished, and not in the page; {resume.format('runs')}" in answer.err
    (runs / "fedc2i-gamma=2.0" / "summary.json").unlink()
    for folder in ("runs", "runs/fedavg"):
        answer = call("report", folder)
        assert answer.code == 2
        assert answer.err == f"fedc2i: error: {folder}: not finished; {resume.format(folder)}\n"


def test_a_name_cannot_speak_to_the_terminal(runs: Path) -> None:
    for path in (runs / "fedc2i-gamma=2.0" / name for name in ("summary.json", "metrics.jsonl")):
        path.write_text(path.read_text().replace('"a"', json.dumps("a\x1b[31m")))
    for command in (("report", "runs/fedc2i-gamma=2.0"), ("watch", "runs/fedc2i-gamma=2.0", "--once")):
        answer = call(*command)
        assert answer.code == 0, answer.err
        assert "a [31m" in answer.out
        assert "\x1b" not in answer.out


def test_the_same_method_on_other_terms_is_told_apart_in_the_terminal_too(
    make_federation: Callable[..., Federation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_arrays(Path("data"), make_federation((12, 20, 7)))
    settings = ("run", "fedavg", "--data", "arrays:data", "--model", "lenet5", "--seeds", "0", "--set", "epochs=1")
    assert call(*settings, "--rounds", "1", "--out", "ref").code == 0
    assert call(*settings, "--rounds", "2", "--set", "attack=nan@b", "--out", "bad").code == 0
    answer = call("report", "ref", "bad")
    assert answer.code == 0, answer.err
    page = Path("report.html").read_text(encoding="utf-8")
    lines = answer.out.splitlines()
    wanted = (
        "Not on equal terms: rounds 1 (FedAvg [ref]), 2 (FedAvg [bad]); attack not set (FedAvg [ref]), "
        "nan@b (FedAvg [bad]).",
        "Under attack: nan@b (FedAvg [bad]); averages include the attackers.",
        "Rejected uploads of FedAvg [bad]: b 2.",
    )
    assert tuple(lines[1:4]) == wanted
    assert "head of FedAvg [" in answer.out
    assert not re.search(r"FedAvg(?! \[)", answer.out)
    top = Reader(page[page.index("<h1>") : page.index('class="tiles"')]).text
    assert all(words in top for words in wanted)
    assert "1 to 2 rounds" in Reader(page).text
    assert json.loads(call("report", "ref", "bad", "--json").out)["verdict"][1:4] == list(wanted)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "nothing: no such folder"),
        ((".", "--out", "."), "no finished run here"),
        ((), "Missing argument"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = call("report", *arguments)
    assert answer.code == 2
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        report.write([made_up(ABC, {0: [[1, 2, 3]]})], tmp_path)


def test_command_of_an_own_method_has_all_of_its_options(tmp_path: Path) -> None:
    (tmp_path / "prox.py").write_text(
        "from dataclasses import dataclass\nfrom fedc2i import Method\n\n\n@dataclass(frozen=True)\n"
        "class Proximal(Method):\n    name = 'prox'\n    title = 'Prox'\n    mu: float = 0.01\n"
    )
    wanted = f"{tmp_path}/prox.py:Proximal"
    fedc2i.run(f"{wanted}:mu=0.5", "heart", rounds=1, seeds=[0], out=tmp_path / "run")
    found = rerun_command(read_run(tmp_path / "run"))
    assert found.command.startswith(f"fedc2i run {wanted} ")
    assert "--set mu=0.5" in found.command
    assert found.note == ""


def test_objects_of_python_are_named_where_a_command_cannot_name_them(tmp_path: Path) -> None:
    class Own(FedAvg):
        name, title = "mine", "Mine"

    x, y = np.zeros((4, 3)), np.array([0, 1, 0, 1])
    data = fedc2i.from_arrays({"a": (x, y, x, y)})  # called "arrays", as a source of data is
    fedc2i.run(Own(), data, rounds=1, seeds=[0], out=tmp_path / "run")
    note = rerun_command(read_run(tmp_path / "run")).note
    assert note == "The data and the method came from a Python program, which must be run again instead."


def test_command_of_real_sites_leaves_their_data_to_them() -> None:
    result = made_up(ABC, {0: [[1, 2, 3]]}, method=FedC2I(gamma=2.0))
    result = replace(result, config=replace(result.config, engine="flower", data="sites", epochs=1))
    found = rerun_command(result)
    assert found.command == (
        "fedc2i coordinator start HUB fedc2i --model lenet5 --train auto --wire float32 --deadline 600.0 --min-sites 1 "
        "--rounds 1 --seeds 0 --topology full --set epochs=1 --set gamma=2.0"
    )
    assert "the same sites must be admitted" in found.note
    masked = replace(result, config=replace(result.config, secure_aggregation=True))
    assert " --secure-aggregation --" in rerun_command(masked).command
