"""Backbones of timm and Hugging Face, where those libraries are installed: pooled features, then our `head`."""

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.errors import UserError, first_line
from fedlens.models.weights import check_numbers

log = logging.getLogger("fedlens")


class Adapted(nn.Module):
    """Someone else's backbone under our contract: `features(images)`, `head`, logits. It has no client axis."""

    def __init__(self, backbone: nn.Module, dim: int, num_classes: int, dropout: float, options: Mapping[str, Any] | None = None) -> None:
        """`options`: for every call of the backbone."""
        super().__init__()
        without_chance(backbone)
        self.backbone, self.drop, self.head = backbone, nn.Dropout(dropout), nn.Linear(dim, num_classes)
        self.options = dict(options or {})

    def features(self, images: Tensor) -> Tensor:
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


RATES = ("p", "drop_prob", "dropout_prob", "dropout", "attention_dropout", "activation_dropout", "drop_path_rate")  # as modules call them


def without_chance(backbone: nn.Module) -> None:
    """Dropout and stochastic depth inside a backbone draw from torch's one generator, in whatever order clients come: they are turned off, so that a
    run is a function of its seed and resumes exactly. model.dropout, before the head, is keyed and stays."""
    off = 0
    for module in backbone.modules():
        for rate in RATES:
            if (
                isinstance(given := getattr(module, rate, None), float)
                and given > 0
                and (rate != "p" or "drop" in type(module).__name__.lower())
            ):
                setattr(module, rate, 0.0)
                off += 1
    if off:
        log.warning("model: %d rates of dropout inside the backbone are set to 0: their draws would not be keyed; model.dropout is", off)


def from_timm(name: str, num_classes: int, pretrained: bool, image_size: int | None, dropout: float) -> Adapted:
    try:
        import timm
    except ImportError:
        raise UserError(f"model.name: timm:{name} needs timm; install it with: pip install 'fedlens[timm]'") from None
    size = {} if image_size is None else {"img_size": image_size}
    try:
        try:
            backbone = timm.create_model(name, pretrained=pretrained, num_classes=0, **size)
        except TypeError:  # convolutional networks take any size and know no img_size
            backbone = timm.create_model(name, pretrained=pretrained, num_classes=0)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"model.name: timm:{name} cannot be made ({first_line(error)[:160]})") from None
    return Adapted(backbone, int(backbone.num_features), num_classes, dropout)


def check_fits(model: Adapted, name: str, image_size: int) -> Adapted:
    """The backbone takes images of this size, and gives what the head expects: otherwise it is said here, before a run exists."""
    check_numbers({n: t for n, t in model.backbone.state_dict().items() if t.is_floating_point()}, name)
    training = model.training
    try:
        with torch.no_grad():
            found = model.eval().features(torch.zeros(1, 3, image_size, image_size))
    except Exception as error:  # each library, and each of its models, has its own
        raise UserError(f"model.image_size: {image_size} given, which {name} does not take ({first_line(error)[:160]})") from None
    if found.shape != (1, model.head.in_features):
        raise UserError(f"model.name: {name} gives features {list(found.shape)} for one image, allowed is [1, {model.head.in_features}]")
    if draws(model, image_size):
        raise UserError(
            f"model.name: {name} draws at random in its forward pass (a masked autoencoder, or a rate that cannot be set), allowed is one that does not"
        )
    return model.train(training)


def draws(model: Adapted, image_size: int) -> bool:
    """Whether torch's generator is another after a forward pass: such features would be a function of no seed."""
    images, tried = torch.zeros(2, 3, image_size, image_size), copy.deepcopy(model)  # a copy: a batch norm remembers what it saw
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        tried.eval().features(images)
        with suppress(ValueError):  # a batch norm that wants more than one value
            tried.train().features(images)
        return not torch.equal(before, torch.get_rng_state())


def from_huggingface(name: str, num_classes: int, pretrained: bool, image_size: int, dropout: float) -> Adapted:
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError:
        raise UserError(f"model.name: hf:{name} needs transformers; install it with: pip install 'fedlens[hf]'") from None
    try:
        config = AutoConfig.from_pretrained(name)
        backbone, told = AutoModel.from_pretrained(name, output_loading_info=True) if pretrained else (AutoModel.from_config(config), {})
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.name: hf:{name} cannot be loaded ({first_line(error)[:160]})") from None
    absent = sorted(map(str, told.get("missing_keys", ())))
    if lacking := [key for key in absent if not key.startswith("pooler.")]:
        raise UserError(
            f"model.weights: hf:{name} lacks {', '.join(lacking[:4])}{', …' * (len(lacking) > 4)}: it would train from noise there"
        )
    if absent:
        backbone.pooler = None  # published without: the class token is the feature, not a random layer on top of it
    dim = getattr(config, "hidden_size", None) or (getattr(config, "hidden_sizes", None) or [0])[-1]
    if not dim:
        raise UserError(
            f"model.name: hf:{name} is a {type(backbone).__name__}, which has no hidden_size: no backbone that fedlens can read"
        )
    takes = "interpolate_pos_encoding" in signature(backbone.forward).parameters
    other = takes and getattr(config, "image_size", image_size) not in (image_size, [image_size] * 2, (image_size,) * 2)
    backbone = backbone.float()  # a file in half precision is read as such; what trains is single
    return Adapted(backbone, int(dim), num_classes, dropout, {"interpolate_pos_encoding": True} if other else None)
