"""The coordinator's status port: health, and counters that Prometheus reads."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from fedc2i.core.errors import UserError
from fedc2i.deploy import health
from fedc2i.deploy.child_process import free_port
from fedc2i.deploy.run_counters import FILE, RunCounters
from fedc2i.deploy.status_server import MOST_TEXT, status_server
from fedc2i.engine.records import Round

VALUE = re.compile(r'fedc2i_([a-z_]+)(\{site="((?:[^"\\]|\\.)*)"\})? ([0-9.e+-]+)')


def read(text: str) -> dict[str, float]:
    """The samples of Prometheus' text format; every metric has its type before it."""
    assert text.endswith("\n")
    found, types = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            types.add(line.split()[2])
        elif not line.startswith("#"):
            name, _, site, value = VALUE.fullmatch(line).groups()  # type: ignore[union-attr]
            assert f"fedc2i_{name}" in types
            found[f"{name} " + json.loads('"' + site + '"') if site else name] = float(value)
    return found


def report(number: int, refused: tuple[str, ...] = ()) -> Round:
    return Round(0, number, 1.5, ("a", "b", "c"), {}, {}, refused, 100, 300)


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_counters_of_rounds() -> None:
    counters = RunCounters(4)
    assert read(counters.to_text())["rounds_total"] == 0
    for number in (1, 2):
        counters.add(report(number, ('b"\\\n',) if number == 2 else ()))
    assert read(counters.to_text()) == {
        **{"sites": 4, "rounds_total": 2, "answers_total": 6, "received_bytes_total": 600, "sent_bytes_total": 1800},
        **{"round_seconds_total": 3.0, 'refusals_total b"\\\n': 1},
    }


def test_health_and_metrics_and_nothing_else(tmp_path: Path) -> None:
    alive = True
    (tmp_path / "config.toml").write_text("secret")
    address = f"127.0.0.1:{free_port()}"
    with status_server(address, [tmp_path / FILE, tmp_path / "refused.prom"], lambda: alive) as port:
        assert get(port, "/healthz") == (200, "ok\n")
        assert health.problem(address) == ""
        assert read(get(port, "/metrics")[1]) == {"up": 1}  # the run has not started
        counters = RunCounters(3)
        counters.add(report(1))
        counters.write(tmp_path)
        (tmp_path / "refused.prom").write_text('fedc2i_refused_requests_total{status="413"} 7\n')
        assert '\nfedc2i_refused_requests_total{status="413"} 7\n' in get(port, "/metrics")[1]
        (tmp_path / "refused.prom").unlink()
        assert read(get(port, "/metrics")[1])["answers_total"] == 3
        for path in ("/", "/config.toml", "/../config.toml", "/metrics/../config.toml", "/healthz?x"):
            assert get(port, path)[0] == 404, path
        assert get(port, "/healthz", "POST")[0] == 501
        (tmp_path / FILE).write_bytes(b"#" * 2 * MOST_TEXT)
        assert len(get(port, "/metrics")[1]) < MOST_TEXT + 1000
        alive = False
        assert get(port, "/healthz")[0] == 503
        assert "503" in health.problem(address)
        assert read(get(port, "/metrics")[1].partition("###")[0])["up"] == 0
        with (
            pytest.raises(UserError, match=r"--status .*: cannot listen there"),
            status_server(address, [], lambda: True),
        ):
            pass
    assert "refused" in health.problem(address)


@pytest.mark.parametrize("address", ["9093", "localhost:9093", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", ":1"])
def test_an_address_that_is_none_is_a_line(address: str) -> None:
    with pytest.raises(UserError, match="--status"), status_server(address, [], lambda: True):
        pass


def test_a_site_is_healthy_while_its_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PROCESSES", tmp_path)
    assert health.problem(None) == "the site's program does not run"
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "cmdline").write_bytes(b"python\0-P\0-m\0fedc2i.deploy.node_executor\0--port\0001\0")
    assert health.problem(None) == ""
