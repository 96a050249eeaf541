"""Image classification: uint8 images become model inputs in batches on the device, without worker processes or per-image Python.

Cropping, flipping, RandAugment-lite, resizing and normalising act on a whole batch with any leading axes. Random numbers are
drawn on the CPU from a keyed generator and moved, so a batch is the same on every device and in every engine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.config import Config
from fedlens.data.dataset import Dataset
from fedlens.tasks import Draws, Samples, Task

Matrix = Tensor | None


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images. `Augment(0, False)` changes nothing."""

    crop: int = 0  # pixels of black border before a random crop back to size, at the data set's own resolution
    flip: bool = False
    randaugment: int = 0  # operations per image
    magnitude: float = 0.3  # of RandAugment-lite, 0 to 1

    def draw(self, shape: tuple[int, ...], rng: torch.Generator) -> Draws:
        """Return shift [..., 2] (pixels: rows, columns) and flip [...]; for RandAugment-lite also affine [..., 2, 3] and color [..., 3]."""
        draws = {"shift": torch.randint(-self.crop, self.crop + 1, (*shape, 2), generator=rng)}
        draws["flip"] = torch.rand(shape, generator=rng) < 0.5 if self.flip else torch.zeros(shape, dtype=torch.bool)
        return draws | self._randaugment(shape, rng) if self.randaugment else draws

    def _randaugment(self, shape: tuple[int, ...], rng: torch.Generator) -> Draws:
        """Draw `randaugment` of nine operations per image (one is the identity), with a random sign at this magnitude."""
        chosen = torch.randint(0, 9, (*shape, self.randaugment), generator=rng)
        sign = torch.randint(0, 2, (*shape, self.randaugment), generator=rng) * 2 - 1
        amount = torch.stack([((chosen == op) * sign).sum(-1) * self.magnitude for op in range(8)], dim=-1)  # [..., 8]
        angle, shear_x, shear_y, move_x, move_y = (amount[..., i] for i in range(5))
        angle = angle * math.radians(30)
        cos, sin = angle.cos(), angle.sin()
        top = torch.stack([cos + 0.3 * shear_y * -sin, -sin + 0.3 * shear_x * cos, 0.9 * move_x], dim=-1)
        bottom = torch.stack([sin + 0.3 * shear_y * cos, cos + 0.3 * shear_x * sin, 0.9 * move_y], dim=-1)
        return {"affine": torch.stack([top, bottom], dim=-2), "color": 1 + 0.9 * amount[..., 5:8]}


def resize_matrix(size: int, out: int, device: torch.device) -> Tensor:
    """Return [out, size]: bicubic resizing is linear and separable, so on a batch it is two matrix products.

    The weights are torch's antialiased ones, which equal Pillow's: DINO and its descendants were trained with them. Pillow also rounds and clips
    between its passes. Without that (data.resize=once), pixels at sharp edges differ, by up to 29 of 255 levels.
    """
    rows = F.interpolate(torch.eye(size)[None, None], size=(out, size), mode="bicubic", antialias=True, align_corners=False)
    return rows[0, 0].contiguous().to(device)


def shift_and_flip(images: Tensor, draws: Draws) -> Tensor:
    """Crop each black-bordered image at random and mirror it, in one gather: uint8 in, uint8 out."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) + draws["shift"][..., 0, None]  # [..., H]
    cols = torch.arange(width, device=images.device) + draws["shift"][..., 1, None]  # [..., W]
    cols = torch.where(draws["flip"][..., None], cols.flip(-1), cols)
    inside = ((rows >= 0) & (rows < height))[..., :, None] & ((cols >= 0) & (cols < width))[..., None, :]
    index = rows.clamp(0, height - 1)[..., :, None] * width + cols.clamp(0, width - 1)[..., None, :]  # [..., H, W]
    picked = images.flatten(-2).gather(-1, index.flatten(-2).unsqueeze(-2).expand(*images.shape[:-2], -1))
    return picked.view(images.shape) * inside.unsqueeze(-3)


def randaugment(x: Tensor, affine: Tensor, color: Tensor) -> Tensor:
    """Apply one affine sampling, then brightness, contrast and saturation as blends. x is in [0, 255]."""
    lead, shape = x.shape[:-3], x.shape[-3:]
    flat = x.reshape(-1, *shape)
    grid = F.affine_grid(affine.reshape(-1, 2, 3).to(x.dtype), list(flat.shape), align_corners=False)
    x = F.grid_sample(flat, grid, mode="bilinear", padding_mode="zeros", align_corners=False).view(*lead, *shape)
    bright, contrast, saturation = (color[..., i, None, None, None].to(x.dtype) for i in range(3))
    x = (x * bright).clamp(0, 255)
    grey = x.mean(-3, keepdim=True)
    mean = grey.mean((-1, -2), keepdim=True)
    x = (mean + (x - mean) * contrast).clamp(0, 255)
    grey = x.mean(-3, keepdim=True)
    return (grey + (x - grey) * saturation).clamp(0, 255)


def transform(
    images: Tensor, draws: Draws | None, mean: Tensor, std: Tensor, down: Matrix, across: Matrix, dtype: torch.dtype, pillow: bool
) -> Tensor:
    """Return uint8 images [..., C, H, W] as normalised inputs [..., C, size, size]: tensor operations only, so that it compiles.

    `mean` and `std` [C, 1, 1] refer to pixels in [0, 255]; `down` [size, H] and `across` [size, W] resize.
    """
    if draws is not None:
        images = shift_and_flip(images, draws)
    x = images.float()
    if draws is not None and "affine" in draws:
        x = randaugment(x, draws["affine"], draws["color"])
    if down is not None and across is not None:
        if pillow:
            x = down @ (x @ across.T).round().clamp(0, 255)
        x = x.round().clamp(0, 255) if pillow else (down @ x @ across.T).clamp(0, 255)  # bicubic overshoots
    return ((x - mean) / std).to(dtype)


@dataclass(frozen=True)
class Pipeline:
    """Size, normalisation and number type of the model's inputs."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    pillow: bool = field(default=False, repr=False)  # clip and round after each pass of resizing

    @lru_cache(maxsize=8)  # noqa: B019 - a pipeline is a frozen value, and a run has one or two
    def constants(self, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Matrix, Matrix]:
        """Return `transform`'s mean, std and resize matrices (None: the images already have the size)."""
        mean, std = (255 * torch.tensor(v, device=device).view(-1, 1, 1) for v in (self.mean, self.std))
        if (height, width) == (self.size, self.size):
            return mean, std, None, None
        return mean, std, resize_matrix(height, self.size, device), resize_matrix(width, self.size, device)

    def __call__(self, images: Tensor, draws: Draws | None = None, apply: Callable[..., Tensor] = transform) -> Tensor:
        return apply(images, draws, *self.constants(*images.shape[-2:], images.device), self.dtype, self.pillow)


@dataclass(frozen=True)
class ImageTask(Task):
    """Image classification."""

    pipeline: Pipeline
    augment: Augment
    device: torch.device
    unit: str = "images"
    transform: Callable[..., Tensor] = field(default=transform, repr=False)

    @classmethod
    def of(cls, config: Config, data: Dataset, device: torch.device, dtype: torch.dtype) -> "ImageTask":
        """Return the task of a configuration and its data set."""
        d = config.data
        augment = Augment(d.crop, d.flip, d.randaugment, d.randaugment_magnitude)
        return cls(Pipeline(config.model.image_size, data.mean, data.std, dtype, d.resize == "pillow"), augment, device)

    @property
    def key(self) -> str:
        return repr(self.pipeline) + " like Pillow" * self.pipeline.pillow

    def draw(self, shape: tuple[int, ...], rng: torch.Generator) -> Draws:
        return self.augment.draw(shape, rng)

    def batch(self, samples: Samples, index: Tensor, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
        images, labels = samples.batch(index)
        draws = None if draws is None else {name: tensor.to(self.device, non_blocking=True) for name, tensor in draws.items()}
        return self.pipeline(images, draws, self.transform), labels

    def compiled(self) -> "ImageTask":
        return replace(self, transform=torch.compile(transform, dynamic=False))
