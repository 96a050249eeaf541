"""Pretrained weights: public addresses, and the layouts in which people have them on disk, read strictly.

A layout is recognised by its names and translated to ours (those of facebookresearch/dino); after that, a missing, surplus
or misshapen tensor is an error that lists it. Public `.pth` files are opened with `weights_only=True`.
"""

import hashlib
import os
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedlens.data.download import download
from fedlens.errors import UserError, first_line
from fedlens.models.vit import ViT, resize_positions


@dataclass(frozen=True)
class PublicFile:
    url: str
    sha256: str
    size: int  # bytes


PUBLIC = {
    "dino_vits16": PublicFile(
        "https://dl.fbaipublicfiles.com/dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth",
        "1566d50496f27f52f07fea6094fa29b2fdd6fae89da65bdd3ebc3b24ef6b7eb7",
        86_710_517,
    ),
    "dinov2_vits14": PublicFile(
        "https://dl.fbaipublicfiles.com/dinov2/dinov2_vits14/dinov2_vits14_pretrain.pth",
        "b938bf1bc15cd2ec0feacfe3a1bb553fe8ea9ca46a7e1d8d00217f29aef60cd9",
        88_283_115,
    ),
}


def cache_folder() -> Path:
    """Where public checkpoints are kept: `FEDLENS_WEIGHTS`, or torch.hub's own folder, which may hold them already."""
    return Path(os.environ.get("FEDLENS_WEIGHTS") or Path(torch.hub.get_dir()) / "checkpoints")


def public_path(name: str) -> Path:
    return cache_folder() / PUBLIC[name].url.rsplit("/", 1)[1]


def fetch_public(name: str) -> Path:
    """The public checkpoint of this model, from the cache or downloaded; its SHA-256 is checked either way."""
    public, path = PUBLIC[name], public_path(name)
    if not path.exists():
        download(public.url, path, sha256=public.sha256, size=public.size)
        return path
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != public.sha256:
        raise UserError(f"model.weights: {path} has SHA-256 {found}, the published file has {public.sha256}: delete it, or give its path")
    return path


def packaged_tiny() -> dict[str, Tensor]:
    """The tiny backbone that ships with the package, pretrained by scripts/pretrain_tiny.py."""
    with resources.as_file(resources.files("fedlens.models") / "assets" / "tiny.safetensors") as path:
        return read_tensors(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A flat name -> tensor mapping from a safetensors file or a public `.pth` checkpoint."""
    if not path.is_file():
        raise UserError(f"model.weights: {path} is not a file; allowed is null, 'pretrained' or a checkpoint's path")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, struct.error) as error:
        raise UserError(f"model.weights: {path} cannot be read as a checkpoint ({first_line(error)[:120]})") from None
    for inner in ("teacher", "state_dict", "model"):  # DINO's full checkpoints and many trainers' wrap the weights
        if isinstance(found, Mapping) and isinstance(found.get(inner), Mapping):
            found = found[inner]
    if not isinstance(found, Mapping) or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise UserError(f"model.weights: {path} does not hold a state dict (name -> tensor)")
    return {str(name): tensor for name, tensor in found.items()}


_HF_NAMES = [  # Hugging Face's ViTModel and Dinov2Model -> ours; the published files' names and those transformers 5 has in memory
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.q_proj\.", ".attn.query."),
    (r"\.attention\.k_proj\.", ".attn.key."),
    (r"\.attention\.v_proj\.", ".attn.value."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.attention\.attention\.(query|key|value)\.", r".attn.\1."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
]
_UNUSED = re.compile(
    r"^(mask_token|embeddings\.mask_token|pooler\.|head\.(mlp|last_layer)\.)"
)  # published beside the backbone, never part of it


def to_our_names(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """DINO's own, timm's and Hugging Face's layouts -> DINO's names."""
    state = {re.sub(r"^(module\.|_orig_mod\.|model\.|backbone\.|vit\.|dinov2\.)+", "", name): tensor for name, tensor in found.items()}
    if len(state) < len(found):
        raise UserError("model.weights: the checkpoint has two models, which differ in a prefix alone; allowed is one")
    state = {name: tensor for name, tensor in state.items() if not _UNUSED.match(name)}
    if "embeddings.cls_token" not in state:
        return state
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for pattern, ours in _HF_NAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor
    for name in [n for n in renamed if ".attn.query." in n]:  # three matrices -> one
        parts = [renamed.pop(name.replace(".query.", f".{part}."), None) for part in ("query", "key", "value")]
        if any(part is None for part in parts):
            raise UserError(f"model.weights: {name.replace('.query.', '.{query,key,value}.')} is incomplete")
        renamed[name.replace(".query.", ".qkv.")] = torch.cat([part for part in parts if part is not None])
    return renamed


def check_numbers(found: Mapping[str, Tensor], source: str) -> None:
    """What can be a weight: dense, real, finite. Integers of a quantised file would be taken for the numbers that they stand for."""
    for name, tensor in found.items():
        plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
        if not plain or not tensor.is_floating_point():
            what = str(tensor.dtype).removeprefix("torch.") if plain else "no plain tensor"
            raise UserError(f"model.weights: {source}: {name} is {what}, allowed are dense tensors of real numbers")
        if not bool(tensor.float().isfinite().all()):
            raise UserError(f"model.weights: {source}: {name} has values that are not finite")


def load_weights(model: ViT, found: Mapping[str, Tensor], source: str) -> None:
    """Fill the model from a checkpoint in any known layout. Only the head may be absent, and only as a whole."""
    state, own = to_our_names(found), model.state_dict()
    check_numbers(state, source)  # what is left out may be anything: a count of batches in DINO's projection head
    if "pos_embed" in state and state["pos_embed"].ndim == 3:
        grid = model.image_size // model.shape.patch
        places = state["pos_embed"].shape[1] - 1
        if places > 0 and round(places**0.5) ** 2 == places:
            state["pos_embed"] = resize_positions(state["pos_embed"].float(), grid, grid)
    model.fitted_head = any(name.startswith("head.") for name in state)
    if not model.fitted_head:
        own = {name: tensor for name, tensor in own.items() if not name.startswith("head.")}
    problems = [f"missing {n}" for n in own if n not in state] + [f"surplus {n}" for n in state if n not in own]
    problems += [f"{n} is {list(state[n].shape)}, needs {list(own[n].shape)}" for n in own if n in state and state[n].shape != own[n].shape]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise UserError(f"model.weights: {source} does not fit: {shown}")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=len(own) == len(model.state_dict()))
