"""Models by name. A model maps normalised float images, NCHW, to logits; its classifier is `head`."""

from pathlib import Path

import torch
from torch import nn

from fedlens.errors import UserError, bad_value, unknown
from fedlens.models.adapters import Adapted, check_fits, from_huggingface, from_timm
from fedlens.models.vit import ViT, ViTShape
from fedlens.models.weights import fetch_public, load_weights, packaged_tiny, read_tensors
from fedlens.seeding import key

SHAPES = {
    "dino_vits16": ViTShape(patch=16, dim=384, depth=12, heads=6, image_size=224),
    "dinov2_vits14": ViTShape(patch=14, dim=384, depth=12, heads=6, image_size=518, layer_scale=True),
    "tiny": ViTShape(patch=7, dim=128, depth=6, heads=4, image_size=28),
}


def create_model(
    name: str,
    num_classes: int,
    *,
    weights: str | Path | None = None,
    image_size: int = 224,
    dropout: float = 0.0,
    freeze_blocks: int = 0,
    freeze_backbone: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Return a model by name: dino_vits16, dinov2_vits14, tiny, `timm:NAME`, `hf:NAME`.

    weights: None (random), "pretrained" (the public checkpoint; for `tiny` the packaged one) or a checkpoint's path.
    freeze_blocks: freeze the embedding and this many of the first blocks. freeze_backbone: freeze everything but the head.
    """
    if num_classes < 1:
        raise bad_value("num_classes", num_classes, ">= 1")
    if not 0 <= dropout < 1:
        raise bad_value("model.dropout", dropout, "in [0, 1)")
    if name.startswith(("timm:", "hf:")):
        if weights not in (None, "pretrained"):
            raise bad_value("model.weights", str(weights), f"null or 'pretrained' for {name}")
        if freeze_blocks:
            raise bad_value("model.freeze_blocks", freeze_blocks, f"0 for {name}, whose blocks fedlens does not know")
        library, inner = name.split(":", 1)
        adapt = from_timm if library == "timm" else from_huggingface
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(seed, "init"))
            adapted = adapt(inner, num_classes, weights == "pretrained", image_size, dropout)
        return _freeze(check_fits(adapted, name, image_size), 0, freeze_backbone)
    if name not in SHAPES:
        raise unknown("model.name", name, [*SHAPES, "timm:NAME", "hf:NAME"])
    shape = SHAPES[name]
    if image_size < shape.patch or image_size % shape.patch:
        raise bad_value("model.image_size", image_size, f"a multiple of the patch, {shape.patch}")
    if not 0 <= freeze_blocks <= shape.depth:
        raise bad_value("model.freeze_blocks", freeze_blocks, f"0 to {shape.depth} for {name}")
    model = ViT(shape, num_classes, image_size=image_size, dropout=dropout, seed=seed)
    if weights == "pretrained":
        tensors = packaged_tiny() if name == "tiny" else read_tensors(fetch_public(name))
        load_weights(model, tensors, f"the public checkpoint of {name}")
    elif weights is not None:
        load_weights(model, read_tensors(Path(weights)), str(weights))
    return _freeze(model, freeze_blocks, freeze_backbone)


def _freeze(model: ViT | Adapted, blocks: int, backbone: bool) -> nn.Module:
    frozen = ("patch_embed.", "cls_token", "pos_embed", *(f"blocks.{i}." for i in range(blocks))) if blocks else ()
    for name, param in model.named_parameters():
        if (backbone and not name.startswith("head.")) or name.startswith(frozen):
            param.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("model: every parameter is frozen, so there is nothing to train.")
    return model


__all__ = ["SHAPES", "create_model"]
