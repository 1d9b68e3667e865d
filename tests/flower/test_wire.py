"""Tensors on their way: every bit arrives, and what was not packed by us is refused before it costs anything."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr.app")
from fakes import identity, sent  # noqa: F401
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.flower.wire import HEADER, MOST_AXES, SMALL, one_line, pack, size, unpack

TYPES = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> Params:
    """Of any type and bits, nan's payloads included; some empty, some without an axis."""
    names = draw(st.lists(st.sampled_from(["w", "", "λ", "a.b", "\ud800\n"]), max_size=4, unique=True))
    found = {}
    for name in names:
        dtype = draw(st.sampled_from(TYPES))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        count = int(np.prod(shape))
        width = torch.empty(0, dtype=dtype).element_size()
        content = draw(st.binary(min_size=count * width, max_size=count * width))
        bits = torch.tensor(list(content), dtype=torch.uint8)
        found[name] = ((bits & 1).bool() if dtype == torch.bool else bits.view(dtype)).reshape(shape)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@settings(max_examples=60)
@given(tensors())
def test_every_bit_arrives(wanted: Params) -> None:
    got = unpack(pack(wanted))
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape, bits(got[name])) == (tensor.dtype, tensor.shape, bits(tensor))


def test_it_passes_flowers_own_serialisation_and_takes_any_layout() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    wanted = {"turned": whole.T, "cut": whole[:, 1:3], "trained": whole.clone().requires_grad_()}
    got = unpack(sent(Message(RecordDict({"t": pack(wanted)}), 1, "train")).content["t"])
    assert {name: own.tolist() for name, own in got.items()} == {name: own.tolist() for name, own in wanted.items()}
    got["turned"][0, 0] = 7.0  # the copies are our own, and can be written to
    assert whole[0, 0] == 0


def test_few_arrays_travel_however_many_tensors() -> None:
    many = {f"layer{n}.{kind}": torch.zeros(n % 3 + 1) for n in range(50) for kind in ("weight", "bias")}
    record = pack({**many, "count": torch.tensor(3)})
    assert set(record) == {HEADER, "float32", "int64"}
    numbers = 4 * sum(own.numel() for own in many.values()) + 8
    assert numbers < size(record) < numbers + 100 * 60


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'w' is bfloat16, which cannot be sent; allowed are float16, float32"):
        pack({"w": torch.zeros(2, dtype=torch.bfloat16)})


# Half precision.


@settings(max_examples=40)
@given(st.lists(st.floats(-65504, 65504, width=32), max_size=8))
def test_half_precision_rounds_to_float16_and_arrives_as_float32(values: list[float]) -> None:
    wanted = torch.tensor(values, dtype=torch.float32)
    record = pack({"w": wanted}, half=True)
    peak = float(wanted.abs().max()) if len(values) else 0.0
    if 0.0 < peak < SMALL:
        assert bits(unpack(record)["w"]) == bits(wanted)
        return
    assert set(record) == {HEADER, "float16"}
    got = unpack(record)["w"]
    assert got.dtype == torch.float32
    assert bits(got) == bits(wanted.half().float())


@pytest.mark.parametrize("odd", [65505.0, -1e6, torch.inf, -torch.inf, torch.nan])
def test_a_tensor_that_float16_cannot_hold_keeps_every_bit(odd: float) -> None:
    large, fine = torch.tensor([1 / 3, odd]), torch.tensor([1 / 3])
    got = unpack(pack({"large": large, "fine": fine}, half=True))
    assert bits(got["large"]) == bits(large)
    assert got["fine"] == fine.half().float() != fine


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16])
def test_half_precision_is_for_float32_alone(dtype: torch.dtype) -> None:
    wanted = torch.tensor([0, 1, 100]).to(dtype) / (3 if dtype == torch.float64 else 1)
    got = unpack(pack({"n": wanted.to(dtype)}, half=True))["n"]
    assert got.dtype == dtype
    assert bits(got) == bits(wanted.to(dtype))


# What others might send.


def header(*entries: Any) -> Array:
    return raw(json.dumps(entries).encode())


def raw(content: bytes) -> Array:
    return Array(np.frombuffer(content, dtype=np.uint8))


def record(entries: list[Any], **arrays: Any) -> ArrayRecord:
    own = {name: array if isinstance(array, Array) else Array(array) for name, array in arrays.items()}
    return ArrayRecord({HEADER: header(*entries), **own})


def as_bytes(content: bytes) -> Array:
    return Array("float32", (3,), "numpy.ndarray", content)


def claims(shape: str, descr: str = "'<f4'", behind: bytes = b"\0" * 12) -> Array:
    """An npy file whose header says what it likes."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return as_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + behind)


THREE, W = np.ones(3, dtype=np.float32), ["w", "float32", "float32", [3]]
GOOD = Array(THREE).data
HOSTILE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: ArrayRecord(),
    "a config": lambda: ConfigRecord({HEADER: b"[]"}),
    "no record": lambda: None,
    "no header": lambda: ArrayRecord({"float32": Array(THREE)}),
    "missing array": lambda: record([W]),
    "extra array": lambda: record([W], float32=THREE, int64=np.ones(1, dtype=np.int64)),
    "array of no type": lambda: record([W], float32=THREE, evil=THREE),
    "empty array of no type": lambda: record([W], float32=THREE, int8=np.zeros(0, dtype=np.int8)),
    "array of objects": lambda: record([["w", "object", "object", [3]]], object=THREE),
    "array without an entry": lambda: record([], float32=THREE),
    "entry too few": lambda: record([["w", "float32", "float32", [2]]], float32=THREE),
    "entry too many": lambda: record([["w", "float32", "float32", [4]]], float32=THREE),
    "one name twice": lambda: record(
        [["w", "float32", "float32", [1]], ["w", "float32", "float32", [2]]], float32=THREE
    ),
    "negative size": lambda: record([["w", "float32", "float32", [-3]]], float32=THREE),
    "two negative sizes": lambda: record([["w", "float32", "float32", [-3, -1]]], float32=THREE),
    "size that is left open": lambda: record([["w", "float32", "float32", [-1, 3]]], float32=THREE),
    "huge size": lambda: record([["w", "float32", "float32", [2**40]]], float32=THREE),
    "size beyond all numbers": lambda: record([["w", "float32", "float32", [10**30]]], float32=THREE),
    "empty and huge": lambda: record([["w", "float32", "float32", [0, 2**41]], W], float32=THREE),
    "very many axes": lambda: record([["w", "float32", "float32", [2**40] * 300_000]], float32=THREE),
    "fractional size": lambda: record([["w", "float32", "float32", [3.0]]], float32=THREE),
    "true for a size": lambda: record([["w", "float32", "float32", [3, True]]], float32=THREE),
    "text for a shape": lambda: record([["w", "float32", "float32", ""]], float32=np.ones(1, dtype=np.float32)),
    "table for a shape": lambda: record([["w", "float32", "float32", {}]], float32=np.ones(1, dtype=np.float32)),
    "number for a name": lambda: record([[1, "float32", "float32", [3]]], float32=THREE),
    "short entry": lambda: record([["w", "float32", [3]]], float32=THREE),
    "unknown type": lambda: record([["w", "complex64", "complex64", [3]]], complex64=np.ones(3, dtype=np.complex64)),
    "list for a type": lambda: record([["w", ["float32"], "float32", [3]]], float32=THREE),
    "type that grows": lambda: record([["w", "float64", "uint8", [3]]], uint8=np.ones(3, dtype=np.uint8)),
    "its header for an array": lambda: record([["w", "uint8", HEADER, [3]]]),
    "wrong type": lambda: record([W], float32=np.ones(3, dtype=np.float64)),
    "wrong byte order": lambda: record([W], float32=np.ones(3, dtype=">f4")),
    "square array": lambda: record([["w", "float32", "float32", [4]]], float32=np.ones((2, 2), dtype=np.float32)),
    "header of another type": lambda: ArrayRecord({HEADER: Array(np.array([91.0, 93.0]))}),
    "header that is no JSON": lambda: ArrayRecord({HEADER: raw(b"\xff\xfe{")}),
    "header that is a number": lambda: ArrayRecord({HEADER: raw(b"3")}),
    "header that is a table": lambda: ArrayRecord({HEADER: raw(b'{"abcd": 1}')}),
    "deep JSON": lambda: ArrayRecord({HEADER: raw(b"[" * 200_000)}),
    "number of many digits": lambda: ArrayRecord({HEADER: raw(b'[["w","float32","float32",[' + b"9" * 9999 + b"]]]")}),
    "long header": lambda: ArrayRecord({HEADER: raw(b" " * (2**24 + 1) + b"[]")}),
    "cut off": lambda: record([W], float32=as_bytes(GOOD[:-3])),
    "cut off in its head": lambda: record([W], float32=as_bytes(GOOD[:40])),
    "no bytes": lambda: record([W], float32=as_bytes(b"")),
    "bytes behind": lambda: record([W], float32=as_bytes(GOOD + b"\0" * 4)),
    "noise": lambda: record([W], float32=as_bytes(b"noise" * 100)),
    "an archive": lambda: record([W], float32=as_bytes(b"PK\x03\x04" + b"\0" * 100)),
    "a pickle": lambda: record([W], float32=as_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")),
    "pickled objects": lambda: record([W], float32=claims("(3,)", "'|O'", b"\x80\x04cos\nsystem\n(S'true'\ntR.")),
    "claims terabytes": lambda: record([W], float32=claims("(2**40,)")),
    "claims 8 TB": lambda: record([W], float32=claims(f"({2**41},)")),
    "claims less than nothing": lambda: record([W], float32=claims("(-3,)")),
    "claims fields": lambda: record([W], float32=claims("(3,)", "[('a', '<f4')]")),
    "claims no bytes a number": lambda: record([W], float32=claims("(3,)", "'|V0'")),
    "another version": lambda: record([W], float32=as_bytes(b"\x93NUMPY\x03\x00" + GOOD[8:])),
    "open quote": lambda: record([W], float32=claims("(3,", "'''")),
    "deep head": lambda: record([W], float32=claims("(" * 150 + ")" * 150)),
    "many signs": lambda: record([W], float32=claims("-" * 9000 + "1")),
    "code": lambda: record([W], float32=claims("__import__('os').abort()")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_we_did_not_pack_is_refused_in_a_line_and_at_once(name: str) -> None:
    made, began = HOSTILE[name](), time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"^not a record of tensors \(.+\)$") as refused:
            unpack(made)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 10
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300
    assert most < 2**26  # numpy's allocations are traced, touched or not


def test_its_own_example_is_taken() -> None:
    """What the refused ones differ from."""
    assert unpack(record([W], float32=THREE))["w"].tolist() == [1, 1, 1]
    deep = ["w", "float32", "float32", [1] * (MOST_AXES - 1) + [3]]
    assert unpack(record([deep], float32=THREE))["w"].numel() == 3


def outcome(made: ArrayRecord) -> Params | str:
    try:
        return unpack(made)
    except UserError as error:
        return str(error)


@settings(max_examples=100)
@pytest.mark.filterwarnings("ignore:invalid escape")
@given(st.binary(max_size=300), st.integers(0, 140), st.integers(0, 12))
def test_a_damaged_array_is_refused_or_still_of_its_shape(noise: bytes, where: int, cut: int) -> None:
    content = GOOD[:where] + noise + GOOD[where + len(noise) : len(GOOD) - cut]
    got = outcome(record([W], float32=as_bytes(content)))
    assert got.isprintable() if isinstance(got, str) else got["w"].shape == (3,)


ENTRY = st.tuples(
    st.sampled_from(["w", "", 1]),
    st.sampled_from(["float32", "float16", "uint8", "object", None]),
    st.sampled_from(["float32", "float32", "float16", HEADER, 3]),
    st.lists(st.sampled_from([-1, 0, 1, 3, 2**70, 1.0, "3"]), max_size=3) | st.none() | st.text(max_size=2),
)


@settings(max_examples=100)
@given(st.lists(ENTRY, max_size=3) | st.integers() | st.text(max_size=5))
def test_any_header_is_refused_or_means_all_that_is_there(entries: Any) -> None:
    got = outcome(ArrayRecord({HEADER: raw(json.dumps(entries).encode()), "float32": Array(THREE)}))
    assert got.isprintable() if isinstance(got, str) else sum(own.numel() for own in got.values()) == 3


def test_words_from_elsewhere_become_part_of_a_line() -> None:
    assert one_line("a\n b\t\x1b[31mred\x00 \u2028c") == "a b [31mred c"
    assert one_line("long " * 10**6, most=12) == "long long lo"
