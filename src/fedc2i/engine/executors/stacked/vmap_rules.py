"""Operations as stacked clients need them: torch's own, but for a few that ``torch.func.vmap`` would run badly.

A convolution whose *weights* differ between clients becomes, under vmap, one small convolution per client. As a matrix
product over image patches it is one batched product for all of them; on a GPU, where precision allows it, one kernel
that stores no patches. A BatchNorm layer in training would take the padding of a short batch for samples; here padding
has no weight in its statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from fedc2i.engine.executors.stacked import kernel_support
from fedc2i.engine.executors.stacked.patches import patches_of, positions
from fedc2i.training.local import any_layout

_ROWS = 2048  # patches that are worth a separate product: weight gradients sum over many, for few outputs
_PARTS = 16
_PLAIN_POOL = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
_NO_OPTIONS = {"size_average": None, "ignore_index": -100, "reduce": None, "label_smoothing": 0.0}


class VmapRules(TorchFunctionMode):
    """Within this context operations suit ``vmap`` and a GPU, and padding does not enter batch statistics.

    Convolutions, max-pooling, linear layers, cross entropy and attention give torch's results, up to rounding.
    """

    def __init__(self, w: Tensor | None = None, widest: int | None = None) -> None:
        """``w`` ``(B,)`` are weights of the batch that is trained on, 0 for padding; none if nothing is padded.

        Only convolutions over patches of at most ``widest`` numbers become products.
        """
        super().__init__()
        self._w, self._widest = w, widest

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result: Tensor | None = None  # what is unusual is left to torch
        if func is torch.conv2d:
            result = _convolve(self._widest, *args, **kwargs)
        elif func is F.max_pool2d:
            result = _max_pool(*args, **kwargs)
        elif func is F.linear:
            result = _linear(*args, **kwargs)
        elif func is F.cross_entropy:
            result = _cross_entropy(*args, **kwargs)
        elif func is F.batch_norm and self._w is not None:
            result = _batch_norm(self._w, *args, **kwargs)
        if result is not None:
            return result
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            return func(*args, **{**kwargs, "need_weights": True})[0], None  # the way that vmap can give masks to
        if func is F.scaled_dot_product_attention and not kwargs.get("enable_gqa"):
            return _attend(*args, **kwargs)
        # What follows a convolution finds its result with the channels last in memory, as torch's would not be.
        if func is F.group_norm:  # vmap cannot run it on that layout
            return func(args[0].contiguous(), *args[1:], **kwargs)
        return any_layout(func, args, kwargs)


def _convolve(
    widest: int | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """``torch.conv2d`` of ``(B, C, H, W)`` as patches ``(B·L, k·k·C)`` times weights ``(k·k·C, O)``."""
    is_plain = input.ndim == 4 and groups == 1 and not isinstance(padding, str)
    if not is_plain or (widest is not None and weight[0].numel() > widest):
        return None
    kernel = (weight.shape[2], weight.shape[3])
    stride, padding, dilation = pair(stride), pair(padding), pair(dilation)
    height, width = (positions(input.shape[2 + a] + 2 * padding[a], kernel[a], stride[a], dilation[a]) for a in (0, 1))
    if min(height, width) < 1:  # torch says what is wrong
        return None
    precision = _precision(input)
    input, weight = input.to(precision), weight.to(precision)
    layers = kernel_support.layers_for(input)
    dense = stride == dilation == (1, 1) and padding[0] < kernel[0] and padding[1] < kernel[1]
    if layers is not None and dense and layers.is_supported(input):
        shift = weight.new_zeros(len(weight)) if bias is None else bias.to(precision)
        made = layers.convolution(input.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1), shift, padding)
        return made.permute(0, 3, 1, 2)
    x = F.pad(input, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else input
    matrix = weight.permute(2, 3, 1, 0).flatten(0, 2)  # (k·k·C, O)
    # On a GPU rows of a multiple of 4 numbers are read faster: what is missing is a column of 1 for the bias, then 0.
    extra = -len(matrix) % 4 if layers is not None and bias is not None else 0
    patches = patches_of(x, kernel, stride, dilation, extra).flatten(0, 1)
    if extra and bias is not None:
        nothing = matrix.new_zeros(extra - 1, matrix.shape[1])
        matrix, bias = torch.cat([matrix, bias.to(precision)[None], nothing]), None
    if torch.is_grad_enabled():
        out = _product(patches, matrix)
        out = out if bias is None else out + bias.to(precision)
    else:
        out = patches @ matrix if bias is None else torch.addmm(bias.to(precision), patches, matrix)
    return out.reshape(len(x), height, width, len(weight)).permute(0, 3, 1, 2)


def _max_pool(input: Tensor, kernel_size: Any, stride: Any = None, **options: Any) -> Tensor | None:
    """``F.max_pool2d`` of squares that do not overlap; torch's kernels take thrice as long."""
    layers, kernel = kernel_support.layers_for(input), pair(kernel_size)
    squares = kernel[0] == kernel[1] <= 16 and (not stride or pair(stride) == kernel)
    if layers is None or input.ndim != 4 or not squares or {**_PLAIN_POOL, **options} != _PLAIN_POOL:
        return None
    return layers.max_pool(input.permute(0, 2, 3, 1), kernel[0]).permute(0, 3, 1, 2)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``F.linear`` of ``(B, I)`` on a GPU, so that the gradient of the weights comes in their order, not transposed."""
    if not input.is_cuda or input.ndim != 2:
        return None
    out = (weight @ input.mT).mT
    return out if bias is None else out + bias.to(out.dtype)


def _precision(x: Tensor) -> torch.dtype:
    """What torch's own operation would compute in: patches are copies, so they are made in it at once."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.bfloat16)
    return torch.get_autocast_dtype(kind) if lower else x.dtype


def _product(patches: Tensor, matrix: Tensor) -> Tensor:
    """``patches @ matrix`` in several parts, so that the gradient of ``matrix``, a long sum, is computed in as many."""
    count, size = patches.shape
    parts = max(p for p in range(1, _PARTS + 1) if count % p == 0 and (p == 1 or count // p >= _ROWS))
    return torch.bmm(patches.reshape(parts, count // parts, size), matrix.expand(parts, *matrix.shape)).flatten(0, 1)


def pair(value: Any) -> tuple[int, int]:
    """What is given once or for each axis, for each axis."""
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _cross_entropy(logits: Tensor, target: Tensor, *, weight: Any, reduction: str, **options: Any) -> Tensor | None:
    """``F.cross_entropy`` by operations that vmap knows; it takes torch's apart, and imports its compiler for that.

    Of labels, not shares, without options but ``reduction``; torch passes every option by name.
    """
    if weight is not None or options != _NO_OPTIONS or logits.ndim != 2 or target.ndim != 1:
        return None
    losses = -F.log_softmax(logits, 1).gather(1, target[:, None])[:, 0]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention``, by operations that vmap knows, dropout among them."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def _batch_norm(
    w: Tensor,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """``F.batch_norm`` in training mode of ``(B, C, ...)``, over the samples that have weight."""
    if not training and x.dtype != torch.bfloat16:
        return None
    if not training:  # vmap has no rule for statistics in another precision
        out = F.batch_norm(x.to(torch.float32), running_mean, running_var, weight, bias, False, momentum, eps)
        return out.to(x.dtype)
    precision = x.dtype
    x = x.to(torch.float32) if precision == torch.bfloat16 else x  # sums over many samples
    w = w.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    axes = [axis for axis in range(x.ndim) if axis != 1]
    places = x[0, 0].numel()
    count = (w.sum() * places).clamp(min=1)
    mean = (x * w).sum(axes) / count
    shape = (1, -1, *[1] * (x.ndim - 2))
    centred = x - mean.reshape(shape)
    variance = (centred.square() * w).sum(axes) / count
    if running_mean is not None and running_var is not None:
        unbiased = variance.detach() * count / (count - 1).clamp(min=1)
        running_mean.mul_(1 - momentum).add_(momentum * mean.detach())
        running_var.mul_(1 - momentum).add_(momentum * unbiased)
    out = centred * torch.rsqrt(variance + eps).reshape(shape)
    out = out if weight is None else out * weight.reshape(shape)
    return (out if bias is None else out + bias.reshape(shape)).to(precision)
