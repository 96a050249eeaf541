"""The one space that everything lives in: named tensors <-> one flat vector, with or without a leading client axis."""

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor, nn


class ParamSpace:
    """Names and shapes of tensors in a fixed order. A model is a point [P], a cohort a matrix [clients, P].

    Under a mask the points are [k]: the active coordinates, all that moves and all that travels. `flatten` and `views` still speak
    of whole tensors ("dense"); `compact` and `expand` go between the two.
    """

    def __init__(self, shapes: Mapping[str, Iterable[int]], active: Tensor | None = None, base: Tensor | None = None) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.sizes = [prod(shape) for shape in self.shapes.values()]
        self.dense_size = sum(self.sizes)
        self.active = active  # [k] positions in the dense vector, ascending; None: all
        self.base = base  # [dense] the point whose other coordinates stay
        self.size = self.dense_size if active is None else len(active)

    @classmethod
    def of(cls, model: nn.Module, mask: Mapping[str, Tensor] | None = None) -> "ParamSpace":
        """The parameters that train; with a mask (name -> bool) those of its coordinates that may move."""
        shapes = {name: param.shape for name, param in model.named_parameters() if param.requires_grad}
        if mask is None:
            return cls(shapes)
        where = torch.cat([mask[name].flatten() for name in shapes])
        base = cls(shapes).dense(model)
        return cls(shapes, where.to(base.device).nonzero().squeeze(1), base)

    def compact(self, dense: Tensor) -> Tensor:
        """[*lead, dense] -> [*lead, P]."""
        return dense if self.active is None else dense.index_select(-1, self.active)

    def expand(self, vector: Tensor, base: Tensor | None = None) -> Tensor:
        """[P] -> dense, with `base` [dense] where nothing may move; None: what was there when the mask was laid on."""
        base = self.base if base is None else base
        return vector if self.active is None or base is None else base.index_copy(-1, self.active, vector)

    def active_sizes(self) -> list[int]:
        """Of the P coordinates, how many lie in each tensor."""
        if self.active is None:
            return self.sizes
        ends = torch.tensor(self.sizes, device=self.active.device).cumsum(0)
        upto = torch.searchsorted(self.active, ends)  # active coordinates before the end of each tensor
        return torch.diff(upto, prepend=upto.new_zeros(1)).tolist()

    def mask(self) -> Tensor | None:
        """1 where a coordinate may move, 0 elsewhere: [dense] float; None: everywhere."""
        if self.active is None:
            return None
        return torch.zeros(self.dense_size, device=self.active.device).index_fill_(0, self.active, 1.0)

    def flatten(self, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> Tensor:
        """[*lead, *shape] tensors, by name or in order -> [*lead, P]."""
        found = [tensors[name] for name in self.shapes] if isinstance(tensors, Mapping) else list(tensors)
        flat = [t.flatten(t.ndim - len(shape)) if shape else t.unsqueeze(-1) for t, shape in zip(found, self.shapes.values(), strict=True)]
        return torch.cat(flat, dim=-1)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """[*lead, P] -> name -> [*lead, *shape], sharing memory."""
        parts = torch.split(vector, self.sizes, dim=-1)
        return {name: part.view((*vector.shape[:-1], *shape)) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def dense(self, model: nn.Module) -> Tensor:
        """The model's tensors as one dense vector."""
        params = dict(model.named_parameters())
        return self.flatten({name: params[name].detach() for name in self.shapes})

    def read(self, model: nn.Module) -> Tensor:
        return self.compact(self.dense(model))

    def write(self, model: nn.Module, vector: Tensor) -> None:
        params = dict(model.named_parameters())
        with torch.no_grad():
            for name, view in self.views(self.expand(vector)).items():
                params[name].copy_(view)
