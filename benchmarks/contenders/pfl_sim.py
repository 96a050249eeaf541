"""pfl-research: its FederatedAveraging on its SimulatedBackend, one process. Evaluation falls on the warm-up round and no other."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from contenders.common import BATCH, LR, MOMENTUM, Clock, Work, flat


class Net(nn.Module):
    """What pfl asks of a module: `loss` and `metrics` of a batch."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.inner, self.normalise = work.model(), work.normalise

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(self.normalise(images)), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(images, labels)) * len(labels), len(labels))}


class Laps(TrainingProcessCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.clock.start()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int) -> tuple[bool, Metrics]:
        self.clock.lap(lambda: flat(model.pytorch_model.parameters()))
        return False, Metrics()


def run(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    np.random.seed(0)  # noqa: NPY002 (pfl draws its seeds from the global generator)
    work = Work.load(job["work"])
    rounds, cohort = work.cohorts.shape
    turns = itertools.product(range(rounds), range(cohort))

    def user(turn: tuple[int, int]) -> PyTorchTensorDataset:
        where = work.index[turn].flatten()  # its four batches in order: one epoch over them is the four local steps
        return PyTorchTensorDataset([work.images[where], work.labels[where]], user_id=str(turn))

    data = FederatedDataset(user, lambda: next(turns))
    net = Net(work)
    model = PyTorchModel(net, partial(torch.optim.SGD, momentum=MOMENTUM), torch.optim.SGD(net.parameters(), lr=1.0))
    clock = Clock(job)
    FederatedAveraging().run(
        NNAlgorithmParams(central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=cohort, val_cohort_size=0),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[Laps(clock)],
    )
    clock.finish("pfl")
