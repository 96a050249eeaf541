"""The one space that everything lives in: named tensors <-> one flat vector, with or without a leading client axis."""

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor, nn


class ParamSpace:
    """Names and shapes of P coordinates in a fixed order. A model is a point [P], a cohort a matrix [clients, P]."""

    def __init__(self, shapes: Mapping[str, Iterable[int]]) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.sizes = [prod(shape) for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    @classmethod
    def of(cls, model: nn.Module) -> "ParamSpace":
        """The parameters that train."""
        return cls({name: param.shape for name, param in model.named_parameters() if param.requires_grad})

    def flatten(self, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> Tensor:
        """[*lead, *shape] tensors, by name or in order -> [*lead, P]."""
        found = [tensors[name] for name in self.shapes] if isinstance(tensors, Mapping) else list(tensors)
        flat = [t.flatten(t.ndim - len(shape)) if shape else t.unsqueeze(-1) for t, shape in zip(found, self.shapes.values(), strict=True)]
        return torch.cat(flat, dim=-1)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """[*lead, P] -> name -> [*lead, *shape], sharing memory."""
        parts = torch.split(vector, self.sizes, dim=-1)
        return {name: part.view(*vector.shape[:-1], *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def read(self, model: nn.Module) -> Tensor:
        params = dict(model.named_parameters())
        return self.flatten({name: params[name].detach() for name in self.shapes})

    def write(self, model: nn.Module, vector: Tensor) -> None:
        params = dict(model.named_parameters())
        with torch.no_grad():
            for name, view in self.views(vector).items():
                params[name].copy_(view)
