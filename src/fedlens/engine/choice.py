"""Which engine a run has."""

import logging

from torch import nn

from fedlens.config import Config
from fedlens.engine.cohort import Cohort
from fedlens.engine.local_work import Engine
from fedlens.engine.sequential import Sequential
from fedlens.errors import UserError
from fedlens.lens.space import ParamSpace
from fedlens.precision import Precision
from fedlens.tasks.image import ImageBank, Pipeline

log = logging.getLogger("fedlens")


def choose_engine(
    config: Config, model: nn.Module, space: ParamSpace, bank: ImageBank, pipeline: Pipeline, precision: Precision, width: int = 1
) -> Engine:
    """GPU: the cohort engine wherever the model takes a client axis. CPU: the sequential one, which measured no slower and smaller.

    The choice is a rule and not a stopwatch at the start of a run: engines differ in the last bit, and a run's result must not
    depend on a timing. `width`: the most clients that a round brings here.
    """
    wanted, stackable = config.federated.engine, getattr(model, "client_axis", False)
    if wanted == "cohort" and not stackable:
        raise UserError(
            f"federated.engine: cohort needs a model with a client axis, {config.model.name} has none; allowed is auto | sequential"
        )
    if any(getattr(module, "running_mean", None) is not None for module in model.modules()):
        raise UserError(f"model.name: {config.model.name} keeps batch statistics, which federated averaging does not define; use a ViT")
    parts = (model, space, bank, pipeline, precision, config.train.compile)
    if wanted == "cohort" or (wanted == "auto" and stackable and precision.device.type == "cuda"):
        return Cohort(*parts, chunk=config.federated.chunk, width=width)
    return Sequential(*parts)
