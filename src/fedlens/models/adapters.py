"""Adapters for backbones of timm and Hugging Face, if those libraries are installed: pooled features, then fedlens's `head`."""

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.errors import UserError, first_line, optional
from fedlens.models.weights import check_numbers

log = logging.getLogger("fedlens")
RATES = ("p", "drop_prob", "dropout_prob", "dropout", "attention_dropout", "activation_dropout", "drop_path_rate")  # attributes of modules


class Adapted(nn.Module):
    """A backbone of another library with fedlens's interface: `features(images)`, `head`, logits. It has no client axis."""

    def __init__(self, backbone: nn.Module, dim: int, num_classes: int, dropout: float, options: Mapping[str, Any] | None = None) -> None:
        """Wrap a backbone; `options` are passed to each of its calls."""
        super().__init__()
        disable_dropout(backbone)
        self.backbone, self.drop, self.head = backbone, nn.Dropout(dropout), nn.Linear(dim, num_classes)
        self.options = dict(options or {})

    def features(self, images: Tensor) -> Tensor:
        """Return pooled features [batch, dim]."""
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        out: Any = self.backbone(images, **self.options)
        if isinstance(out, Tensor):
            return out
        pooled: Tensor | None = getattr(out, "pooler_output", None)
        return out.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        z = self.features(images)
        out: Tensor = self.head(self.drop(z) if keep is None else z * keep)
        return out


def disable_dropout(backbone: nn.Module) -> None:
    """Set dropout and stochastic depth inside a backbone to 0: their draws are not keyed and would depend on the order of clients."""
    changed = 0
    for module in backbone.modules():
        is_dropout = "drop" in type(module).__name__.lower()
        for rate in RATES:
            value = getattr(module, rate, None)
            if isinstance(value, float) and value > 0 and (rate != "p" or is_dropout):
                setattr(module, rate, 0.0)
                changed += 1
    if changed:
        log.warning("model: set %d dropout rates inside the backbone to 0, since their draws are not keyed; use model.dropout", changed)


def from_timm(name: str, num_classes: int, pretrained: bool, image_size: int, dropout: float) -> Adapted:
    timm = optional("timm", "timm", f"model.name: timm:{name}")
    try:
        try:
            backbone = timm.create_model(name, pretrained=pretrained, num_classes=0, img_size=image_size)
        except TypeError:  # convolutional networks take any size and have no img_size
            backbone = timm.create_model(name, pretrained=pretrained, num_classes=0)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"model.name: timm:{name} cannot be created ({first_line(error)[:160]}).") from None
    return Adapted(backbone, int(backbone.num_features), num_classes, dropout)


def from_huggingface(name: str, num_classes: int, pretrained: bool, image_size: int, dropout: float) -> Adapted:
    auto = optional("transformers", "hf", f"model.name: hf:{name}")
    try:
        config, model = auto.AutoConfig.from_pretrained(name), auto.AutoModel
        backbone, loading = model.from_pretrained(name, output_loading_info=True) if pretrained else (model.from_config(config), {})
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.name: hf:{name} cannot be loaded ({first_line(error)[:160]}).") from None
    missing = sorted(map(str, loading.get("missing_keys", ())))
    if needed := [key for key in missing if not key.startswith("pooler.")]:
        listed = ", ".join(needed[:4]) + ", …" * (len(needed) > 4)
        raise UserError(f"model.weights: hf:{name} lacks {listed}, which would train from random values.")
    if missing:
        backbone.pooler = None  # published without one: use the class token instead of a random layer on top of it
    dim = getattr(config, "hidden_size", None) or (getattr(config, "hidden_sizes", None) or [0])[-1]
    if not dim:
        raise UserError(f"model.name: hf:{name} is a {type(backbone).__name__} without hidden_size; fedlens cannot read its features.")
    interpolates = "interpolate_pos_encoding" in signature(backbone.forward).parameters
    resized = interpolates and getattr(config, "image_size", image_size) not in (image_size, [image_size] * 2, (image_size,) * 2)
    backbone = backbone.float()  # a half-precision file loads as such, but training is in single precision
    return Adapted(backbone, int(dim), num_classes, dropout, {"interpolate_pos_encoding": True} if resized else None)


def check_fits(model: Adapted, name: str, image_size: int) -> Adapted:
    """Return the model; raise unless it takes images of this size, gives features that fit its head, and is deterministic."""
    check_numbers({n: t for n, t in model.backbone.state_dict().items() if t.is_floating_point()}, name)
    training = model.training
    try:
        with torch.no_grad():
            features = model.eval().features(torch.zeros(1, 3, image_size, image_size))
    except Exception as error:  # each library and model raises its own type
        raise UserError(f"model.image_size must be a size that {name} takes, got {image_size} ({first_line(error)[:160]}).") from None
    if features.shape != (1, model.head.in_features):
        raise UserError(f"model.name: {name} must give features [1, {model.head.in_features}] for one image, got {list(features.shape)}.")
    if draws(model, image_size):
        raise UserError(
            f"model.name: {name} draws at random in its forward pass (a masked autoencoder, or a dropout rate that cannot be set); "
            "choose a deterministic model."
        )
    return model.train(training)


def draws(model: Adapted, image_size: int) -> bool:
    """Return True if a forward pass advances torch's global generator, which no seed of a run controls."""
    images, trial = torch.zeros(2, 3, image_size, image_size), copy.deepcopy(model)  # a copy: batch norm updates its statistics
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        trial.eval().features(images)
        with suppress(ValueError):  # batch norm on a single value
            trial.train().features(images)
        return not torch.equal(before, torch.get_rng_state())
