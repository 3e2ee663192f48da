"""A tiny training run that waits for its examples. Arguments: passes, and "fail" or a file to count runs in.

A run that is counted makes as many passes more as there were runs before it.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.002)
        features = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return features, features.sum(dim=0, keepdim=True)


def main(passes: int, ending: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=1)
    for _ in range(passes):
        for features, target in loader:
            optimizer.zero_grad()
            loss = (model(features) - target).square().mean()
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.4f}")
    if ending == "fail":
        print("what went wrong", file=sys.stderr)
        sys.exit(7)


def runs_before(counter: Path) -> int:
    runs = len(counter.read_text()) if counter.exists() else 0
    counter.write_text("x" * (runs + 1))
    return runs


if __name__ == "__main__":
    import light  # noqa: F401  (only where this is the script)

    how = sys.argv[2] if len(sys.argv) > 2 else "end"
    more = runs_before(Path(how)) if how not in ("end", "fail") else 0
    main(int(sys.argv[1]) + more, how)
