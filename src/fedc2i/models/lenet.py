"""LeNet with five-by-five convolutions, in two widths, with and without BatchNorm."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedc2i.models.max_pool import max_pool


class LeNet(nn.Module):
    """Two 5x5 convolutions with 2x2 max-pooling, two hidden linear layers, and the head ``fc3``."""

    def __init__(
        self,
        channels: tuple[int, int],
        hidden: tuple[int, int],
        classes: int,
        image: tuple[int, int, int],
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        height, width = (((side - 4) // 2 - 4) // 2 for side in image[1:])
        # BatchNorm removes any bias; its gradient would be rounding noise, which Adam amplifies.
        self.conv1 = nn.Conv2d(image[0], channels[0], 5, bias=not batch_norm)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5, bias=not batch_norm)
        self.bn1: nn.Module = nn.BatchNorm2d(channels[0]) if batch_norm else nn.Identity()
        self.bn2: nn.Module = nn.BatchNorm2d(channels[1]) if batch_norm else nn.Identity()
        self.fc1 = nn.Linear(channels[1] * height * width, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled images ``(B, 3, H, W)`` to logits ``(B, C)``."""
        x = F.relu(max_pool(self.bn1(self.conv1(x))))  # the same as pooling after ReLU, on a quarter of the data
        x = F.relu(max_pool(self.bn2(self.conv2(x))))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]
