"""The baseline: federated averaging as a plain PyTorch loop, a deep copy of the model for every client."""

import copy
from typing import Any

import torch

from contenders.common import Clock, Work, flat


def run(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    work = Work.load(job["work"])
    model = work.model()
    clock = Clock(job)
    clock.start()
    for round_, cohort in enumerate(work.cohorts):
        mean: dict[str, torch.Tensor] = {}
        for slot in range(len(cohort)):
            local = copy.deepcopy(model)
            work.train_client(local, round_, slot)
            for name, value in local.state_dict().items():  # a running mean: ten state dicts at once would cost memory for nothing
                mean[name] = value / len(cohort) if slot == 0 else mean[name].add_(value, alpha=1 / len(cohort))
        model.load_state_dict(mean)
        clock.lap(lambda: flat(model.parameters()))
    clock.finish()
