"""Two ranks with DistributedDataParallel under torchrun; reading takes longer on rank 1."""

import json
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shared(Dataset):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01 * dist.get_rank())  # far above what a busy machine adds
        return torch.tensor([float(index)])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    dataset = Shared()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, 4, sampler=sampler)
    updates, used = 0, []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            used += [int(index) for index in batch[:, 0]]
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
            updates += 1
    said = {"name": f"rank {dist.get_rank()}", "updates": updates, "used": sorted(set(used))}
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, said)
    if dist.get_rank() == 0:
        for line in gathered:
            print(json.dumps(line))
    dist.destroy_process_group()


main()
