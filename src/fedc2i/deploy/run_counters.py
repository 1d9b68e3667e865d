"""Counters of a run over real sites, in the text format that Prometheus reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically
from fedc2i.engine.records import Round

FILE = "metrics.prom"  # in the run folder
_PAUSE = 1.0  # seconds between two writes of what an attacker can cause


@dataclass
class RunCounters:
    """What has happened since the run's program was started; a resumed run counts from 0 again, as Prometheus expects.

    Attributes:
        sites: that take part in the run.
        rounds: that are finished, of all seeds.
        answers: of sites that trained.
        refusals: answers that were rejected, by site.
    """

    sites: int
    rounds: int = 0
    answers: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0

    def add(self, report: Round) -> None:
        """Counts a finished round."""
        count = len(report.participants)
        self.rounds += 1
        self.answers += count
        self.bytes_up += count * report.bytes_up
        self.bytes_down += count * report.bytes_down
        self.seconds += report.seconds
        for site in report.refused:
            self.refusals[site] = self.refusals.get(site, 0) + 1

    def write(self, folder: Path) -> None:
        """Writes them into a run folder."""
        write_atomically(folder / FILE, self.to_text().encode())

    def to_text(self) -> str:
        """The text that Prometheus reads."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from sample("sites", "gauge", "Sites of the run.", self.sites)
        yield from sample("rounds_total", "counter", "Finished rounds of all seeds.", self.rounds)
        yield from sample("answers_total", "counter", "Answers of sites that trained.", self.answers)
        yield from sample("received_bytes_total", "counter", "Bytes of models that sites sent.", self.bytes_up)
        yield from sample("sent_bytes_total", "counter", "Bytes of models that sites were sent.", self.bytes_down)
        yield from sample("round_seconds_total", "counter", "Seconds of all finished rounds.", round(self.seconds, 3))
        yield from header("refusals_total", "counter", "Answers that were rejected, by site.")
        for site, count in self.refusals.items():
            yield f'fedc2i_refusals_total{{site="{_escaped(site)}"}} {count}'


class RefusedRequests:
    """Counts requests that the gate refused, and writes them to a file, at most once a second."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, False
        self._counts = {403: 0, 413: 0}  # by HTTP status
        self._write()

    def add(self, status: int) -> None:
        """Counts one; to be called in an event loop."""
        self._counts[status] += 1
        if not self._waiting:
            self._waiting = True
            asyncio.get_running_loop().call_later(_PAUSE, self._write)

    def _write(self) -> None:
        self._waiting = False
        lines = header("refused_requests_total", "counter", "Requests that the gate refused, by HTTP status.")
        lines += [f'fedc2i_refused_requests_total{{status="{name}"}} {count}' for name, count in self._counts.items()]
        with suppress(UserError):  # a full disk must not end the SuperLink
            write_atomically(self._path, ("\n".join(lines) + "\n").encode())


def sample(name: str, kind: str, about: str, value: float) -> list[str]:
    """A metric without labels."""
    return [*header(name, kind, about), f"fedc2i_{name} {value}"]


def header(name: str, kind: str, about: str) -> list[str]:
    """What a metric is."""
    return [f"# HELP fedc2i_{name} {about}", f"# TYPE fedc2i_{name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
