"""DINOv2 ViT-S/14 as a ViT-S/16 with DINO's tensors: the backbone of the study on CIFAR-100, "ViT-S/16 initialised from DINOv2".

LayerScale is folded into the layer before it, so that a block computes what it did. The patch kernel is resized by the pseudo-inverse of bilinear
interpolation (Beyer et al. 2023): it says of a patch enlarged to 16 pixels what the old one said of the patch. Positions are resampled.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.errors import UserError

SCALED = {"ls1": "attn.proj", "ls2": "mlp.fc2"}  # LayerScale -> the layer before it


def as_vit16(state: Mapping[str, Tensor], patch: int = 16, image_size: int = 224) -> dict[str, Tensor]:
    """A checkpoint of DINOv2 in its own names -> one without LayerScale, for patches and images of these sizes. In float64 on the way."""
    found = {name: tensor.double() for name, tensor in state.items() if name != "mask_token"}
    if not {"patch_embed.proj.weight", "pos_embed"} <= set(found):
        raise UserError("convert: the checkpoint has no patch_embed.proj.weight and pos_embed; allowed is DINOv2's in its own names")
    for name in [name for name in found if name.endswith(".gamma")]:
        block, scale = name.removesuffix(".gamma").rsplit(".", 1)
        gamma = found.pop(name)
        for part in ("weight", "bias"):
            tensor = found[f"{block}.{SCALED[scale]}.{part}"]
            found[f"{block}.{SCALED[scale]}.{part}"] = gamma.view(-1, *[1] * (tensor.ndim - 1)) * tensor
    found["patch_embed.proj.weight"] = resized_kernel(found["patch_embed.proj.weight"], patch)
    found["pos_embed"] = resampled_positions(found["pos_embed"], image_size // patch)
    return {name: tensor.float().contiguous() for name, tensor in found.items()}


def enlarging(before: int, after: int) -> Tensor:
    """[after², before²]: bilinear interpolation of a square image, as a matrix."""
    pixels = torch.eye(before**2, dtype=torch.float64).view(-1, 1, before, before)  # one image a pixel
    return F.interpolate(pixels, size=(after, after), mode="bilinear", align_corners=False).flatten(1).T


def resized_kernel(kernel: Tensor, patch: int) -> Tensor:
    """[dim, channels, p, p] -> [dim, channels, patch, patch], w' with ⟨w', enlarged x⟩ = ⟨w, x⟩ for every patch x."""
    shape, before = kernel.shape[:2], kernel.shape[-1]
    resized: Tensor = kernel.flatten(2) @ torch.linalg.pinv(enlarging(before, patch))
    return resized.view(*shape, patch, patch)


def resampled_positions(positions: Tensor, side: int) -> Tensor:
    """[1, 1 + s², dim] -> [1, 1 + side², dim]; the class token keeps its own."""
    own, grid = positions[:, :1], positions[:, 1:]
    before = round(grid.shape[1] ** 0.5)
    image = grid.transpose(1, 2).reshape(1, -1, before, before)  # [1, dim, s, s]
    image = F.interpolate(image, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([own, image.flatten(2).transpose(1, 2)], dim=1)
