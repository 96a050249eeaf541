"""fedlens: federated fine-tuning of pretrained models under the lens of task arithmetic.

The public API, loaded on first use so that `import fedlens` is immediate.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {  # public name -> where it lives
    "load_dataset": "fedlens.data.dataset",
    "partition": "fedlens.data.partition",
    "create_model": "fedlens.models",
    "SparseSGDM": "fedlens.optim.sparse_sgdm",
    "sensitivity": "fedlens.lens.sensitivity",
    "calibrate_mask": "fedlens.lens.mask_rules",
    "Mask": "fedlens.lens.mask_rules",
    "TaskVector": "fedlens.lens.task_vectors",
    "merge": "fedlens.lens.merging",
    "register": "fedlens.registry",
    "ridge_statistics": "fedlens.models.heads",
    "ridge_head": "fedlens.models.heads",
    "run": "fedlens.training.run",
    "load_run": "fedlens.training.run",
    "Run": "fedlens.training.run",
}
__all__ = list(_HOME)

if TYPE_CHECKING:
    from fedlens.data.dataset import load_dataset as load_dataset
    from fedlens.data.partition import partition as partition
    from fedlens.lens.mask_rules import Mask as Mask
    from fedlens.lens.mask_rules import calibrate_mask as calibrate_mask
    from fedlens.lens.merging import merge as merge
    from fedlens.lens.sensitivity import sensitivity as sensitivity
    from fedlens.lens.task_vectors import TaskVector as TaskVector
    from fedlens.models import create_model as create_model
    from fedlens.models.heads import ridge_head as ridge_head
    from fedlens.models.heads import ridge_statistics as ridge_statistics
    from fedlens.optim.sparse_sgdm import SparseSGDM as SparseSGDM
    from fedlens.registry import register as register
    from fedlens.training.run import Run as Run
    from fedlens.training.run import load_run as load_run
    from fedlens.training.run import run as run


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fedlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
