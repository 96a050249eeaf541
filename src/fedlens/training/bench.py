"""The setup that both training loops share: device, precision, data, model, evaluation."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlens.config import Config
from fedlens.data.dataset import Dataset, load_dataset
from fedlens.errors import bad_value
from fedlens.lens.space import ParamSpace
from fedlens.models import create_model
from fedlens.models.heads import RidgeChoice
from fedlens.precision import Precision
from fedlens.runs.cache import Codec, cached, digest, split_digest
from fedlens.tasks import Samples, Task
from fedlens.tasks.image import ImageTask
from fedlens.tasks.metrics import METRICS

log = logging.getLogger("fedlens")
Forward = Callable[[Tensor], Tensor]


def pick_device(name: str) -> torch.device:
    """Return the configured device; `auto` is a GPU if there is one. Under torchrun each process gets its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        name = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
        torch.cuda.set_device(name)
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise bad_value("device", name, "auto or cpu: torch finds no CUDA device")
    if name == "mps" and not torch.backends.mps.is_available():
        raise bad_value("device", name, "auto or cpu: torch finds no Apple GPU")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise bad_value("device", name, "auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise bad_value("device", name, f"cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return device


@dataclass
class Bench:
    """The workbench of a run: everything that is fixed before training starts."""

    config: Config
    device: torch.device
    precision: Precision
    dataset: Dataset
    model: nn.Module
    task: Task
    train: Samples
    val: Samples

    def evaluate(self, split: Samples, model: Forward | None = None, samples: Tensor | None = None) -> tuple[float, float]:
        """Return mean loss and accuracy over a split, or at these positions of it, without augmentation."""
        measured = self.measure(split, model, samples, metrics=())
        return measured["loss"], measured["accuracy"]

    def measure(
        self, split: Samples, model: Forward | None = None, samples: Tensor | None = None, metrics: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Return accuracy, loss and further metrics (by default those of train.metrics) over a split, without augmentation."""
        forward, metrics = self.model if model is None else model, self.config.train.metrics if metrics is None else metrics
        where = torch.arange(len(split)) if samples is None else samples
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        outputs: list[tuple[Tensor, Tensor]] = []
        with self._evaluation():
            for index in torch.split(where, self.config.train.eval_batch_size):
                inputs, labels = self.task.batch(split, index)
                with self.precision.autocast():
                    logits = forward(inputs).float()
                loss += self.task.loss(logits, labels, reduction="sum").double()
                correct += (logits.argmax(1) == labels).sum()
                if metrics:
                    outputs.append((logits, labels))
            measured = {"accuracy": int(correct) / len(where), "loss": float(loss) / len(where)}
            if metrics:
                logits, labels = (torch.cat(parts) for parts in zip(*outputs, strict=True))
                measured |= {name: METRICS.choose(name, "train.metrics")(logits, labels) for name in metrics}
        return measured

    def scores(self, *, val: bool, test: bool) -> dict[str, Any]:
        """Return loss and metrics on validation, if there is any, and on test, for curves that no choice reads."""
        measured = {f"val_{name}": value for name, value in self.measure(self.val).items()} if val and len(self.val) else {}
        return measured | (self.test() if test else {})

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Put the model in eval mode, without gradients."""
        was_training = self.model.training
        self.model.eval()
        with torch.inference_mode():
            yield
        self.model.train(was_training)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of centralised training in one pass over the training set."""
        return -(-len(self.train) // self.config.optim.batch_size)

    def test(self) -> dict[str, float | None]:
        """Return the metrics of the test set, which a run reads only here; None for each if train.test is false."""
        if not self.config.train.test:
            return {f"test_{name}": None for name in ("accuracy", "loss", *self.config.train.metrics)}
        measured = self.measure(self.task.samples(self.dataset.test))
        return {f"test_{name}": value for name, value in measured.items()}

    def description(self, space: ParamSpace) -> dict[str, Any]:
        """Return the facts on model and device for a summary; `space` holds the parameters that train."""
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trainable_parameters": space.size,
            "precision": self.precision.name,
            "device": str(self.device),
        }

    def features(self, split: Samples, index: Tensor | None = None) -> Tensor:
        """Return backbone features [samples, dim] in eval mode, float32; `index`: at these positions only."""
        backbone = getattr(self.model, "features", None)
        if backbone is None:
            raise bad_value("head", "ridge", f"linear: {self.config.model.name} has no method features(inputs)")
        data = split_digest(split.split) if index is None else None
        if data is None:
            return self.outputs(backbone, split, index)
        weights = {name: tensor for name, tensor in self.model.state_dict().items() if not name.startswith("head.")}
        batch, threads = self.config.train.eval_batch_size, torch.get_num_threads()
        key = digest(weights, data, self.task.key, self.precision, batch, threads, str(self.device))
        codec = Codec[Tensor](
            lambda features, folder: save_file({"features": features.contiguous()}, folder / "features.safetensors"),
            lambda folder: load_file(folder / "features.safetensors", device=str(self.device))["features"],
        )
        return cached(key, lambda: self.outputs(backbone, split), codec)

    def outputs(self, forward: Forward, split: Samples, index: Tensor | None = None) -> Tensor:
        """Return a model's outputs over a split in eval mode, float32; `index`: at these positions only."""
        outputs = []
        with self._evaluation():
            for part in torch.split(torch.arange(len(split)) if index is None else index, self.config.train.eval_batch_size):
                with self.precision.autocast():
                    outputs.append(forward(self.task.batch(split, part)[0]).float())
        return torch.cat(outputs).clone()

    def set_head(self, choice: RidgeChoice) -> None:
        """Write a ridge head into the model."""
        head: nn.Linear = self.model.head  # type: ignore[assignment]
        with torch.no_grad():
            head.weight.copy_(choice.weight)
            head.bias.copy_(choice.bias)
        values = (choice.lam, choice.temperature, 100 * choice.val_accuracy)
        log.info("ridge head: lambda %g, temperature %.3g, validation accuracy %.2f %%", *values)


def _check_memory(config: Config, channels: int, device: torch.device) -> None:
    """Raise for a batch that cannot fit into this machine's memory. Activations on a CPU take at least 8 times the bytes of the inputs."""
    size, held = config.optim.batch_size, 8 if device.type == "cpu" and not config.train.chunk else 1
    need, have = 4 * held * size * channels * config.model.image_size**2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise bad_value("optim.batch_size", size, f"smaller: a batch needs over {need >> 30} GiB, this machine has {have >> 30} GiB")


def set_up(config: Config, data: Dataset | None = None) -> Bench:
    """Load data (unless passed) and model. Every error in the input is raised here, before a run folder exists."""
    device = pick_device(config.device)
    precision = Precision.choose(device, config.train.precision)
    data = data or load_dataset(
        config.data.name, config.data.root, val_fraction=config.data.val_fraction, seed=config.seed, download=config.data.download
    )
    _check_memory(config, len(data.mean), device)
    names = ("weights", "image_size", "dropout", "freeze_blocks", "freeze_backbone")
    options = {name: getattr(config.model, name) for name in names}
    model = create_model(config.model.name, data.num_classes, **options, seed=config.seed).to(device)
    fitted, freeze = config.head == "ridge" or getattr(model, "fitted_head", False), config.model.freeze_head
    if (fitted and not config.model.freeze_backbone) if freeze is None else freeze:
        for param in model.head.parameters():  # type: ignore[union-attr]
            param.requires_grad_(False)
    task = ImageTask.of(config, data, device, precision.dtype)
    return Bench(config, device, precision, data, model, task, task.samples(data.train), task.samples(data.val))
