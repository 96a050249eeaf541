"""No contender but a bound: the local steps of a round and nothing else, half of the clients in each of two processes.

Nothing is averaged, copied or sent, so no framework that takes these steps with torch's own kernels on two cores can be faster.
"""

from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from contenders.common import LR, MOMENTUM, STEPS, Clock, Work


def run(job: dict[str, Any]) -> None:
    spawn = get_context("spawn")
    barrier = spawn.Barrier(2)
    other = spawn.Process(target=_half, args=(job, 1, barrier), daemon=True)
    other.start()
    _half(job, 0, barrier)
    other.join()


def _half(job: dict[str, Any], number: int, barrier: Barrier) -> None:
    torch.set_num_threads(1)
    work = Work.load(job["work"])
    model = work.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    clock = Clock(job)
    barrier.wait()
    clock.start()
    for round_, cohort in enumerate(work.cohorts):
        for slot in range(number, len(cohort), 2):
            optimizer.state.clear()
            for step in range(STEPS):
                images, labels = work.batch(round_, slot, step)
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        barrier.wait()
        if number == 0:
            clock.lap(lambda: np.zeros(0))
    if number == 0:
        clock.finish()
