"""Train a small Transformer on the bytes of a text file; a window of text is read once and used `--factor` times.

    python examples/text.py --data book.txt --steps 300 --factor 4

Text is not augmented: what a further use saves is reading, the longest part on a slow disk or a network. An epoch
has a window for every `--window` bytes. Each begins at a random place of its own, so no two epochs have the same
windows. The last tenth of the file is held out.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import stretto


class Windows(Dataset[torch.Tensor]):
    """Windows of `length` + 1 bytes, the last one only as a target: window i begins within stride i of the file."""

    def __init__(self, path: Path, length: int, num_bytes: int) -> None:
        self.path, self.length, self.num_bytes = path, length, num_bytes

    def __len__(self) -> int:
        return (self.num_bytes - 1) // self.length - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        # The random state here follows from seed, epoch and place in the order: a run can be made again.
        start = self.length * index + int(torch.randint(self.length, ()))
        with self.path.open("rb") as file:
            file.seek(start)
            return torch.frombuffer(bytearray(file.read(self.length + 1)), dtype=torch.uint8)


class Model(nn.Module):
    """A causal Transformer over bytes: logits [B, T, 256] from bytes [B, T]."""

    def __init__(self, length: int, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.logits = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.logits(self.layers(self.byte(text) + self.place, mask=self.mask, is_causal=True))


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next byte, in nats."""
    windows = windows.long()
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--steps", type=int, default=300, help="updates")
    parser.add_argument("--factor", type=float, default=4.0, help="uses of each window")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--window", type=int, default=64, help="bytes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.data.is_file():
        raise SystemExit(f"{args.data} is no file: expected a text file")
    size = args.data.stat().st_size
    if size < 20 * args.window:
        raise SystemExit(f"{args.data} has {size} bytes: expected {20 * args.window} or more")

    text = args.data.read_bytes()[size * 9 // 10 :]
    held_out = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, args.window + 1, args.window)[:64]
    loader = stretto.EchoDataLoader(
        Windows(args.data, args.window, size * 9 // 10),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        factor=args.factor,
        seed=args.seed,
    )
    if not len(loader):
        raise SystemExit(
            f"{len(loader.dataset)} windows of {args.window} bytes make no full batch of {args.batch_size} for "
            f"{args.workers} workers: give more text, a smaller --window or a smaller --batch-size"
        )
    torch.manual_seed(args.seed)
    model = Model(args.window)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def report(update: int, loss: float) -> None:
        with torch.no_grad():
            print(f"update {update}: loss {loss:.4f}, held out {loss_of(model, held_out):.4f}")

    update = 0
    while update < args.steps:
        for windows in islice(loader, args.steps - update):
            loss = loss_of(model, windows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update += 1
            if update in (1, args.steps) or update % 100 == 0:
                report(update, loss.item())
    stats = loader.stats()
    print(
        f"{stats.fresh_items} windows, each used {stats.factor:.2f} times so far, in {stats.updates} updates; "
        f"AU {stats.au_percent:.0f} %"
    )


if __name__ == "__main__":
    main()
