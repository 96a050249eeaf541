"""Make the backbone of the CIFAR-100 study, a ViT-S/16 with DINO's tensors, initialised from DINOv2 ViT-S/14.

python scripts/dino_from_dinov2.py real/weights/dino_vits16_from_dinov2.pth                        # downloads DINOv2's public checkpoint
python scripts/dino_from_dinov2.py OUT.pth --weights dinov2_vits14_pretrain.pth                    # reads a local file instead

LayerScale is folded into the preceding layer, so that blocks compute the same function. The patch kernel is resized by the pseudo-inverse
of bilinear interpolation (Beyer et al. 2023): it maps an enlarged patch as the old kernel maps the patch. Positions are resampled.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.errors import UserError
from fedlens.models.weights import fetch_public, read_tensors

SCALED = {"ls1": "attn.proj", "ls2": "mlp.fc2"}  # LayerScale -> the layer before it


def as_vit16(state: Mapping[str, Tensor], patch: int = 16, image_size: int = 224) -> dict[str, Tensor]:
    """Return a DINOv2 checkpoint without LayerScale, for patches and images of these sizes; computed in float64."""
    tensors = {name: tensor.double() for name, tensor in state.items() if name != "mask_token"}
    if not {"patch_embed.proj.weight", "pos_embed"} <= set(tensors):
        raise UserError("convert: the checkpoint must be DINOv2's in its own names, with patch_embed.proj.weight and pos_embed.")
    for name in [name for name in tensors if name.endswith(".gamma")]:
        block, scale = name.removesuffix(".gamma").rsplit(".", 1)
        gamma = tensors.pop(name)
        for scaled in (f"{block}.{SCALED[scale]}.{part}" for part in ("weight", "bias")):
            tensors[scaled] = gamma.view(-1, *[1] * (tensors[scaled].ndim - 1)) * tensors[scaled]
    tensors["patch_embed.proj.weight"] = resized_kernel(tensors["patch_embed.proj.weight"], patch)
    tensors["pos_embed"] = resampled_positions(tensors["pos_embed"], image_size // patch)
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def resized_kernel(kernel: Tensor, patch: int) -> Tensor:
    """Return w' [dim, channels, patch, patch] of w [dim, channels, p, p] with ⟨w', enlarged x⟩ = ⟨w, x⟩ for every patch x."""
    before = kernel.shape[-1]
    pixels = torch.eye(before**2, dtype=torch.float64).view(-1, 1, before, before)  # one image per pixel
    enlarge = F.interpolate(pixels, size=(patch, patch), mode="bilinear", align_corners=False).flatten(1).T  # [patch², p²]
    resized: Tensor = kernel.flatten(2) @ torch.linalg.pinv(enlarge)
    return resized.view(*kernel.shape[:2], patch, patch)


def resampled_positions(positions: Tensor, side: int) -> Tensor:
    """Resample positions [1, 1 + s², dim] -> [1, 1 + side², dim]; the class token's is copied."""
    cls, grid = positions[:, :1], positions[:, 1:]
    before = round(grid.shape[1] ** 0.5)
    image = grid.transpose(1, 2).reshape(1, -1, before, before)  # [1, dim, s, s]
    image = F.interpolate(image, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([cls, image.flatten(2).transpose(1, 2)], dim=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", type=Path, help="DINOv2 ViT-S/14 in its own names; default: the public checkpoint")
    args = parser.parse_args()

    tensors = as_vit16(read_tensors(args.weights or fetch_public("dinov2_vits14")))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, args.out)
    print(f"{args.out}: {len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()):,} parameters")
