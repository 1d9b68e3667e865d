"""Models of real size, ResNets and a vision transformer for small images, and FedAvg on them by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, autocast, nn
from torch.nn import functional as F  # noqa: N812

BATCH, EPOCHS = 64, 2


def norm(kind: str, channels: int) -> nn.Module:
    """``bn`` or ``gn``, the latter with groups of at least 16 channels."""
    return nn.BatchNorm2d(channels) if kind == "bn" else nn.GroupNorm(max(1, min(32, channels // 16)), channels)


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int, kind: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(kind, after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(kind, after)
        changes = stride > 1 or before != after
        self.short = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(kind, after)) if changes else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images of ``before`` channels to ``after``."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + (x if self.short is None else self.short(x)))


class ResNet(nn.Module):
    """With a stem for images of 32 pixels: widths ``(64, 128, 256, 512)`` twice each is ResNet-18."""

    def __init__(self, kind: str = "bn", widths: Sequence[int] = (64, 128, 256, 512), deep: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), norm(kind, widths[0]), nn.ReLU())
        blocks, before = [], widths[0]
        for stage, width in enumerate(widths):
            for k in range(deep):
                blocks.append(Block(before, width, 2 if stage and not k else 1, kind))
                before = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class ViT(nn.Module):
    """ViT-S for 32x32 images: patches of 4, 384 numbers, 6 heads, 12 layers."""

    def __init__(self, width: int = 384, layers: int = 12, heads: int = 6, patch: int = 4, side: int = 32) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.place
        return self.fc(self.norm(self.encoder(tokens)).mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet18_gn": lambda: ResNet("gn"),
    "resnet18_bn": lambda: ResNet("bn"),
    "vit": ViT,
    "resnet8_bn": lambda: ResNet("bn", (16, 32, 64), 1),
}


@contextmanager
def precision(kind: str) -> Iterator[None]:
    """torch's settings for the loop: ``default`` as torch comes, otherwise `ieee`, `tf32` or `bf16` (as tf32)."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.conv.fp32_precision, matmul.fp32_precision  # type: ignore[attr-defined]
    if kind != "default":
        own = "ieee" if kind == "ieee" else "tf32"
        cudnn.conv.fp32_precision, matmul.fp32_precision = own, own  # type: ignore[attr-defined]
    try:
        yield
    finally:
        cudnn.conv.fp32_precision, matmul.fp32_precision = before  # type: ignore[attr-defined]


def loop_round(net: nn.Module, clients: Sequence[tuple[Tensor, Tensor]], kind: str = "default") -> float:
    """Seconds of one FedAvg round by hand, clients one after the other, without scores."""
    device = clients[0][1].device

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    with precision(kind):
        wait()
        began = time.perf_counter()
        start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        ends = []
        net.train()
        for x, y in clients:
            net.load_state_dict(start)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            for _ in range(EPOCHS):
                for index in torch.randperm(len(y), device=device).split(BATCH):
                    optimizer.zero_grad()
                    with autocast(device.type, torch.bfloat16, enabled=kind == "bf16"):
                        loss = F.cross_entropy(net(x[index]), y[index])
                    loss.backward()
                    optimizer.step()
            ends.append({name: tensor.clone() for name, tensor in net.state_dict().items()})
        net.load_state_dict({name: torch.stack([own[name] for own in ends]).float().mean(0) for name in start})
        wait()
        return time.perf_counter() - began
