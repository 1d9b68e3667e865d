"""Makes the pictures of the report and of `fedc2i watch` in docs/img: ``python docs/pictures.py RUN``.

RUN is the folder of a comparison with FedC²I, as `make demo` writes it. Needs selenium, chromium and chromedriver.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from fedc2i.report.html import page
from fedc2i.report.watch_view import watch
from fedc2i.runs.finished_run import read_run

IMAGES = Path(__file__).parent / "img"
METRIC = "balanced_accuracy"
METHODS = ("local", "fedavg", "fedproto", "fedc2i", "pooled")


def shoot(driver: Any, source: Path, name: str, size: tuple[int, int], theme: str = "light", section: str = "") -> None:
    """One picture of a page, from the section of that name."""
    wide, high = size
    size_of_page = {"width": wide, "height": high, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size_of_page)
    feature = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(source.as_uri())
    if section:
        driver.execute_script("document.getElementById(arguments[0]).scrollIntoView()", section)
    time.sleep(2)  # charts are drawn when they come into view
    driver.save_screenshot(str(IMAGES / name))


def main(run: Path) -> None:
    """All three pictures."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    with tempfile.TemporaryDirectory() as folder:
        report, terminal = Path(folder) / "report.html", Path(folder) / "watch.svg"
        page.write([read_run(run / name).showing(METRIC) for name in METHODS], report)
        console = Console(record=True, width=90, force_terminal=True, color_system="truecolor", file=sys.stderr)
        watch(run / "fedc2i", console, once=True)
        console.save_svg(str(terminal), title="fedc2i watch")
        driver = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
        try:
            shoot(driver, report, "report-verdict.png", (1340, 800), "dark")
            shoot(driver, report, "report-influence.png", (1340, 900), section="heat")
            shoot(driver, terminal, "watch.png", (1140, 500))
        finally:
            driver.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
