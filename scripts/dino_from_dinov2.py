"""Make the backbone of the CIFAR-100 study, a ViT-S/16 initialised from DINOv2 ViT-S/14: see fedlens/models/convert.py.

python scripts/dino_from_dinov2.py real/weights/dino_vits16_from_dinov2.pth                        # downloads DINOv2's public checkpoint
python scripts/dino_from_dinov2.py OUT.pth --weights dinov2_vits14_pretrain.pth                    # reads a local file instead
"""

import argparse
from pathlib import Path

import torch

from fedlens.models.convert import as_vit16
from fedlens.models.weights import fetch_public, read_tensors

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", type=Path)
parser.add_argument("--weights", type=Path, help="DINOv2 ViT-S/14 in its own names; default: the public checkpoint")
args = parser.parse_args()

tensors = as_vit16(read_tensors(args.weights or fetch_public("dinov2_vits14")))
args.out.parent.mkdir(parents=True, exist_ok=True)
torch.save(tensors, args.out)
print(f"{args.out}: {len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()):,} parameters")
