"""The page in a real browser: what moves, what it shows, and that nothing leaves it. Skipped where there is none."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedc2i.methods.fedavg import FedAvg
from fedc2i.report.html import page as report
from fedc2i.report.html.influence_text import client_influences
from support.helpers import blank_federation, made_up

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
NAMES = ("Scans", "Photos", "<script>window.hacked=1</script>", "Fonts", "Signs & more")
ROUNDS, SEEDS, LOADS = 20, 2, 3
SECONDS = 3.0  # until the page can be used, of a core's own time: other processes on a busy machine do not count
NARROW, WIDE = (390, 844), (1440, 900)

_draw = np.random.default_rng(0)
VECTORS = _draw.dirichlet(np.ones(5), (SEEDS, ROUNDS, 5))  # (seeds, rounds, helped, helps)
MATRICES = np.moveaxis(_draw.dirichlet(np.ones(5), (SEEDS, ROUNDS, 5, 10)), 4, 3)  # (..., helped, helps, class)
ACCURACY = _draw.uniform(40, 90, (SEEDS, ROUNDS, 5))
OURS = made_up(
    blank_federation(NAMES, classes=10),
    dict(enumerate(ACCURACY)),
    influence={"influence_vector": dict(enumerate(VECTORS)), "influence_matrix": dict(enumerate(MATRICES))},
)
PLAIN = made_up(OURS.federation, {0: ACCURACY[0] - 3, 1: ACCURACY[1] - 2}, method=FedAvg())


class Page:
    """A page in the browser."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver, self.path = driver, path

    def command(self, name: str, **values: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, values)

    def open(self, size: tuple[int, int] = WIDE, theme: str = "light") -> Page:
        """Loads it anew and waits until it is ready."""
        self.resize(*size)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.command("Emulation.setEmulatedMedia", features=[feature])
        self.driver.get(self.path.as_uri())
        self.wait(lambda: self.js("return document.documentElement.dataset.ready"))
        return self

    def resize(self, wide: int, high: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=wide, height=high, deviceScaleFactor=1, mobile=wide < 500
        )

    def open_afresh(self) -> tuple[float, float]:
        """Loads it in a new tab, whose process knows no script of it yet; seconds of its thread, and on the clock."""
        before = self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        self.command("Performance.enable", timeDomain="threadTicks")
        self.driver.get(self.path.as_uri())
        self.wait(lambda: self.js("return document.documentElement.dataset.ready"))
        spent = {one["name"]: one["value"] for one in self.command("Performance.getMetrics")["metrics"]}
        clock = float(self.js("return document.documentElement.dataset.ready")) / 1000
        self.driver.close()
        self.driver.switch_to.window(before)
        return float(spent["TaskDuration"]), clock

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def wait(self, true: Callable[[], Any], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.02)

    def choose(self, control: str, value: Any) -> None:
        """Sets a slider or a list as a person would."""
        code = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        self.js(f"{code} e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'));", control, value)

    def heat(self, chart: str) -> np.ndarray[Any, Any]:
        found = self.js("return document.getElementById(arguments[0]).data[0].z", chart)
        return np.array(found, dtype=float)

    def text(self, name: str) -> str:
        return str(self.js("return document.getElementById(arguments[0]).textContent", name))

    def shown(self, name: str) -> bool:
        return bool(self.js("return document.getElementById(arguments[0]).offsetParent !== null", name))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(driver, report.write([OURS, PLAIN], tmp_path_factory.mktemp("report") / "report.html"))


@pytest.fixture
def opened(page: Page) -> Iterator[Page]:
    """Ready to use; afterwards nothing may have been complained of."""
    page.driver.get_log("browser")
    yield page.open()
    assert page.driver.get_log("browser") == []


def test_a_first_load_is_ready_in_three_seconds(page: Page, record_property: Callable[[str, Any], None]) -> None:
    """The quickest of first loads, as other processes slow any of them; a second one in the same tab takes a third."""
    loads = [page.open_afresh() for _ in range(LOADS)]
    record_property("seconds of its thread, and on the clock", loads)
    assert min(spent for spent, _ in loads) < SECONDS
    assert page.path.stat().st_size < 6e6


def test_nothing_is_asked_for_or_complained_of(page: Page) -> None:
    page.driver.get_log("browser")
    page.driver.get_log("performance")
    page.open().js("document.getElementById('theme').click()")
    messages = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    asked = [one["request"]["url"] for one in sent if one["documentURL"].startswith(page.path.as_uri())]
    assert page.path.as_uri() in asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.driver.get_log("browser") == []
    assert page.js("return window.hacked") is None


def test_slider_moves_the_heat_map(opened: Page) -> None:
    mean = VECTORS.mean(0)
    assert np.allclose(opened.heat("heat-chart"), mean[-1], atol=1e-4)
    opened.choose("round", 4)
    assert np.allclose(opened.heat("heat-chart"), mean[4], atol=1e-4)
    assert opened.text("round-name") == "round 5 of 20"
    opened.driver.find_element("id", "round").send_keys("\ue014")  # the arrow to the right
    assert np.allclose(opened.heat("heat-chart"), mean[5], atol=1e-4)
    opened.js("document.getElementById('without-own').click()")
    shown = opened.heat("heat-chart")
    assert np.isnan(np.diagonal(shown)).all()
    assert np.isfinite(shown).sum() == 20


def test_play_goes_through_the_rounds(opened: Page) -> None:
    opened.choose("round", 17)
    opened.js("document.getElementById('play').click()")
    assert opened.js("return document.getElementById('play').ariaLabel") == "Stop playing"
    opened.wait(lambda: opened.text("round-name") == "round 20 of 20")
    opened.wait(lambda: opened.js("return document.getElementById('play').ariaLabel") == "Play the rounds")
    assert np.allclose(opened.heat("heat-chart"), VECTORS.mean(0)[-1], atol=1e-4)


def test_choosing_a_client_changes_the_matrix_and_its_helpers(opened: Page) -> None:
    mean = MATRICES.mean(0)
    for client in (3, 2):
        opened.js("document.querySelectorAll('#chips button')[arguments[0]].click()", client)
        assert np.allclose(opened.heat("matrix-chart"), mean[-1, client], atol=1e-4)
        assert opened.text("matrix-title") == f"Influence matrix Λ of {NAMES[client]}"
        found = opened.js(
            "return [...document.querySelectorAll('#panel .bars')[0].querySelectorAll('.name')].map(e => e.title)"
        )
        others = sorted((i for i in range(5) if i != client), key=lambda i: -VECTORS.mean(0)[-1, client, i])
        assert found == [NAMES[i] for i in others if VECTORS.mean(0)[-1, client, i] >= 0.02]
        told = opened.js("return [...document.querySelectorAll('#other-helpers li')].map(e => e.textContent)")
        cases = client_influences(OURS)[client].exceptions[:6]
        assert told == [f"class {one.label} ← {NAMES[one.helper]} ({one.share:.2f})" for one in cases]
    assert told


def test_graph_has_an_arrow_for_each_direction(opened: Page) -> None:
    mean = VECTORS.mean(0)
    opened.choose("round", 2)
    edges = opened.js(
        "return [...document.querySelectorAll('#graph-chart .edge')].map(e => ({...e.dataset, "
        "width: Number(e.firstChild.getAttribute('stroke-width'))}))"
    )
    found = {(int(edge["from"]), int(edge["to"])): float(edge["share"]) for edge in edges}
    assert len(found) > 10
    for (helper, helped), share in found.items():
        assert share == pytest.approx(mean[2, helped, helper], abs=1e-3)
    widths = [edge["width"] for edge in sorted(edges, key=lambda edge: float(edge["share"]))]
    assert widths == sorted(widths)
    assert widths[-1] > 2 * widths[0]


def test_seeds_and_runs_can_be_chosen(opened: Page) -> None:
    opened.choose("view", 2)
    assert np.allclose(opened.heat("heat-chart"), VECTORS[1, -1], atol=1e-4)
    assert "seed 1" in opened.text("accuracy-caption")
    line = opened.js("return document.getElementById('accuracy-received').data[1].y")
    assert np.allclose(np.array(line, dtype=float), ACCURACY[1, :, 1], atol=1e-2)
    opened.choose("run", 1)
    assert opened.text("influence-none") == "FedAvg measures no influence of clients on each other."
    assert opened.shown("influence-none")
    assert not any(opened.shown(name) for name in ("heat", "graph", "client", "time"))
    opened.choose("run", 0)
    assert all(opened.shown(name) for name in ("heat", "graph", "client", "time"))
    assert not opened.shown("influence-none")
    opened.choose("against", 1)
    assert np.allclose(opened.heat("difference"), [[2.5] * 5, [0] * 5], atol=0.02)


def _luminance(colour: tuple[float, ...]) -> float:
    """As WCAG defines it, of red, green and blue up to 255."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_numbers_in_heat_maps_can_be_read(opened: Page, theme: str) -> None:
    """Each digit has the contrast to the drawn colour of its cell that WCAG asks of small text."""
    opened.open(theme=theme)
    for chart, cells in (("heat-chart", 25), ("matrix-chart", 50), ("difference", 10)):
        opened.js("document.getElementById(arguments[0]).scrollIntoView({behavior: 'instant'})", chart)
        found = opened.js(
            """const chart = document.getElementById(arguments[0]);
            const image = chart.querySelector('.heatmaplayer image');
            const canvas = document.createElement('canvas');
            [canvas.width, canvas.height] = [image.width.baseVal.value, image.height.baseVal.value];
            const paper = canvas.getContext('2d', {willReadFrequently: true});
            paper.drawImage(image, 0, 0, canvas.width, canvas.height);
            const box = image.getBoundingClientRect();
            return [...chart.querySelectorAll('.scatterlayer .text text')].map((digits) => {
              const at = digits.getBoundingClientRect();
              const place = [at.x + at.width / 2 - box.x, at.y + at.height / 2 - box.y];
              return [getComputedStyle(digits).fill, [...paper.getImageData(...place, 1, 1).data]];
            });""",
            chart,
        )
        assert len(found) == cells
        for ink, (*cell, alpha) in found:
            assert alpha == 255
            text = tuple(float(part) for part in ink.removeprefix("rgb(").removesuffix(")").split(","))
            dark, light = sorted((_luminance(text), _luminance(tuple(cell))))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (chart, ink, cell)


ENDS = "const {zmin, zmax} = document.getElementById('heat-chart').data[0]; return [zmin, zmax]"


def test_colours_reach_as_far_as_the_weights_of_all_rounds(opened: Page) -> None:
    mean = VECTORS.mean(0)
    assert opened.js(ENDS) == pytest.approx([mean.min(), mean.max()], abs=1e-4)
    opened.js("document.getElementById('without-own').click()")
    others = mean[:, ~np.eye(5, dtype=bool)]
    assert opened.js(ENDS) == pytest.approx([others.min(), others.max()], abs=1e-4)


TILES = (
    "const tiles = [...document.querySelectorAll('.tile')];"
    "const values = tiles.map((tile) => tile.querySelector('.value'));"
    "return [tiles.map((tile) => tile.getBoundingClientRect().top),"
    " values.some((own) => own.scrollWidth > own.clientWidth)]"
)


def key_numbers_in_rows(page: Page, count: int) -> None:
    """At every width no row has a single one, and none is cut off."""
    for wide in (390, 800, 1100, 1280, 1440):
        page.resize(wide, 900)
        tops, is_cut = page.js(TILES)
        assert len(tops) == count
        assert min(tops.count(top) for top in tops) > 1, wide
        assert not is_cut, wide


def test_no_key_number_of_several_runs_is_alone_in_its_row(opened: Page) -> None:
    key_numbers_in_rows(opened, 5)


def test_scores_of_five_clients_fit_a_laptop_and_those_without_a_value_are_not_in_the_legend(
    driver: Any, tmp_path: Path
) -> None:
    federation = blank_federation(("Cleveland", "Hungary", "Switzerland", "Long Beach", "Emden"))
    scores = {seed: [[50.0 + seed, 60.0, 70.0, 80.0, np.nan]] for seed in range(2)}
    results = [made_up(federation, scores), made_up(federation, scores, method=FedAvg())]
    page = Page(driver, report.write(results, tmp_path / "five.html")).open((1280, 900))
    wide, room = page.js(
        "const own = document.getElementById('scores').parentElement;return [own.scrollWidth, own.clientWidth]"
    )
    assert wide <= room
    assert page.js("return document.getElementById('accuracy-legend').children.length") == 4 + 1  # and the average


def test_equal_weights_of_one_run_stay_pale(driver: Any, tmp_path: Path) -> None:
    """Half an equal share to both sides, however small the differences are; and this page has six key numbers."""
    vectors = np.full((1, 4, 4), 0.25) + 0.01 * np.eye(4)
    result = made_up(blank_federation("abcd"), {0: [[50, 60, 70, 80]]}, influence={"influence_vector": {0: vectors}})
    page = Page(driver, report.write([result], tmp_path / "equal.html")).open()
    assert page.js(ENDS) == pytest.approx([0.125, 0.375])
    key_numbers_in_rows(page, 6)


def test_the_player_starts_with_the_best_run_that_has_influence(driver: Any, tmp_path: Path) -> None:
    one = np.full((1, 2, 2), 0.5)
    worse, better = (
        made_up(blank_federation("ab"), {0: [[own] * 2]}, influence={"influence_vector": {0: one}}) for own in (50, 60)
    )
    page = Page(driver, report.write([worse, better], tmp_path / "two.html")).open()
    assert page.js("return document.getElementById('run').value") == "1"


@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["390", "1440"])
def test_nothing_is_wider_than_the_window(opened: Page, size: tuple[int, int]) -> None:
    opened.open(size)
    found = opened.js(
        "const parts = [...document.querySelectorAll('.chart, .card, #graph-chart svg')];"
        "return [document.documentElement.scrollWidth, ...parts.map(e => e.getBoundingClientRect().right)]"
    )
    assert len(found) > 10
    assert max(found) <= size[0] + 0.5
    drawn = opened.js("return document.querySelector('#heat-chart .main-svg').getBoundingClientRect().width")
    assert 250 < drawn <= size[0]


def test_dark_by_preference_and_by_button(opened: Page) -> None:
    def look() -> tuple[str, int, str]:
        colour = opened.js("return getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, colour.strip("rgb()").split(",")))
        first = opened.js("return document.getElementById('heat-chart').data[0].colorscale[0][1]")
        return opened.js("return document.documentElement.dataset.theme"), brightness, first

    light = look()
    opened.open(theme="dark")
    dark = look()
    assert (light[0], dark[0]) == ("light", "dark")
    assert light[1] > 600 > 150 > dark[1]
    assert light[2] != dark[2]
    opened.js("document.getElementById('theme').click()")
    assert look() == light


def test_prints_light_and_comes_back(opened: Page) -> None:
    opened.open(theme="dark")
    opened.js("addEventListener('beforeprint', () => { window.printed = document.documentElement.dataset.theme; })")
    assert len(opened.command("Page.printToPDF", printBackground=True)["data"]) > 50_000
    assert opened.js("return window.printed") == "light"
    opened.wait(lambda: opened.js("return document.documentElement.dataset.theme") == "dark")


def test_two_hundred_clients_are_grouped_and_usable(
    driver: Any, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    names = [f"{domain}/{k}" for domain in ("MNIST", "SVHN", "USPS", "Synth") for k in range(50)]
    draw, rounds = np.random.default_rng(1), 6
    vectors = draw.random((rounds, 200, 200))
    vectors /= vectors.sum(2, keepdims=True)
    vectors[:2, ::2] = np.nan
    matrices = draw.random((rounds, 200, 200, 10)) / 100
    seen = {"influence_vector": {0: vectors}, "influence_matrix": {0: matrices}}
    result = made_up(blank_federation(names, classes=10), {0: draw.uniform(40, 90, (rounds, 200))}, influence=seen)
    page = Page(driver, report.write([result], tmp_path / "many.html"))
    page.open()
    ready = float(page.js("return document.documentElement.dataset.ready")) / 1000
    began = time.monotonic()
    page.choose("round", 3)
    moved = time.monotonic() - began
    for name, value in (("bytes", page.path.stat().st_size), ("seconds until ready", ready), ("a step", moved)):
        record_property(name, value)
    assert page.path.stat().st_size < 12e6
    assert ready < 15
    assert moved < 5
    edges = page.js("return [...document.querySelectorAll('#graph-chart .edge')].map(e => ({...e.dataset}))")
    assert len(page.js("return [...document.querySelectorAll('#graph-chart .node')].map(e => e.ariaLabel)")) == 4
    assert len(edges) == 12
    for edge in edges:
        helped, helps = (slice(50 * int(edge[end]), 50 * int(edge[end]) + 50) for end in ("to", "from"))
        assert float(edge["share"]) == pytest.approx(vectors[3, helped, helps].sum(1).mean(), abs=2e-3)
    page.choose("client-select", 120)
    kept = page.js("return JSON.parse(document.getElementById('data').textContent).runs[0].influenceRounds.matrix")
    assert kept == [1, 3, 6]  # Λ of all six would not fit
    assert "in round 3 (the nearest that the page holds)" in page.text("matrix-caption")
    assert np.allclose(page.heat("matrix-chart"), matrices[2, 120], atol=1e-5)
