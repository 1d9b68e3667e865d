"""Operations for stacked clients against torch's own: convolutions, BatchNorm with padding, cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

from fedc2i.engine.executors.stacked import vmap_rules
from fedc2i.engine.executors.stacked.patches import patches_of
from fedc2i.engine.executors.stacked.vmap_rules import VmapRules

SEEDS, CLIENTS = 2, 3
GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"dilation": 2},
    {"stride": 3, "padding": 2},
    {"stride": 2, "padding": 1, "dilation": 2},
    {"stride": (1, 2), "padding": (2, 0), "dilation": (2, 1)},
    {"stride": (2, 1), "padding": (0, 1), "dilation": (1, 2)},
]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, **geometry: Any) -> Tensor:
    """Torch's convolution, one client of one seed after the other; leading axes ``(S, K)``."""
    rows = [
        torch.stack(
            [F.conv2d(x[s, k], weight[s, k], None if bias is None else bias[s, k], **geometry) for k in range(CLIENTS)]
        )
        for s in range(SEEDS)
    ]
    return torch.stack(rows)


def lifted(x: Tensor, weight: Tensor, bias: Tensor | None, **geometry: Any) -> Tensor:
    """The same, by a double vmap within `VmapRules`."""

    def one(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with VmapRules():
            return F.conv2d(x, weight, bias, **geometry)

    dims = (0, 0, None if bias is None else 0)
    return vmap(vmap(one, in_dims=dims), in_dims=dims)(x, weight, bias)


class _Spy:
    """Counts how often a convolution was taken for a product."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, real = 0, vmap_rules._convolve

        def convolve(*args: Any, **kwargs: Any) -> Tensor | None:
            result = real(*args, **kwargs)
            self.calls += result is not None
            return result

        monkeypatch.setattr(vmap_rules, "_convolve", convolve)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> _Spy:
    return _Spy(monkeypatch)


# Convolutions.


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (1, 4), (5, 2)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_convolutions_are_torch_s(
    kernel: tuple[int, int], geometry: dict[str, Any], bias: bool, products: _Spy
) -> None:
    x = noise(SEEDS, CLIENTS, 2, 3, 11, 12).requires_grad_()
    weight = noise(SEEDS, CLIENTS, 4, 3, *kernel, seed=1).requires_grad_()
    shift = noise(SEEDS, CLIENTS, 4, seed=2).requires_grad_() if bias else None
    leaves = [leaf for leaf in (x, weight, shift) if leaf is not None]
    want, got = by_hand(x, weight, shift, **geometry), lifted(x, weight, shift, **geometry)
    assert products.calls > 0
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    slope = noise(*want.shape, seed=3)
    gradients = torch.autograd.grad((got * slope).sum(), leaves)
    for mine, torch_s in zip(gradients, torch.autograd.grad((want * slope).sum(), leaves), strict=True):
        assert_close(mine, torch_s, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert_close(lifted(x, weight, shift, **geometry), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [1, 3, 4, 8])  # multiples of 4 are copied in a way of their own
@pytest.mark.parametrize("geometry", [{}, {"stride": 2, "padding": 1}, {"dilation": (2, 1)}], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels-last"])
def test_convolutions_in_single_precision(channels: int, geometry: dict[str, Any], layout: Any) -> None:
    x = noise(SEEDS, CLIENTS, 2, channels, 9, 8, dtype=torch.float32)
    x = x.flatten(0, 2).contiguous(memory_format=layout).unflatten(0, x.shape[:3]).requires_grad_()
    weight = noise(SEEDS, CLIENTS, 4, channels, 3, 3, seed=1, dtype=torch.float32).requires_grad_()
    want, got = by_hand(x, weight, None, **geometry), lifted(x, weight, None, **geometry)
    assert_close(got, want, rtol=1e-4, atol=1e-4)
    slope = noise(*want.shape, seed=3, dtype=torch.float32)
    gradients = torch.autograd.grad((got * slope).sum(), (x, weight))
    for mine, torch_s in zip(gradients, torch.autograd.grad((want * slope).sum(), (x, weight)), strict=True):
        assert_close(mine, torch_s, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [(1, 1), (1, 5), (5, 1)], ids=str)
def test_images_of_one_pixel_or_one_line(side: tuple[int, int]) -> None:
    """As behind a global mean; their strides in memory may be anything."""
    x, weight = noise(2, 8, *side, dtype=torch.float32), noise(3, 8, 1, 1, seed=1, dtype=torch.float32)
    with VmapRules():
        assert_close(F.conv2d(x, weight), torch.einsum("bchw,oc->bohw", x, weight[:, :, 0, 0]))
        pooled = x.mean((2, 3), keepdim=True)
        assert_close(F.conv2d(pooled, weight), torch.einsum("bchw,oc->bohw", pooled, weight[:, :, 0, 0]))


@pytest.mark.parametrize("channels", [3, 4])
def test_extra_numbers_of_patches_are_a_one_and_zeros_and_have_no_gradient(channels: int) -> None:
    x = noise(2, channels, 5, 6, dtype=torch.float32).requires_grad_()
    geometry = ((3, 2), (2, 1), (1, 2))
    want, got = patches_of(x, *geometry), patches_of(x, *geometry, 3)
    assert torch.equal(got[..., :-3], want)
    assert got[..., -3:].unique(dim=0).flatten(0, 1).unique(dim=0).tolist() == [[1, 0, 0]]
    slope = noise(*got.shape, seed=1, dtype=torch.float32).requires_grad_()
    (mine,), (theirs,) = (
        torch.autograd.grad((own * weight).sum(), x, create_graph=True)
        for own, weight in ((got, slope), (want, slope[..., :-3]))
    )
    assert torch.equal(mine, theirs)
    (again,) = torch.autograd.grad(mine.square().sum(), slope)
    assert not again[..., -3:].any()
    assert again[..., :-3].any()


@pytest.mark.parametrize("channels", [3, 4])
def test_a_batch_of_no_images(channels: int) -> None:
    x, weight = noise(SEEDS, CLIENTS, 0, channels, 6, 5), noise(SEEDS, CLIENTS, 2, channels, 3, 3, seed=1)
    leaves = [own.to(torch.float32).requires_grad_() for own in (x, weight)]
    got = lifted(*leaves, None, padding=1)
    assert got.shape == (SEEDS, CLIENTS, 0, 2, 6, 5)
    for leaf, own in zip(leaves, torch.autograd.grad(got.sum(), leaves), strict=True):
        assert torch.equal(own, torch.zeros_like(leaf))


@pytest.mark.parametrize("geometry", [{}, {"padding": 1, "dilation": 3}], ids=str)
def test_torch_explains_a_kernel_that_is_larger_than_the_image(geometry: dict[str, Any]) -> None:
    x, weight = noise(SEEDS, CLIENTS, 2, 3, 4, 4), noise(SEEDS, CLIENTS, 2, 3, 5, 5, seed=1)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        lifted(x, weight, None, **geometry)


def test_images_that_start_anywhere_in_memory() -> None:
    memory = noise(2 * 5 * 5 * 4 + 1, dtype=torch.float32)
    x, weight = memory[1:].reshape(2, 5, 5, 4).permute(0, 3, 1, 2), noise(3, 4, 3, 3, seed=1, dtype=torch.float32)
    want = F.conv2d(x, weight)
    with VmapRules():
        assert_close(F.conv2d(x, weight), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_weights_that_sum_over_very_many_patches(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is taken in parts then; here from 50 patches on, of `count` images with 100 each."""
    monkeypatch.setattr(vmap_rules, "_ROWS", 50)
    x, weight = noise(SEEDS, CLIENTS, count, 3, 12, 12), noise(SEEDS, CLIENTS, 4, 3, 3, 3, seed=1).requires_grad_()
    want, got = by_hand(x, weight, None), lifted(x, weight, None)
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    slope = noise(*want.shape, seed=3)
    (mine,) = torch.autograd.grad((got * slope).sum(), weight)
    assert_close(mine, torch.autograd.grad((want * slope).sum(), weight)[0], rtol=1e-10, atol=1e-10)


def test_images_that_all_clients_share() -> None:
    x, weight = noise(2, 3, 8, 8), noise(SEEDS, CLIENTS, 4, 3, 3, 3, seed=1)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        with VmapRules():
            return F.conv2d(x, weight, padding=1).square().sum()

    both = vmap(vmap(grad(loss), in_dims=(0, None)), in_dims=(0, None))(weight, x)
    for s in range(SEEDS):
        for k in range(CLIENTS):
            want = grad(lambda own: F.conv2d(x, own, padding=1).square().sum())(weight[s, k])
            assert_close(both[s, k], want, rtol=1e-10, atol=1e-10)


def test_second_derivatives() -> None:
    x, weight = noise(2, 2, 6, 6).requires_grad_(), noise(3, 2, 3, 3, seed=1).requires_grad_()

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        with VmapRules():
            return F.conv2d(x, weight, stride=2, padding=1)

    assert torch.autograd.gradgradcheck(convolve, (x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        ((2, 4, 6, 6), (4, 2, 3, 3), {"groups": 2}),
        ((2, 4, 6, 6), (4, 1, 3, 3), {"groups": 4}),
        ((2, 3, 6, 6), (4, 3, 3, 3), {"padding": "same"}),
        ((2, 3, 6, 6), (4, 3, 3, 3), {"padding": "valid"}),
        ((3, 6, 6), (4, 3, 3, 3), {}),
    ],
    ids=["groups", "depthwise", "same", "valid", "one-image"],
)
def test_other_convolutions_are_left_to_torch(
    x: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any], products: _Spy
) -> None:
    images, kernel = noise(*x), noise(*weight, seed=1)
    with VmapRules():
        got = F.conv2d(images, kernel, **options)
    assert torch.equal(got, F.conv2d(images, kernel, **options))
    assert products.calls == 0


@pytest.mark.parametrize(("widest", "taken"), [(None, 1), (27, 1), (26, 0)])
def test_wide_patches_are_left_to_torch_if_asked(widest: int | None, taken: int, products: _Spy) -> None:
    with VmapRules(widest=widest):
        F.conv2d(noise(2, 3, 6, 6), noise(4, 3, 3, 3))
    assert products.calls == taken


def test_arguments_by_name() -> None:
    x, weight, bias = noise(2, 3, 6, 6), noise(4, 3, 3, 3, seed=1), noise(4, seed=2)
    want = F.conv2d(x, weight, bias, 2)
    with VmapRules():
        assert_close(F.conv2d(x, weight=weight, bias=bias, stride=2), want, rtol=1e-10, atol=1e-10)
        assert_close(F.conv2d(input=x, weight=weight, bias=bias, stride=2), want, rtol=1e-10, atol=1e-10)


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(len(x), -1),
    "view-of-a-tuple": lambda x: x.view((-1, 4 * 36)),
    "flatten": lambda x: x.flatten(1),
    "max-pool": lambda x: F.max_pool2d(x, 2).view(len(x), -1),
    "mean-pool": lambda x: F.adaptive_avg_pool2d(x, 2).view(len(x), -1),
    "group-norm": lambda x: F.group_norm(x, 2),
    "group-norm-layer": lambda x: nn.GroupNorm(2, 4).double()(x).view(len(x), -1),
    "instance-norm": F.instance_norm,
    "layer-norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "depthwise": lambda x: F.conv2d(x, torch.ones(4, 1, 3, 3).double(), groups=4),
}


@pytest.mark.parametrize("following", AFTER.values(), ids=AFTER.keys())
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_may_follow_a_convolution(following: Callable[[Tensor], Tensor]) -> None:
    """Its result lies otherwise in memory than torch's, which must not matter."""
    x = noise(SEEDS, CLIENTS, 2, 3, 8, 8)
    weight = noise(SEEDS, CLIENTS, 4, 3, 3, 3, seed=1).requires_grad_()

    def one(x: Tensor, weight: Tensor) -> Tensor:
        with VmapRules(torch.ones(2)):
            return following(F.conv2d(x, weight))

    got = vmap(vmap(one))(x, weight)
    seeds = zip(x, weight, strict=True)
    want = torch.stack([torch.stack([following(F.conv2d(*own)) for own in zip(*seed, strict=True)]) for seed in seeds])
    assert_close(got, want, rtol=1e-9, atol=1e-9)
    slope = noise(*want.shape, seed=3)
    (mine,) = torch.autograd.grad((got * slope).sum(), weight)
    assert_close(mine, torch.autograd.grad((want * slope).sum(), weight)[0], rtol=1e-9, atol=1e-9)


def test_a_view_as_another_type_stays_one() -> None:
    with VmapRules():
        assert torch.ones(2, dtype=torch.float32).view(torch.int32).dtype == torch.int32


def test_outside_the_context_nothing_is_replaced(products: _Spy) -> None:
    F.conv2d(noise(2, 3, 6, 6), noise(4, 3, 3, 3))
    assert products.calls == 0


# BatchNorm.

REAL = (4, 2, 1)  # samples of three clients; their batches are padded to five


def batch_norms(dimensions: int, **options: Any) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    layer = nn.BatchNorm1d if dimensions == 1 else nn.BatchNorm2d
    return lambda: layer(3, **options).double(), (3,) if dimensions == 1 else (3, 4, 5)


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": 0.5}], ids=str)
def test_padding_does_not_enter_batch_norm(dimensions: int, options: dict[str, Any]) -> None:
    """Outputs, gradients, running statistics and the count of batches: as the plain layer on the samples alone."""
    make, shape = batch_norms(dimensions, **options)
    real = [count for count in REAL if dimensions == 2 or count > 1]  # of one number torch takes no statistics
    x, w, slope = noise(len(real), 5, *shape), torch.zeros(len(real), 5), noise(len(real), 5, *shape, seed=1)
    for k, count in enumerate(real):
        w[k, :count] = 1
        x[k, count:] = 1000.0
    template = make()
    state = {name: tensor.detach() for name, tensor in (*template.named_parameters(), *template.named_buffers())}
    if options.get("affine", True):
        state |= {"weight": noise(3, seed=2), "bias": noise(3, seed=3)}
    stacked = {name: torch.stack([tensor] * len(real)) for name, tensor in state.items()}

    def loss(x: Tensor, params: dict[str, Tensor], w: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        with VmapRules(w):
            out = functional_call(template, params, (x,))
        padded = w.reshape(-1, *[1] * (x.ndim - 1))
        return (out * slope * padded).sum(), out

    gradients, outs = vmap(grad(loss, has_aux=True))(x, stacked, w, slope)
    for k, count in enumerate(real):
        layer = make()
        layer.load_state_dict(state)
        own = x[k, :count].clone().requires_grad_()
        want = layer(own)
        assert_close(outs[k, :count], want, rtol=1e-9, atol=1e-9)
        (torch_s,) = torch.autograd.grad((want * slope[k, :count]).sum(), own)
        assert_close(gradients[k, :count], torch_s, rtol=1e-9, atol=1e-9)
        assert (gradients[k, count:] == 0).all()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert_close(stacked[name][k], layer.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_statistics_of_a_batch_of_padding_only_are_finite() -> None:
    layer = nn.BatchNorm1d(3)
    with VmapRules(torch.zeros(5)):
        out = layer(torch.ones(5, 3))
    assert torch.isfinite(out).all()
    assert torch.isfinite(layer.running_var).all()


@pytest.mark.parametrize("how", ["evaluation", "no-weights"])
def test_batch_norm_is_torch_s_where_nothing_is_padded(how: str) -> None:
    layer, x = nn.BatchNorm1d(3).double(), noise(5, 3)
    layer.running_mean += 1
    layer.train(how != "evaluation")
    with VmapRules(torch.tensor([1.0, 1, 0, 0, 0]) if how == "evaluation" else None):
        got = layer(x)
    other = nn.BatchNorm1d(3).double()
    other.running_mean += 1
    assert torch.equal(got, other.train(how != "evaluation")(x))


# Cross entropy.

LOGITS, LABELS = noise(6, 4), torch.tensor([0, 3, 1, 1, 2, 0])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_is_torch_s(reduction: str) -> None:
    logits = noise(SEEDS, CLIENTS, 6, 4)

    def loss(logits: Tensor) -> Tensor:
        with VmapRules():
            return F.cross_entropy(logits, LABELS, reduction=reduction)

    got, slopes = vmap(vmap(loss))(logits), vmap(vmap(grad(lambda own: loss(own).sum())))(logits)
    for s in range(SEEDS):
        for k in range(CLIENTS):
            assert_close(got[s, k], F.cross_entropy(logits[s, k], LABELS, reduction=reduction))
            want = grad(lambda own: F.cross_entropy(own, LABELS, reduction=reduction).sum())(logits[s, k])
            assert_close(slopes[s, k], want)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    ("target", "options"),
    [
        (LABELS, {"label_smoothing": 0.2}),
        (LABELS, {"weight": torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)}),
        (LABELS, {"ignore_index": 1}),
        (noise(6, 4, seed=5).softmax(1), {}),
    ],
    ids=["smoothing", "class-weights", "ignored", "soft-targets"],
)
def test_cross_entropy_with_options_is_left_to_torch(target: Tensor, options: dict[str, Any], reduction: str) -> None:
    want = F.cross_entropy(LOGITS, target, reduction=reduction, **options)
    with VmapRules():
        assert torch.equal(F.cross_entropy(LOGITS, target, reduction=reduction, **options), want)
        module = nn.CrossEntropyLoss(reduction=reduction, **options)
        assert torch.equal(module(LOGITS, target), want)


def test_the_usual_cross_entropy_is_replaced_however_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's would import its compiler under vmap."""
    seen: list[Any] = []
    real = vmap_rules._cross_entropy

    def replaced(*args: Any, **kwargs: Any) -> Tensor | None:
        result = real(*args, **kwargs)
        seen.append(None if result is None else kwargs["reduction"])
        return result

    monkeypatch.setattr(vmap_rules, "_cross_entropy", replaced)
    with VmapRules():
        F.cross_entropy(LOGITS, LABELS)
        F.cross_entropy(input=LOGITS, target=LABELS, reduction="sum")
        F.cross_entropy(LOGITS, LABELS, None, None, -100, None, "none")
        nn.CrossEntropyLoss()(LOGITS, LABELS)
    assert seen == ["mean", "sum", "none", "mean"]


def test_one_sample_without_an_axis_and_dense_labels_are_left_to_torch() -> None:
    dense, labels = noise(2, 4, 3, 3), torch.ones(2, 3, 3, dtype=torch.int64)
    with VmapRules():
        assert torch.equal(F.cross_entropy(LOGITS[0], LABELS[0]), -LOGITS[0].log_softmax(0)[LABELS[0]])
        assert_close(F.cross_entropy(dense, labels), -dense.log_softmax(1)[:, 1].mean())
