"""fedlens: its round (training/federated.py without evaluation, metrics and checkpoints) around its engines, alone or under torchrun."""

from typing import Any

import torch

from contenders.common import BATCH, LR, MOMENTUM, PARTICIPATION, SEED, STEPS, Clock, Work
from fedlens.config import Config
from fedlens.data.dataset import Split
from fedlens.engine.choice import choose_engine
from fedlens.engine.local_work import plan_round
from fedlens.engine.ranks import Ranks
from fedlens.engine.sampling import sample_cohort
from fedlens.lens.diagnostics import RoundSums
from fedlens.lens.space import ParamSpace
from fedlens.optim.server import server_step
from fedlens.precision import Precision
from fedlens.tasks.image import Augment, ImageTask, Pipeline
from fedlens.training.algorithms import ALGORITHMS


def run(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    data, device = Work.load(job["work"]), torch.device("cpu")
    ranks = Ranks.start(device)
    cfg = Config()
    cfg.federated.engine = job["engine"]
    cfg.optim.lr, cfg.optim.momentum, cfg.optim.batch_size = LR, MOMENTUM, BATCH
    model = data.model()
    space = ParamSpace.of(model)
    pipeline = Pipeline(data.images.shape[-1], tuple(data.facts["mean"]), tuple(data.facts["std"]))
    task = ImageTask(pipeline, Augment(), device)
    samples = task.samples(Split(data.images, data.labels))
    engine = choose_engine(cfg, model, space, task, samples, Precision.choose(device, "fp32"))
    algorithm, server = ALGORITHMS["fedavg"](cfg), {}
    shards = [shard.numpy() for shard in data.shards]
    theta = space.read(model)
    clock = Clock(job)
    clock.start()
    for round_ in range(len(data.cohorts)):
        cohort = sample_cohort(SEED, round_, len(shards), PARTICIPATION)
        work = plan_round(SEED, round_, cohort, shards, steps=STEPS, batch=BATCH, draw=task.draw)
        assert torch.equal(work.index, data.index[round_])
        sums = RoundSums()
        for update in engine.updates(theta, ranks.part(work), algorithm.local_rule(LR), algorithm.offsets(theta)):
            sums.add(update.delta, float(torch.linalg.vector_norm(update.delta)), float(update.samples), float(update.loss))
        sums = ranks.all_sums(sums, space.size)
        theta = server_step(theta, sums.mean(), server, cfg.server)
        sums.metrics()
        if ranks.first:
            clock.lap(theta.numpy)
    if ranks.first:
        clock.finish(engine=engine.name, ranks=ranks.world)
    ranks.wait()
    ranks.stop()
