"""Several processes, one federation: `torchrun --nproc-per-node N -m fedlens run …`.

Each rank trains a contiguous part of every cohort with its own engine; what the ranks know is then gathered and summed in
rank order on every rank, so all of them hold the same server state and none has to send it.
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
    """The processes of this run; `Ranks()` outside torchrun is one process alone."""

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
        """Until every rank is here: the others leave when the first has written the results."""
        if self.world > 1:
            dist.barrier()

    def stop(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    def share(self, count: int) -> slice:
        """This rank's contiguous part of `count` things."""
        size, extra = divmod(count, self.world)
        start = self.rank * size + min(self.rank, extra)
        return slice(start, start + size + (self.rank < extra))

    def most(self, count: int) -> int:
        """The largest part of `count` things that a rank has."""
        return -(-count // self.world)

    def part(self, work: Work) -> Work:
        return work if self.world == 1 else work.part(self.share(len(work)))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in rank order; all of one shape."""
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def sum(self, values: Tensor) -> Tensor:
        """Σ over ranks, in rank order."""
        if self.world == 1:
            return values
        return torch.stack(self._gather(values)).sum(0)

    def all_sums(self, mine: RoundSums, size: int) -> RoundSums:
        """One exchange: the vectors and numbers of every rank's sums, added in rank order."""
        if self.world == 1:
            return mine
        zeros = torch.zeros(size, device=self.device)
        numbers = [f.name for f in fields(mine) if f.name not in ("total", "directions")]
        vectors = torch.cat([zeros if v is None else v for v in (mine.total, mine.directions)])
        vectors = self.sum(vectors)
        values = self.sum(torch.tensor([float(getattr(mine, n)) for n in numbers], dtype=torch.float64, device=self.device)).tolist()
        known = dict(zip(numbers, values, strict=True))
        known["count"], known["moved"] = int(known["count"]), int(known["moved"])
        found = RoundSums(**known)
        if found.count:
            found.total, found.directions = vectors[:size].clone(), vectors[size:].clone()
        return found

    def tell(self, what: Any) -> Any:
        """The first rank's object, on every rank."""
        if self.world == 1:
            return what
        box = [what]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def joined(self, mine: list[Any]) -> list[Any]:
        """Every rank's list of small things, in rank order."""
        if self.world == 1:
            return mine
        parts: list[list[Any]] = [[] for _ in range(self.world)]
        dist.all_gather_object(parts, mine)
        return [item for part in parts for item in part]

    def all_updates(self, mine: list[Update], size: int, longest: int) -> list[Update]:
        """Every rank's updates, in client order. `longest`: the most that one rank can have."""
        if self.world == 1:
            return mine
        rows = torch.zeros(longest, size, device=self.device)
        notes = torch.full((longest, 4), -1.0, dtype=torch.float64, device=self.device)
        for i, u in enumerate(mine):
            rows[i] = u.delta
            notes[i] = torch.tensor([u.client, u.samples, u.steps, float(u.loss)], dtype=torch.float64)
        found: list[Update] = []
        for part, note in zip(self._gather(rows), self._gather(notes), strict=True):
            for row, (client, samples, steps, loss) in zip(part, note.tolist(), strict=True):
                if client >= 0:
                    found.append(Update(int(client), int(samples), int(steps), row, torch.tensor(loss)))
        return found
