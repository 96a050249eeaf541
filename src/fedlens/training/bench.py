"""What both training loops need before their first step: device, precision, data on the device, model, evaluation."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlens.config import Config, OptimConfig
from fedlens.data.dataset import Dataset, load_dataset
from fedlens.errors import UserError
from fedlens.lens.space import ParamSpace
from fedlens.models import create_model
from fedlens.models.heads import RidgeChoice, choose_ridge, ridge_statistics
from fedlens.optim.schedules import schedule_factor
from fedlens.precision import Precision
from fedlens.runs.cache import Form, digest, remembered, split_digest
from fedlens.tasks.image import Augment, ImageBank, Pipeline

log = logging.getLogger("fedlens")


def pick_device(name: str) -> torch.device:
    if name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if name in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        name = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"  # under torchrun each process has its own
        torch.cuda.set_device(name)
    if name == "auto":
        return torch.device("cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device: {name!r} given, but torch sees no CUDA device; allowed here is auto | cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("device: 'mps' given, but torch sees no Apple GPU; allowed here is auto | cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device: {name!r} given, allowed is auto | cpu | cuda | cuda:N | mps") from None
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise UserError(f"device: {name!r} given, but there are {torch.cuda.device_count()} CUDA devices")
    return device


@dataclass
class Bench:
    """The workbench of a run: everything that is fixed before training starts."""

    config: Config
    device: torch.device
    precision: Precision
    dataset: Dataset
    model: nn.Module
    pipeline: Pipeline
    augment: Augment
    train: ImageBank
    val: ImageBank

    def evaluate(
        self, bank: ImageBank, model: Callable[[Tensor], Tensor] | None = None, samples: Tensor | None = None
    ) -> tuple[float, float]:
        """(mean cross-entropy, accuracy) over a split or some samples of it, without augmentation."""
        forward = self.model if model is None else model
        where = torch.arange(len(bank)) if samples is None else samples
        was_training = self.model.training
        self.model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            for index in torch.split(where, self.config.train.eval_batch_size):
                images, labels = bank.batch(index)
                with self.precision.autocast():
                    logits = forward(self.pipeline(images)).float()
                loss += F.cross_entropy(logits, labels, reduction="sum").double()
                right += (logits.argmax(1) == labels).sum()
        self.model.train(was_training)
        return float(loss) / len(where), int(right) / len(where)

    def test(self) -> dict[str, float | None]:
        """The test set, which is read here and nowhere else in a run; with train.test=false not even here."""
        if not self.config.train.test:
            return {"test_accuracy": None, "test_loss": None}
        loss, accuracy = self.evaluate(ImageBank(self.dataset.test, self.device))
        return {"test_accuracy": accuracy, "test_loss": loss}

    def description(self, space: ParamSpace) -> dict[str, Any]:
        """What every summary says of its model and where it ran; `space` is what training moves in."""
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trainable_parameters": space.size,
            "precision": self.precision.name,
            "device": str(self.device),
        }

    def features(self, bank: ImageBank, index: Tensor | None = None) -> Tensor:
        """[samples, dim] backbone features in eval mode, float32; `index`: of these samples only."""
        backbone = getattr(self.model, "features", None)
        if backbone is None:
            raise UserError(f"head: ridge needs a model with features(images); {self.config.model.name} has none")
        data = split_digest(bank.split)
        if data is None or index is not None:
            return self._features(backbone, bank, index)
        weights = {name: tensor for name, tensor in self.model.state_dict().items() if not name.startswith("head.")}
        key = digest(
            weights, data, self.pipeline, self.precision, self.config.train.eval_batch_size, torch.get_num_threads(), str(self.device)
        )
        form = Form(_write_features, lambda folder: _read_features(folder, self.device))
        return remembered(key, lambda: self._features(backbone, bank), form)

    def _features(self, backbone: Callable[[Tensor], Tensor], bank: ImageBank, index: Tensor | None = None) -> Tensor:
        was_training = self.model.training
        self.model.eval()
        found = []
        with torch.inference_mode():
            for part in torch.split(torch.arange(len(bank)) if index is None else index, self.config.train.eval_batch_size):
                with self.precision.autocast():
                    found.append(backbone(self.pipeline(bank.images(part))).float())
        self.model.train(was_training)
        return torch.cat(found).clone()

    def fit_ridge_head(self) -> RidgeChoice:
        """Step 0: the closed-form head on the pretrained features; lambda and temperature from validation."""
        A, b = ridge_statistics(self.features(self.train), self.train.labels, self.dataset.num_classes)
        choice = choose_ridge(A, b, self.features(self.val), self.val.labels)
        self.set_head(choice)
        return choice

    def set_head(self, choice: RidgeChoice) -> None:
        head: nn.Linear = self.model.head  # type: ignore[assignment]
        with torch.no_grad():
            head.weight.copy_(choice.weight)
            head.bias.copy_(choice.bias)
        told = (choice.lam, choice.temperature, 100 * choice.val_accuracy)
        log.info("ridge head: lambda %g, temperature %.3g, validation accuracy %.2f %%", *told)


def learning_rate(o: OptimConfig, progress: float, tick: float) -> float:
    """The rate at this progress through the run; `tick` is the progress of one step or round."""
    factor = schedule_factor(o.schedule, progress, tick=tick, warmup=o.warmup, final=o.final, decay=o.decay, milestones=tuple(o.milestones))
    return o.lr * factor


def set_up(config: Config, data: Dataset | None = None) -> Bench:
    """Read the data (unless it is given), make the model, move both. Everything that can be wrong with the input fails here, before a run exists."""
    device = pick_device(config.device)
    precision = Precision.choose(device, config.train.precision)
    data = data or load_dataset(
        config.data.name, config.data.root, val_fraction=config.data.val_fraction, seed=config.seed, download=config.data.download
    )
    model = create_model(
        config.model.name,
        data.num_classes,
        weights=config.model.weights,
        image_size=config.model.image_size,
        dropout=config.model.dropout,
        freeze_blocks=config.model.freeze_blocks,
        freeze_backbone=config.model.freeze_backbone,
        seed=config.seed,
    ).to(device)
    fitted, freeze = config.head == "ridge" or getattr(model, "fitted_head", False), config.model.freeze_head
    if (fitted and not config.model.freeze_backbone) if freeze is None else freeze:
        for param in model.head.parameters():  # type: ignore[union-attr]
            param.requires_grad_(False)
    return Bench(
        config=config,
        device=device,
        precision=precision,
        dataset=data,
        model=model,
        pipeline=Pipeline(config.model.image_size, data.mean, data.std, dtype=precision.dtype),
        augment=Augment(config.data.crop, config.data.flip, config.data.randaugment, config.data.randaugment_magnitude),
        train=ImageBank(data.train, device),
        val=ImageBank(data.val, device),
    )


def _write_features(features: Tensor, folder: Path) -> None:
    save_file({"features": features.contiguous()}, folder / "features.safetensors")


def _read_features(folder: Path, device: torch.device) -> Tensor:
    return load_file(folder / "features.safetensors", device=str(device))["features"]


def said(tested: Mapping[str, float | None]) -> str:
    accuracy = tested["test_accuracy"]
    return "the test set was not read" if accuracy is None else f"test accuracy {100 * accuracy:.2f} %"
