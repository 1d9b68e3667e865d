"""Our own GPU kernels against torch's operations; without a GPU they run in Triton's interpreter, if it is on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F  # noqa: N812

from fedc2i.engine.executors.stacked import kernel_support, kernel_uses
from fedc2i.engine.executors.stacked.patches import _Images, _Patches
from fedc2i.engine.executors.stacked.vmap_rules import VmapRules
from support.kernels import CUDA, DEVICE, needs_kernels

PRECISIONS = ["ieee", "tf32", *(["bf16"] if CUDA else [])]  # the interpreter has no products in bf16
TOLERANCE = {"ieee": 1e-5, "tf32": 3e-3, "bf16": 3e-2}
SEEDS, CLIENTS = 2, 2
NAME = "fedc2i.engine.executors.stacked.gpu_layers"


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    from fedc2i.engine.executors.stacked import gpu_layers

    kinds = (torch.float32, torch.bfloat16)
    monkeypatch.setattr(kernel_support, "layers_for", lambda x: gpu_layers if x.dtype in kinds else None)
    return gpu_layers


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee" if request.param == "ieee" else "tf32"
    yield request.param
    matmul.fp32_precision = before


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def distance(got: Tensor, want: Tensor) -> float:
    return float(torch.dist(got.double(), want.double()).detach() / want.double().norm().detach())


def lifted(function: Callable[..., Tensor], *tensors: Tensor, bf16: bool = False) -> Tensor:
    """Over clients and seeds, within `VmapRules`."""

    def one(*own: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16), VmapRules():
            return function(*own)

    return vmap(vmap(one))(*tensors)


def by_hand(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """In double precision, one client after the other."""
    rows = [[function(*(own[s, k].double() for own in tensors)) for k in range(CLIENTS)] for s in range(SEEDS)]
    return torch.stack([torch.stack(row) for row in rows])


# Convolutions.


@needs_kernels
@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "geometry"),
    [
        (3, 6, (5, 5), {}),
        (1, 70, (3, 3), {"padding": 1}),  # outputs in two blocks
        (16, 20, (3, 2), {"padding": (2, 1)}),
        (64, 32, (5, 5), {}),
        (48, 16, (1, 1), {}),
        (64, 64, (3, 3), {"padding": 1}),
        (4, 8, (3, 3), {"stride": 2, "padding": 1}),  # by patches in every precision
        (8, 8, (3, 3), {"dilation": (2, 1)}),
    ],
    ids=str,
)
def test_convolutions_are_torch_s(
    channels: int, outputs: int, kernel: tuple[int, int], geometry: dict[str, Any], precision: str, layers: Any
) -> None:
    x, weight = noise(SEEDS, CLIENTS, 2, channels, 7, 8), noise(SEEDS, CLIENTS, outputs, channels, *kernel, seed=1)
    leaves = [own.requires_grad_() for own in (x, weight, noise(SEEDS, CLIENTS, outputs, seed=2))]

    def convolve(*own: Tensor) -> Tensor:
        return F.conv2d(*own, **geometry)

    want, got = by_hand(convolve, *leaves), lifted(convolve, *leaves, bf16=precision == "bf16")
    assert distance(got, want) < TOLERANCE[precision]
    slope = noise(*want.shape, seed=3)
    for mine, torch_s in zip(
        torch.autograd.grad((got * slope).sum(), leaves),
        torch.autograd.grad((want * slope).sum(), leaves),
        strict=True,
    ):
        assert distance(mine, torch_s) < TOLERANCE[precision]


@needs_kernels
def test_long_sums_are_taken_in_chunks(layers: Any, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_CHUNK_ROWS", 70)
    x, weight = noise(SEEDS, CLIENTS, 3, 3, 9, 9), noise(SEEDS, CLIENTS, 4, 3, 3, 3, seed=1).requires_grad_()
    want, got = by_hand(F.conv2d, x, weight), lifted(F.conv2d, x, weight, bf16=precision == "bf16")
    slope = noise(*want.shape, seed=3)
    (mine,), (torch_s,) = (torch.autograd.grad((own * slope).sum(), weight) for own in (got, want))
    assert distance(mine, torch_s) < TOLERANCE[precision]


def net(w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    x = F.relu(F.max_pool2d(F.conv2d(x, w1), 2))
    return F.max_pool2d(F.conv2d(x, w2, padding=1), (2, 2), 2).pow(2).sum()


@needs_kernels
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, 0, None), (None, 0, 0), (None, None, 0), (None, 0, None)], ids=str)
def test_what_clients_share_and_gradients_within_vmap(
    dims: tuple[int | None, ...], layers: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, or weights, of all clients: more outputs, or more images, of one call."""
    shapes = ((6, 3, 3, 3), (4, 6, 3, 3), (2, 3, 9, 10))
    own = [
        noise(*([CLIENTS] if dim == 0 else []), *shape, seed=dim or 1) for shape, dim in zip(shapes, dims, strict=True)
    ]

    def loss(*tensors: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16"), VmapRules():
            return net(*tensors)

    got = vmap(grad(loss, argnums=(0, 1)), in_dims=dims)(*own)
    monkeypatch.setattr(kernel_support, "layers_for", lambda x: None)
    want = vmap(grad(net, argnums=(0, 1)), in_dims=dims)(*(part.double() for part in own))
    for mine, torch_s in zip(got, want, strict=True):
        assert distance(mine, torch_s) < 3 * TOLERANCE[precision]


@needs_kernels
def test_gradients_of_gradients(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w1, w2, x = noise(CLIENTS, 6, 3, 3, 3), noise(CLIENTS, 4, 6, 3, 3, seed=1), noise(CLIENTS, 2, 3, 9, 10, seed=2)

    def slope_size(w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
        with VmapRules():
            return grad(net)(w1, w2, x).pow(2).sum()

    got = vmap(grad(slope_size))(w1, w2, x)
    monkeypatch.setattr(kernel_support, "layers_for", lambda x: None)
    assert distance(got, vmap(grad(slope_size))(*(own.double() for own in (w1, w2, x)))) < TOLERANCE["tf32"]


@pytest.mark.skipif(not CUDA, reason="the interpreter has no order of its own")
def test_the_same_bits_every_time(layers: Any, precision: str) -> None:
    leaves = [noise(SEEDS, CLIENTS, *shape).requires_grad_() for shape in ((6, 3, 3, 3), (16, 6, 3, 3), (5, 3, 30, 30))]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(lifted(net, *leaves, bf16=precision == "bf16").sum(), leaves)

    for one, two in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, two)


@needs_kernels
@pytest.mark.parametrize(
    "precision", [kind for kind in PRECISIONS if kind != "ieee"], indirect=True
)  # cuBLAS may choose
def test_other_models_do_not_change_a_model_s_bits(
    layers: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_CHUNK_ROWS", 100)
    leaves = [noise(SEEDS, CLIENTS, *shape).requires_grad_() for shape in ((6, 3, 3, 3), (16, 6, 3, 3), (5, 3, 12, 12))]
    few = [leaf.detach()[1:, 1:].clone().requires_grad_() for leaf in leaves]
    both = [torch.autograd.grad(lifted(net, *own, bf16=precision == "bf16").sum(), own) for own in (leaves, few)]
    for one, two in zip(*both, strict=True):
        assert torch.equal(one[1:, 1:], two)


# Pooling and patches: numbers are moved, or added in the order of torch's operations, so they have the same bits.


@needs_kernels
@pytest.mark.parametrize("side", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pooling_has_torch_s_bits(side: int, dtype: torch.dtype, layers: Any) -> None:
    """With equal maxima, rows and columns that are left over, and nan."""
    x = noise(SEEDS, CLIENTS, 2, 5, 7, 10).mul(2).round().to(dtype)
    x[0, 0, 0, 0, 1, 1] = torch.nan
    x.requires_grad_()
    want = torch.stack([torch.stack([F.max_pool2d(own, side) for own in seed]) for seed in x])
    got = lifted(lambda own: F.max_pool2d(own, side), x)
    assert torch.equal(got.nan_to_num(99), want.nan_to_num(99))
    slope = noise(*want.shape, seed=1).to(dtype)
    mine, torch_s = (torch.autograd.grad((own.nan_to_num(0) * slope).sum(), x)[0] for own in (got, want))
    assert torch.equal(mine, torch_s)


@needs_kernels
@pytest.mark.parametrize(
    "options", [{"stride": 1}, {"padding": 1}, {"ceil_mode": True}, {"dilation": 2}, {"return_indices": True}], ids=str
)
def test_other_pooling_is_left_to_torch(options: dict[str, Any], layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "max_pool", None)
    x = noise(2, 3, 7, 8)
    want = F.max_pool2d(x, 3, **options)
    with VmapRules():
        torch.testing.assert_close(F.max_pool2d(x, 3, **options), want)


@needs_kernels
@pytest.mark.parametrize(("channels", "extra"), [(3, 0), (3, 2), (64, 0), (64, 3)])
@pytest.mark.parametrize(("stride", "dilation"), [((1, 1), (1, 1)), ((2, 1), (1, 2))])
def test_patches_have_the_bits_of_torch_s_copies(
    channels: int,
    extra: int,
    stride: tuple[int, int],
    dilation: tuple[int, int],
    layers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, where = noise(3, channels, 9, 8), ((3, 2), stride, dilation, extra)
    both = [_Patches.forward(x, *where, one) for one in (True, False)]
    patches = both[0]
    images = _Images.forward(patches, (channels, 9, 8), *where)
    monkeypatch.setattr(kernel_support, "layers_for", lambda x: None)
    for own, one in zip(both, (True, False), strict=True):
        assert torch.equal(own, _Patches.forward(x, *where, one))
    assert torch.equal(images, _Images.forward(patches, (channels, 9, 8), *where))


# Where there is no Triton.


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 without gcc."""

    def max_pool(*_: Any) -> None:
        raise RuntimeError("no gcc\nPlease specify")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: torch.empty(size))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__spec__=ModuleSpec("triton", None)))
    monkeypatch.setitem(sys.modules, NAME, SimpleNamespace(max_pool=max_pool))
    monkeypatch.delattr(NAME, raising=False)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("is_broken", "reason"), [(False, "no gcc$"), (True, "import of .* halted")], ids=["no compiler", "broken"]
)
def test_a_triton_that_does_not_work_is_news(is_broken: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_broken:
        monkeypatch.setitem(sys.modules, NAME, None)
    news = f"^Triton does not work here, so training runs by torch's slower kernels: {reason}"
    with pytest.warns(UserWarning, match=news):
        assert kernel_support._layers.__wrapped__() is None


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("missing", ["Triton", "CUDA", "tensor cores"])
def test_where_kernels_do_not_run_torch_s_do_without_a_word(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "Triton":
        monkeypatch.setitem(sys.modules, "triton", None)
    elif missing == "CUDA":
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_support._layers.__wrapped__() is None


@pytest.mark.parametrize("works", [True, False])
def test_asking_for_kernels_is_no_use_of_them(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asking for uses compiles nothing."""
    asked: list[int] = []
    layers = SimpleNamespace(max_pool=kernel_uses.counted(lambda x, side: x)) if works else None
    monkeypatch.setattr(kernel_support, "_layers", lambda: asked.append(1) or layers)
    before = kernel_uses.uses()
    assert not asked
    kernel_support.layers_for(torch.ones(1))  # on a CPU
    assert not asked
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        image: Any = SimpleNamespace(is_cuda=True, dtype=kind)
        assert (kernel_support.layers_for(image) is layers) is (kind != torch.float64 or not works)
    assert kernel_uses.uses() == before
    if layers is not None:
        layers.max_pool(torch.ones(1), side=1)
        assert kernel_uses.uses() == before + 1


@pytest.mark.usefixtures("no_compiler")
def test_a_trial_is_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = SimpleNamespace(max_pool=kernel_uses.counted(lambda x, side: x))
    monkeypatch.setitem(sys.modules, NAME, layers)
    before = kernel_uses.uses()
    assert kernel_support._layers.__wrapped__() is layers
    assert kernel_uses.uses() == before


@needs_kernels
def test_every_layer_counts_its_uses(layers: Any) -> None:
    from fedc2i.engine.executors import gpu_norms, gpu_products, winograd

    image = noise(1, 4, 4, 16).permute(0, 3, 1, 2)
    weight, bias, one = noise(16, 16, 1, 1), noise(16), (1, 1)
    found = []
    for compute in (
        lambda: layers.convolution(noise(1, 4, 4, 16), noise(16, 3, 3, 16), bias, one),
        lambda: layers.max_pool(noise(1, 4, 4, 16), 2),
        lambda: layers.unfold(noise(1, 4, 4, 16), (2, 2), (3, 3), one, one, 0, False),
        lambda: layers.fold(noise(1, 4, 144), (4, 4, 16), (2, 2), (3, 3), one, one, 0),
        lambda: gpu_norms.group_norm(image, 2, bias, bias, 1e-5),
        lambda: gpu_products.convolution(image, weight, bias, one, (0, 0), one),
        lambda: winograd.convolution(image, noise(16, 16, 3, 3), bias, one),
    ):
        before = kernel_uses.uses()
        compute()
        found.append(kernel_uses.uses() - before)
    assert found == [1] * 7
