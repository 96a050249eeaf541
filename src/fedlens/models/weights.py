"""Pretrained weights: public checkpoints, and a strict reader for the common layouts.

Layouts are recognised by their names and renamed to those of facebookresearch/dino. Missing, surplus and misshapen tensors are an error.
Public `.pth` files are opened with `weights_only=True`.
"""

import os
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedlens.data.download import download
from fedlens.errors import UserError, first_line
from fedlens.lens.space import misfits
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
    """Return the folder of public checkpoints: `FEDLENS_WEIGHTS`, or torch.hub's folder, which may hold them already."""
    return Path(os.environ.get("FEDLENS_WEIGHTS") or Path(torch.hub.get_dir()) / "checkpoints")


def public_path(name: str) -> Path:
    return cache_folder() / PUBLIC[name].url.rsplit("/", 1)[1]


def fetch_public(name: str) -> Path:
    """Return the path of this model's public checkpoint, downloading it if it is not cached; either way its SHA-256 is checked."""
    public = PUBLIC[name]
    return download(public.url, public_path(name), sha256=public.sha256, size=public.size)


def packaged_tiny() -> dict[str, Tensor]:
    """Return the tiny backbone that ships with the package, pretrained by scripts/pretrain_tiny.py."""
    return read_tensors(Path(__file__).parent / "assets" / "tiny.safetensors")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return name -> tensor from a safetensors file or a public `.pth` checkpoint."""
    if not path.is_file():
        raise UserError(f"model.weights: {path} is not a file; expected null, 'pretrained' or a checkpoint's path.")
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, struct.error) as error:
        raise UserError(f"model.weights: {path} cannot be read as a checkpoint ({first_line(error)[:120]}).") from None
    for inner in ("teacher", "state_dict", "model"):  # DINO's full checkpoints and many trainers wrap the weights
        if isinstance(state, Mapping) and isinstance(state.get(inner), Mapping):
            state = state[inner]
    if not isinstance(state, Mapping) or not state or not all(isinstance(t, Tensor) for t in state.values()):
        raise UserError(f"model.weights: {path} does not hold a state dict (name -> tensor).")
    if wrong := next((n for n, t in state.items() if t.layout != torch.strided or t.nbytes > t.untyped_storage().nbytes()), None):
        raise UserError(
            f"model.weights: {path} does not hold the numbers of tensor {wrong!r}, which is expanded or sparse; save it with .contiguous()."
        )
    return {str(name): tensor for name, tensor in state.items()}


_HF_NAMES = [  # Hugging Face's ViTModel and Dinov2Model, as published and as in memory in transformers 5 -> DINO's names
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.attention\.attention\.(q|k|v)(?:uery|ey|alue)\.", r".attn.\1."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
]
_UNUSED = re.compile(r"^(mask_token|embeddings\.mask_token|pooler\.|head\.(mlp|last_layer)\.)")  # published beside the backbone
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.|model\.|backbone\.|vit\.|dinov2\.)+")


def to_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of DINO's, timm's and Hugging Face's layouts to DINO's names."""
    state = {_PREFIXES.sub("", name): tensor for name, tensor in tensors.items()}
    if len(state) < len(tensors):
        raise UserError("model.weights: the checkpoint has two models, whose names differ only in a prefix; expected one.")
    state = {name: tensor for name, tensor in state.items() if not _UNUSED.match(name)}
    if "embeddings.cls_token" not in state:
        return state
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for pattern, ours in _HF_NAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor
    for name in [n for n in renamed if ".attn.q." in n]:  # three matrices -> one
        try:
            parts = [renamed.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
        except KeyError:
            raise UserError(f"model.weights: {name.replace('.q.', '.{query,key,value}.')} is incomplete.") from None
        renamed[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    return renamed


def check_numbers(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise unless every tensor is dense, real and finite. The integers of a quantised file are codes, not weights."""
    for name, tensor in tensors.items():
        plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
        if not plain or not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.") if plain else "no plain tensor"
            raise UserError(f"model.weights: {source}: {name} is {kind}, expected a dense tensor of real numbers.")
        if not bool(tensor.float().isfinite().all()):
            raise UserError(f"model.weights: {source}: {name} has values that are not finite.")


def load_weights(model: ViT, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load a checkpoint in any known layout into the model. Only the head may be absent, and only as a whole."""
    state, own = to_our_names(tensors), model.state_dict()
    check_numbers(state, source)  # after renaming: unused tensors may hold integers
    if "pos_embed" in state and state["pos_embed"].ndim == 3:
        grid = model.image_size // model.shape.patch
        places = state["pos_embed"].shape[1] - 1
        if places > 0 and round(places**0.5) ** 2 == places:
            state["pos_embed"] = resize_positions(state["pos_embed"].float(), grid, grid)
    model.fitted_head = any(name.startswith("head.") for name in state)
    if not model.fitted_head:
        own = {name: tensor for name, tensor in own.items() if not name.startswith("head.")}
    if problems := misfits({name: tensor.shape for name, tensor in own.items()}, state):
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise UserError(f"model.weights: {source} does not fit: {shown}.")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=model.fitted_head)
