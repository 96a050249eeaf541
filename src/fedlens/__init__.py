"""fedlens: federated fine-tuning of pretrained models under the lens of task arithmetic.

The public API, loaded on first use so that `import fedlens` is immediate.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {  # public name -> where it lives
    "load_dataset": "fedlens.data.dataset",
    "partition": "fedlens.data.partition",
    "create_model": "fedlens.models",
    "ridge_statistics": "fedlens.models.heads",
    "ridge_head": "fedlens.models.heads",
    "run": "fedlens.training.execute",
    "load_run": "fedlens.training.execute",
    "Run": "fedlens.training.execute",
}
__all__ = ["Run", "create_model", "load_dataset", "load_run", "partition", "ridge_head", "ridge_statistics", "run"]

if TYPE_CHECKING:
    from fedlens.data.dataset import load_dataset
    from fedlens.data.partition import partition
    from fedlens.models import create_model
    from fedlens.models.heads import ridge_head, ridge_statistics
    from fedlens.training.execute import Run, load_run, run


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fedlens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
