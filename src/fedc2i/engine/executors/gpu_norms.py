"""Group normalisation by our own kernels: torch's want the channels first, and copy images that have them last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.engine.executors import norm_kernels
from fedc2i.engine.executors.stacked.kernel_support import second_order
from fedc2i.engine.executors.stacked.kernel_uses import counted

LEAST = 16  # channels that a program reads at least, if they are whole groups: 32 or 64 bytes of a pixel
TILE = 16384  # numbers that a program holds at once
PER_WARP = 1024


@counted
def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``F.group_norm`` of images ``(N, C, H, W)`` with the channels last in memory; the result is of the same kind."""
    own: Tensor = _GroupNorm.apply(x, groups, weight, bias, eps)  # type: ignore[no-untyped-call]
    return own


def _sizes(x: Tensor, groups: int) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """The grid of programs, and how much each computes."""
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    size = channels // groups
    many = size * max(1, min(LEAST // size, groups))
    block = _power(many)
    rows = min(_power(pixels), max(1, TILE // block))
    warps = min(16, max(1, rows * block // PER_WARP))
    how = {"size": size, "many": many, "block": block, "rows": rows, "whole": pixels <= rows, "num_warps": warps}
    return (len(x), -(-channels // many)), how


def _power(count: int) -> int:
    """The power of 2 that holds ``count``."""
    return 1 << (count - 1).bit_length()


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(x)
        mean, scale = torch.empty(2, *x.shape[:2], device=x.device)
        grid, how = _sizes(x, groups)
        pixels = x.shape[2] * x.shape[3]
        norm_kernels.group_norm[grid](x, weight, bias, out, mean, scale, x.shape[1], pixels, eps, **how)
        ctx.groups, ctx.eps = groups, eps
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted: torch's operations have one
            dx, dw, db = second_order(
                lambda x, w, b: F.group_norm(x.to(w.dtype), ctx.groups, w, b, ctx.eps),
                (x, weight, bias),
                grad_output,
            )
            return dx, None, dw, db, None
        grad_output = grad_output.to(x.dtype).contiguous(memory_format=torch.channels_last)
        out, sums = torch.empty_like(x), torch.empty(2, *x.shape[:2], device=x.device)
        grid, how = _sizes(x, ctx.groups)
        pixels = x.shape[2] * x.shape[3]
        norm_kernels.group_norm_gradient[grid](
            x, grad_output, weight, mean, scale, out, sums, x.shape[1], pixels, **how
        )
        of_weight, of_bias = sums.sum(1).to(weight.dtype)
        return out, None, of_weight, of_bias, None
