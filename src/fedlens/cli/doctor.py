"""`fedlens doctor`: installed packages, device, data and weights, and how to get what is missing."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from fedlens.cli.table import print_table
from fedlens.data.dataset import default_root, load_dataset
from fedlens.errors import UserError
from fedlens.models.weights import PUBLIC, public_path

CORE = ("torch", "numpy", "hydra-core", "safetensors", "rich", "vl-convert-python", "pillow")
EXTRAS = {  # package -> extra of fedlens
    **{"timm": "timm", "transformers": "hf", "datasets": "hf", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow-skinny": "mlflow"},
    **{"optuna": "search", "dp-accounting": "privacy", "hydra-joblib-launcher": "cluster", "hydra-submitit-launcher": "cluster"},
    "flwr": "flower",  # best in an environment of its own
}

Row = tuple[str, str, str]  # component, state, how to get it


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def examine(root: str | None = None) -> list[Row]:
    """Return the state of every component."""
    rows: list[Row] = [("python", platform.python_version(), ""), ("cores", str(os.cpu_count()), "")]
    rows += [(name, version(name) or "missing", "" if version(name) else f"pip install {name}") for name in CORE]
    for name, extra in EXTRAS.items():
        installed = version(name) or (version("mlflow") if name == "mlflow-skinny" else None)
        rows.append((f"{name} (optional)", installed or "not installed", "" if installed else f"pip install 'fedlens[{extra}]'"))
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        precision = "bf16" if torch.cuda.get_device_capability(i)[0] >= 8 else "fp16 with loss scaling"
        memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        rows.append((f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, {memory}, {precision}", ""))
    if not torch.cuda.is_available():
        rows.append(("GPU", "none that torch sees", "runs use the CPU in fp32"))
    rows.append(("data root", str(Path(root) if root else default_root()), "set data.root or FEDLENS_DATA"))
    for name in ("fashion_mini", "fashion_mnist", "cifar10", "cifar100"):
        try:
            data = load_dataset(name, root)
            rows.append((f"data: {name}", f"found, {len(data.train) + len(data.val):,} + {len(data.test):,} images", ""))
        except UserError:
            rows.append((f"data: {name}", "not found", f"fedlens data prepare {name}"))
    rows.append(("weights: tiny", "packaged", ""))
    for name, file in PUBLIC.items():
        path, source = public_path(name), f"downloaded on first use from {file.url}"
        rows.append((f"weights: {name}", f"found, {path}", "") if path.is_file() else (f"weights: {name}", "not found", source))
    return rows


def doctor(root: str | None) -> int:
    """Print the state of every component."""
    print_table(["", "found", "how to get it"], examine(root), justify="left")
    return 0
