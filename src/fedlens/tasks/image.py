"""From uint8 images to model input, in batches on the device: no worker processes, no per-image Python.

The data set lies on the device as uint8 where it fits and is read from memory or disk where it does not. Cropping,
flipping, RandAugment-lite, resizing and normalising each act on a whole batch, in any number of leading axes. What is random
is drawn on the CPU from a keyed generator and moved, so a batch is the same on every device and in every engine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.data.dataset import Split

RESIDENT_FRACTION = 0.4  # of the device's free memory that a split may take and still live there


class ImageBank:
    """A split's images and labels where a training loop can index them: `bank.images(index)` is uint8 on the device."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self.split, self.device = split, device
        self.labels = split.labels.to(device)
        self.resident: Tensor | None = None
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if split.nbytes <= RESIDENT_FRACTION * free:
                self.resident = split.images.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, index: Tensor) -> Tensor:
        """[...] positions -> [..., C, H, W] uint8 on the device."""
        flat = index.reshape(-1)
        if self.resident is not None:
            found = self.resident[flat.to(self.device)]
        else:
            found = self.split.gather(flat.cpu()).to(self.device)
        return found.view(*index.shape, *found.shape[1:])

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.images(index), self.labels[index.to(self.device)]


@dataclass(frozen=True)
class Draws:
    """The random part of augmentation: one entry an image, leading axes as the images have them."""

    shift: Tensor  # [..., 2] integer pixels, rows then columns
    flip: Tensor  # [...] bool
    affine: Tensor | None = None  # [..., 2, 3] for RandAugment-lite
    color: Tensor | None = None  # [..., 3] factors for brightness, contrast, saturation

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Draws":
        affine = None if self.affine is None else change(self.affine)
        color = None if self.color is None else change(self.color)
        return Draws(change(self.shift), change(self.flip), affine, color)

    def __getitem__(self, where: int | slice | tuple[int | slice, ...]) -> "Draws":
        return self._each(lambda t: t[where])

    def rows(self, index: Tensor) -> "Draws":
        return self._each(lambda t: t[index])

    def to(self, device: torch.device) -> "Draws":
        return self._each(lambda t: t.to(device, non_blocking=True))

    @classmethod
    def stack(cls, parts: Sequence["Draws"]) -> "Draws":
        affine = [p.affine for p in parts if p.affine is not None]
        color = [p.color for p in parts if p.color is not None]
        return cls(
            torch.stack([p.shift for p in parts]),
            torch.stack([p.flip for p in parts]),
            torch.stack(affine) if affine else None,
            torch.stack(color) if color else None,
        )


@dataclass(frozen=True)
class Augment:
    """What the training split does to its images. Validation and test do nothing: `Augment(0, False)`."""

    crop: int = 0  # pixels of black border before a random crop back to size, at the data set's own resolution
    flip: bool = False
    randaugment: int = 0  # operations an image
    magnitude: float = 0.3  # of RandAugment-lite, 0 to 1

    def draw(self, shape: tuple[int, ...], rng: torch.Generator) -> Draws:
        shift = torch.randint(-self.crop, self.crop + 1, (*shape, 2), generator=rng)
        flip = torch.rand(shape, generator=rng) < 0.5 if self.flip else torch.zeros(shape, dtype=torch.bool)
        if not self.randaugment:
            return Draws(shift, flip)
        affine, color = self._randaugment(shape, rng)
        return Draws(shift, flip, affine, color)

    def _randaugment(self, shape: tuple[int, ...], rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Each image gets `randaugment` of nine operations (identity is one) with a random sign at this magnitude."""
        chosen = torch.randint(0, 9, (*shape, self.randaugment), generator=rng)
        sign = torch.randint(0, 2, (*shape, self.randaugment), generator=rng) * 2 - 1
        amount = torch.stack([((chosen == op) * sign).sum(-1) * self.magnitude for op in range(8)], dim=-1)  # [..., 8]
        angle, shear_x, shear_y, move_x, move_y = (amount[..., i] for i in range(5))
        angle = angle * math.radians(30)
        cos, sin = angle.cos(), angle.sin()
        top = torch.stack([cos + 0.3 * shear_y * -sin, -sin + 0.3 * shear_x * cos, 0.9 * move_x], dim=-1)
        bottom = torch.stack([sin + 0.3 * shear_y * cos, cos + 0.3 * shear_x * sin, 0.9 * move_y], dim=-1)
        return torch.stack([top, bottom], dim=-2), 1 + 0.9 * amount[..., 5:8]


def resize_matrix(size: int, out: int, device: torch.device) -> Tensor:
    """[out, size]: bicubic resizing is linear and separable, so on a batch it is two matrix products.

    The weights are torch's antialiased ones, which are Pillow's: what DINO and its descendants were trained with.
    """
    rows = F.interpolate(torch.eye(size)[None, None], size=(out, size), mode="bicubic", antialias=True, align_corners=False)
    return rows[0, 0].contiguous().to(device)


def shift_and_flip(images: Tensor, draws: Draws) -> Tensor:
    """Random crop of the black-bordered image, and mirror: one gather. uint8 in, uint8 out."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) + draws.shift[..., 0, None]  # [..., H]
    cols = torch.arange(width, device=images.device) + draws.shift[..., 1, None]  # [..., W]
    cols = torch.where(draws.flip[..., None], cols.flip(-1), cols)
    inside = ((rows >= 0) & (rows < height))[..., :, None] & ((cols >= 0) & (cols < width))[..., None, :]
    index = rows.clamp(0, height - 1)[..., :, None] * width + cols.clamp(0, width - 1)[..., None, :]  # [..., H, W]
    picked = images.flatten(-2).gather(-1, index.flatten(-2).unsqueeze(-2).expand(*images.shape[:-2], -1))
    return picked.view(images.shape) * inside.unsqueeze(-3)


def randaugment(x: Tensor, affine: Tensor, color: Tensor) -> Tensor:
    """Geometry by one affine sampling, then brightness, contrast and saturation as blends. x in [0, 255]."""
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


@dataclass(frozen=True)
class Fixed:
    """What a pipeline needs on the device beside the images."""

    mean: Tensor  # [C, 1, 1], of pixels in [0, 255]
    std: Tensor
    down: Tensor | None  # [size, H]; None: the images have the size already
    across: Tensor | None  # [size, W]


def transform(images: Tensor, draws: Draws | None, fixed: Fixed, dtype: torch.dtype) -> Tensor:
    """uint8 [..., C, H, W] -> normalised [..., C, size, size]: pure tensor work, so that it can be compiled."""
    if draws is not None:
        images = shift_and_flip(images, draws)
    x = images.float()
    if draws is not None and draws.affine is not None and draws.color is not None:
        x = randaugment(x, draws.affine, draws.color)
    if fixed.down is not None and fixed.across is not None:
        x = (fixed.down @ x @ fixed.across.T).clamp(0, 255)  # bicubic overshoots; Pillow clips too
    return ((x - fixed.mean) / fixed.std).to(dtype)


@dataclass(frozen=True)
class Pipeline:
    """A split's images as model input: size, normalisation and number type."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32

    @lru_cache(maxsize=8)  # noqa: B019 - a pipeline is a frozen value, and a run has one or two
    def fixed(self, height: int, width: int, device: torch.device) -> Fixed:
        mean, std = (255 * torch.tensor(v, device=device).view(-1, 1, 1) for v in (self.mean, self.std))
        if (height, width) == (self.size, self.size):
            return Fixed(mean, std, None, None)
        return Fixed(mean, std, resize_matrix(height, self.size, device), resize_matrix(width, self.size, device))

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return transform(images, draws, self.fixed(*images.shape[-2:], images.device), self.dtype)
