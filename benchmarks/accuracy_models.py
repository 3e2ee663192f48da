"""The networks of `accuracy.py`, as lists of layers to cut, and the auxiliary networks of DGL and DNI."""

from collections.abc import Sequence

import torch
from accuracy_data import TEXT_LENGTH, VOCABULARY
from torch import nn

WIDTH = 8
_TEXT_WIDTH, _HEADS = 48, 4


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm and a way around them; halves the image where the width grows."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        stride = width // width_in
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1:
            self.around = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).add_(self.around(x)).relu_()


class Embedding(nn.Module):
    """int64 [B, T] characters -> [B, T, width], with learned positions."""

    def __init__(self, vocabulary: int = VOCABULARY, length: int = TEXT_LENGTH, width: int = _TEXT_WIDTH) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.characters(x) + self.positions


class Decoder(nn.Module):
    """A Transformer's layer [B, T, width] that sees the past only, with its norms in front."""

    def __init__(self, width: int = _TEXT_WIDTH) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, width = x.shape  # noqa: N806
        q, k, v = self.qkv(self.attention_norm(x)).view(B, T, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, width))
        return x + self.mlp(self.mlp_norm(x))


class LabelledGradient(nn.Module):
    """DNI's network for images: [B, C, H, W] and labels -> a gradient of the same shape, 0 at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.label = nn.Embedding(10, width)
        self.enter = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.body = nn.Sequential(nn.BatchNorm2d(2 * width), nn.ReLU(), nn.Conv2d(2 * width, width, 3, padding=1))
        nn.init.zeros_(self.body[-1].weight)
        nn.init.zeros_(self.body[-1].bias)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.body(self.enter(x + self.label(target)[:, :, None, None]))


class TextGradient(nn.Module):
    """DNI's network for text: [B, T, width] and the next characters -> a gradient of the same shape, 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Embedding(VOCABULARY, _TEXT_WIDTH)
        self.body = nn.Sequential(
            nn.LayerNorm(_TEXT_WIDTH),
            nn.Linear(_TEXT_WIDTH, 2 * _TEXT_WIDTH),
            nn.GELU(),
            nn.Linear(2 * _TEXT_WIDTH, _TEXT_WIDTH),
        )
        nn.init.zeros_(self.body[-1].weight)
        nn.init.zeros_(self.body[-1].bias)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.body(x + self.label(target))


def make_blocks(workload: str, num_blocks: int) -> list[nn.Sequential]:
    """The network cut into consecutive blocks, with weights from torch's present random state.

    The weights do not depend on the cut. K = 2: after the second layer of three or four that carry the weight.
    """
    if workload == "text":
        layers: list[nn.Module] = [nn.Sequential(Embedding(), Decoder()), Decoder(), Decoder()]
        head = nn.Sequential(nn.LayerNorm(_TEXT_WIDTH), nn.Linear(_TEXT_WIDTH, VOCABULARY))
        layers.append(nn.Sequential(Decoder(), head))
    else:
        stem = nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True)
        )
        classify = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * WIDTH, 10))
        layers = [stem, Residual(WIDTH, WIDTH), Residual(WIDTH, 2 * WIDTH)]
        layers.append(nn.Sequential(Residual(2 * WIDTH, 4 * WIDTH), classify))
    cuts = {1: [], 2: [2], 3: [2, 3], 4: [1, 2, 3]}[num_blocks]
    blocks = [nn.Sequential(*layers[start:end]) for start, end in zip([0, *cuts], [*cuts, 4], strict=True)]
    return blocks if workload == "text" else [block.to(memory_format=torch.channels_last) for block in blocks]


def make_auxiliaries(learner: str, workload: str, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """For each block but the last: a small classifier ("dgl") or a network that predicts gradients ("dni")."""
    if workload == "text":
        if learner == "dni":
            return [TextGradient() for _ in blocks[:-1]]
        return [nn.Sequential(nn.LayerNorm(_TEXT_WIDTH), nn.Linear(_TEXT_WIDTH, VOCABULARY)) for _ in blocks[:-1]]
    widths = [
        [part.num_features for part in block.modules() if hasattr(part, "num_features")][-1] for block in blocks
    ]
    if learner == "dni":
        return [LabelledGradient(width) for width in widths[:-1]]
    return [
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 64), nn.ReLU(), nn.Linear(64, 10))
        for width in widths[:-1]
    ]
