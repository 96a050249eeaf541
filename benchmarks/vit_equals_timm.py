"""Our ViT-S/16 against timm's, the same weights in both, fp32: the largest difference of features and of gradients.

    python benchmarks/vit_equals_timm.py --weights dino_vits16.pth --out record.json

Weights in the torch.hub layout of facebookresearch/dino; without --weights, timm's random ones.
"""

import argparse
import json
from pathlib import Path

import timm
import torch

from fedlens.models import SHAPES
from fedlens.models.vit import ViT
from fedlens.models.weights import load_weights, read_tensors


def compare(weights: Path | None, device: str) -> dict[str, object]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # timm's patch embedding is a convolution
    theirs = timm.create_model("vit_small_patch16_224", num_classes=0).eval()
    if weights:
        theirs.load_state_dict(read_tensors(weights), strict=True)
    ours = ViT(SHAPES["dino_vits16"], 100).eval()
    load_weights(ours, read_tensors(weights) if weights else theirs.state_dict(), "timm's vit_small_patch16_224")
    theirs, ours = theirs.to(device), ours.to(device)
    images = torch.randn(16, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(device)
    a, b = theirs(images), ours.features(images)
    a.square().sum().backward()
    b.square().sum().backward()
    mine = dict(ours.named_parameters())
    worst = max(float((p.grad - mine[n].grad).norm() / p.grad.norm()) for n, p in theirs.named_parameters() if p.grad is not None)
    return {
        "images": list(images.shape),
        "max_abs_difference": float((a - b).detach().abs().max()),
        "feature_scale": float(a.detach().abs().max()),
        "worst_relative_gradient_difference": worst,
        "weights": weights.name if weights else "random",
        "timm": timm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    record = json.dumps(compare(args.weights, args.device), indent=1)
    print(record)
    if args.out:
        args.out.write_text(record + "\n")
