"""Small steps that damage a file, as plain numbers that hypothesis and a coverage-guided fuzzer can draw."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from readers import Files, Reader

Step = tuple[int, int, int]  # what to do, where, with what

WORDS = (
    *(b"\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 8, b"\n", b'"', b"/", b"../", b":"),
    *(b"PK\x05\x06", b"1e999", b"-1", b"9" * 30, b"[" * 300, b"{", b"}", b"\x1b[31m", b"\xed\xa0\x80", b"<U0", b"|O"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 2**400, 1e308, float("inf"), float("nan"), "", "\0", "a" * 300, "../x", "x\ny"),
    *([], {}, [[]], [None], {"a": {"b": []}}, "\ud800", "none", "evil.py:Method", "/etc/passwd", "9" * 5000),
)


def damaged(files: Files, reader: Reader, steps: Sequence[Step], inside: int) -> Files:
    """The same files, one of them changed.

    An odd ``inside`` changes what is packed in the file and packs it again; one from 128 makes checksums fit.
    """
    names = list(reader.victims) or list(files)
    name = names[inside // 2 % len(names)]
    layers = [layer for layer in _LAYERS if inside % 2 and layer[0](files[name])]
    parts = layers[0][1](files[name]) if layers else {"": files[name]}
    chosen = list(parts)[inside // 8 % len(parts)]
    for step in steps:
        parts = {**parts, chosen: _changed(parts[chosen], *step)}
    new = {**files, name: layers[0][2](parts) if layers else parts[""]}
    return reader.seal(new) if inside >= 128 else new


def _changed(content: bytes, kind: int, place: int, value: int) -> bytes:
    low = place % (len(content) + 1)
    high = min(len(content), low + 1 + value % 64)
    match kind % 9:
        case 0:
            return content[:low]
        case 1:
            return content[:low] + bytes([value % 256]) + content[low + 1 :]
        case 2:
            return content[:low] + bytes(byte ^ 1 << value % 8 for byte in content[low : low + 1]) + content[low + 1 :]
        case 3:
            word = WORDS[value % len(WORDS)]
            return content[:low] + word + content[low + len(word) :]
        case 4:
            return content[:low] + WORDS[value % len(WORDS)] + content[low:]
        case 5:
            return content[:low] + content[high:]
        case 6:
            return content[:high] + content[low:]
        case 7:
            return content[:low] + value.to_bytes(8, "little", signed=False)[: 1 + place % 8] + content[low + 8 :]
    return _changed_value(content, place, value)


def _changed_value(content: bytes, place: int, value: int) -> bytes:
    """Another value in a JSON file, in a line of JSON or of TOML; else another number in a text."""
    new = VALUES[value % len(VALUES)]
    lines = content.split(b"\n")
    number = place % len(lines)
    for text, before, after in (
        (content, b"", b""),
        (lines[number], b"\n".join([*lines[:number], b""]), b"\n".join([b"", *lines[number + 1 :]])),
    ):
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            continue
        nodes = list(_nodes(tree))
        if not nodes:
            continue
        holder, key = nodes[place // 7 % len(nodes)]
        holder[key] = new
        return before + json.dumps(tree).encode() + after
    found = [*re.finditer(rb"(?<== ).*|[0-9]+", content)]
    if not found:
        return content
    start, end = found[place % len(found)].span()
    return (
        content[:start] + (json.dumps(new) if value % 3 else str(new)[:2000]).encode("utf-8", "replace") + content[end:]
    )


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested lists and tables."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _nodes(tree[key])


def _unzip(content: bytes) -> Files:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zip(parts: Files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return buffer.getvalue()


_LAYERS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes], Files], Callable[[Files], bytes]], ...] = (
    (lambda own: own[:2] == b"PK", _unzip, _zip),
    (lambda own: own[:2] == b"\x1f\x8b", lambda own: {"": gzip.decompress(own)}, lambda own: gzip.compress(own[""])),
    (lambda own: own[:3] == b"BZh", lambda own: {"": bz2.decompress(own)}, lambda own: bz2.compress(own[""])),
)
