"""Several processes, one federation: `torchrun --nproc-per-node N -m fedlens run …`.

Each rank trains a contiguous part of every cohort with its own engine. Results are gathered and summed in rank order on every
rank, so all ranks hold the same server state and none has to send it.
"""

import os
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedlens.engine.local_work import Update, Work
from fedlens.lens.diagnostics import RoundSums


class Ranks:
    """The processes of this run; `Ranks()` is a single process, outside torchrun."""

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.world, self.device = rank, world, device or torch.device("cpu")

    @classmethod
    def start(cls, device: torch.device) -> "Ranks":
        """Join the group that torchrun describes in the environment: NCCL on GPUs, gloo on CPUs."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(device=device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Wait for every rank: the others must not exit before the first has written the results."""
        if self.world > 1:
            dist.barrier()

    def stop(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    def share(self, count: int) -> slice:
        """Return this rank's contiguous part of `count` items."""
        size, extra = divmod(count, self.world)
        start = self.rank * size + min(self.rank, extra)
        return slice(start, start + size + (self.rank < extra))

    def largest_share(self, count: int) -> int:
        """Return the size of the largest rank's part of `count` items."""
        return -(-count // self.world)

    def part(self, work: Work) -> Work:
        """Return the plan of this rank's clients."""
        return work if self.world == 1 else work.part(self.share(len(work)))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order; they have one shape."""
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks, in rank order."""
        if self.world == 1:
            return values
        return torch.stack(self._all_gather(values)).sum(0)

    def all_sums(self, mine: RoundSums, size: int) -> RoundSums:
        """Return the sums of all ranks, added in rank order."""
        if self.world == 1:
            return mine
        zeros = torch.zeros(size, device=self.device)
        numbers = [f.name for f in fields(mine) if f.name not in ("total", "directions")]
        vectors = self.sum(torch.cat([zeros if v is None else v for v in (mine.total, mine.directions)]))
        values = self.sum(torch.tensor([float(getattr(mine, n)) for n in numbers], dtype=torch.float64, device=self.device)).tolist()
        sums = dict(zip(numbers, values, strict=True))
        sums["count"], sums["moved"] = int(sums["count"]), int(sums["moved"])
        everyone = RoundSums(**sums)
        if everyone.count:
            everyone.total, everyone.directions = vectors[:size].clone(), vectors[size:].clone()
        return everyone

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's object on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, mine: list[Any]) -> list[Any]:
        """Return the lists of all ranks, concatenated in rank order."""
        if self.world == 1:
            return mine
        parts: list[list[Any]] = [[] for _ in range(self.world)]
        dist.all_gather_object(parts, mine)
        return [item for part in parts for item in part]

    def all_updates(self, mine: list[Update], size: int, longest: int) -> list[Update]:
        """Return the updates of all ranks, in client order. `longest` bounds the number per rank."""
        if self.world == 1:
            return mine
        rows = torch.zeros(longest, size, device=self.device)
        for i, u in enumerate(mine):
            rows[i] = u.delta
        facts = self.gather([[(u.client, u.samples, u.steps, float(u.loss)) for u in mine]])
        return [
            Update(client, samples, steps, row, torch.tensor(loss))
            for part, numbers in zip(self._all_gather(rows), facts, strict=True)
            for row, (client, samples, steps, loss) in zip(part, numbers, strict=False)
        ]
