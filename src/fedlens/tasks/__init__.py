"""Tasks: what a sample is, how a batch is made from it, what training minimises and what evaluation measures."""

from abc import abstractmethod
from typing import Protocol, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.data.dataset import Split

RESIDENT_FRACTION = 0.4  # of the device's free memory that a split may occupy

Draws: TypeAlias = dict[str, Tensor]  # random numbers of augmentation by name; all lead with the axes of the batch index
Where: TypeAlias = int | slice | Tensor | tuple[int | slice, ...]


def select(draws: Draws, where: Where) -> Draws:
    """Return these rows of every tensor of the draws."""
    return {name: tensor[where] for name, tensor in draws.items()}


class Samples:
    """The samples of a split, indexed on the device: resident in GPU memory if they fit, otherwise read batch by batch."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self.split, self.device = split, device
        self.labels = split.labels.to(device)
        self.resident: Tensor | None = None
        if device.type == "cuda" and split.nbytes <= RESIDENT_FRACTION * torch.cuda.mem_get_info(device)[0]:
            self.resident = split.inputs.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored inputs [..., *sample] and labels [...] at these positions [...]."""
        flat = index.reshape(-1)
        rows = self.split.gather(flat.cpu()).to(self.device) if self.resident is None else self.resident[flat.to(self.device)]
        return rows.view(*index.shape, *rows.shape[1:]), self.labels[index.to(self.device)]


class Task(Protocol):
    """A kind of data. Engines and evaluation see samples only through it; the loss is that of classification unless overridden."""

    unit: str  # plural noun for samples in logs and reports
    device: torch.device

    @property
    @abstractmethod
    def key(self) -> str:
        """Return the settings that inputs without augmentation depend on, as a part of cache keys."""

    def samples(self, split: Split) -> Samples:
        """Return a split on this task's device."""
        return Samples(split, self.device)

    def draw(self, shape: tuple[int, ...], rng: torch.Generator) -> Draws:
        """Return the random numbers that augment `shape` samples, on the CPU; by default none."""
        return {}

    @abstractmethod
    def batch(self, samples: Samples, index: Tensor, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
        """Return model inputs and labels at positions [...]; `draws` None: without augmentation."""

    def compiled(self) -> Self:
        """Return the task with compiled code for its batches, by default itself."""
        return self

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy of logits [..., classes], in float32; reduction "none": one loss per sample [...]."""
        loss = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), label_smoothing=smoothing, reduction=reduction)
        return loss.view(labels.shape) if reduction == "none" else loss
