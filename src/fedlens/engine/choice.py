"""The choice of an engine for a run."""

from torch import nn

from fedlens.config import Config
from fedlens.engine.cohort import Cohort
from fedlens.engine.local_work import Engine
from fedlens.engine.sequential import Sequential
from fedlens.engine.threaded import Threaded
from fedlens.errors import UserError, bad_value
from fedlens.lens.space import ParamSpace
from fedlens.precision import Precision
from fedlens.tasks import Samples, Task


def choose_engine(
    config: Config, model: nn.Module, space: ParamSpace, task: Task, samples: Samples, precision: Precision, width: int = 1
) -> Engine:
    """Return the configured engine. `auto` is threaded on a CPU; elsewhere cohort if the model takes a client axis, else sequential.

    The rule is fixed, not timed: engines differ in the last bit, and a result must not depend on a timing.
    `width` is the largest number of clients per round in this process.
    """
    name, stackable, cpu = config.federated.engine, getattr(model, "client_axis", False), precision.device.type == "cpu"
    if name == "auto":
        name = "threaded" if cpu else "cohort" if stackable else "sequential"
    if name == "cohort" and not stackable:
        raise bad_value("federated.engine", name, f"auto, sequential or threaded: {config.model.name} has no client axis")
    if name == "threaded" and not cpu:
        raise bad_value("federated.engine", name, f"auto, sequential or cohort on {precision.device}: threads train on a CPU")
    if any(getattr(module, "running_mean", None) is not None for module in model.modules()):
        raise UserError(f"model.name must be a model without batch statistics, such as a ViT, got {config.model.name!r}.")
    parts = (model, space, task, samples, precision, config.train.compile)
    if name == "cohort":
        return Cohort(*parts, chunk=config.federated.chunk, width=width)
    return Threaded(*parts) if name == "threaded" else Sequential(*parts)
