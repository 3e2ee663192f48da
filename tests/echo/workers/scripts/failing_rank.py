"""Rank 1 cannot read one of its rows, rank 0 waits for it in every step. Run by torchrun."""

import torch
import torch.distributed as dist

from stretto import EchoDataLoader
from tests.echo.workers.scripts.common import Rows, rank


class Broken(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        if rank() == 1 and index == 50:
            raise OSError("the disk under row 50 is gone")
        return super().__getitem__(index)


def main() -> None:
    dist.init_process_group("gloo")
    for batch in EchoDataLoader(Broken(100), 8, factor=2, num_workers=1):
        dist.all_reduce(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
