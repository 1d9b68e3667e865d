"""The cache: where it lies, that writing is all or nothing, and that damage is noticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from fedc2i.core.errors import UserError
from fedc2i.data import converted_files, digit5
from fedc2i.data.federation import DataOptions
from support.published_files import write_usps


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDC2I_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert converted_files.root() == tmp_path / ".cache" / "fedc2i"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert converted_files.root() == tmp_path / "xdg" / "fedc2i"
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "own"))
    assert converted_files.file_of("digit5", "usps") == tmp_path / "own" / "digit5" / "usps.npz"


def store(tmp_path: Path) -> Path:
    source = tmp_path / "source.bin"
    source.write_bytes(b"published")
    target = tmp_path / "deep" / "a.npz"
    converted_files.write(target, {"a": np.arange(5)}, [source], ["a note"])
    return target


def test_manifest_records_sources_and_checksum(tmp_path: Path) -> None:
    target = store(tmp_path)
    manifest = converted_files.verify(target)
    assert manifest is not None
    assert manifest == converted_files.manifest(target)
    assert manifest.sha256 == hashlib.sha256(target.read_bytes()).hexdigest()
    assert manifest.sources == (converted_files.Source("source.bin", 9, hashlib.sha256(b"published").hexdigest()),)
    assert manifest.notes == ("a note",)
    np.testing.assert_array_equal(np.load(target)["a"], np.arange(5))
    assert sorted(path.name for path in target.parent.iterdir()) == ["a.manifest.json", "a.npz"]


def test_same_content_gives_the_same_checksum(tmp_path: Path) -> None:
    first = converted_files.manifest(store(tmp_path))
    assert converted_files.manifest(store(tmp_path)) == first


def test_damage_is_noticed(tmp_path: Path) -> None:
    target = store(tmp_path)
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.npz: its checksum differs .*run `fedc2i data prepare` again"):
        converted_files.verify(target)
    target.write_bytes(content[:-1])
    with pytest.raises(UserError, match="its checksum differs"):
        converted_files.verify(target)


def test_no_manifest(tmp_path: Path) -> None:
    assert converted_files.verify(tmp_path / "a.npz") is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = store(tmp_path)
    before = target.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match=r"a\.npz: cannot be written \(No space .*FEDC2I_CACHE"):
        store(tmp_path)
    assert target.read_bytes() == before
    assert sorted(path.name for path in target.parent.iterdir()) == ["a.manifest.json", "a.npz"]


def test_fingerprint_of_a_folder_follows_names_and_content(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "1").write_text("x")
    (folder / "2").write_text("yz")
    first = converted_files.fingerprint(folder)
    assert (first.name, first.bytes) == ("images/ (2 files)", 3)
    assert converted_files.fingerprint(folder) == first
    (folder / "2").rename(folder / "3")
    assert converted_files.fingerprint(folder).sha256 != first.sha256


def test_a_damaged_or_bare_cache_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    write_usps(data, 1200, 100)
    digit5.load("usps", DataOptions(data))
    file = converted_files.file_of("digit5", "usps")
    manifest = file.with_suffix(".manifest.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "sha256": "0" * 64}))
    with pytest.raises(UserError, match="its checksum differs"):
        digit5.load("usps", DataOptions(data))
    manifest.unlink()
    with pytest.raises(UserError, match=r"usps\.npz: no manifest beside it, run `fedc2i data prepare usps` again"):
        digit5.load("usps", DataOptions(data))
