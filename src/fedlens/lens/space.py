"""The parameter space: named tensors <-> one flat vector, with or without a leading client axis."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn


class ParamSpace:
    """Names and shapes of tensors in a fixed order. A model is a point [P], a cohort a matrix [clients, P].

    Under a mask, points hold active coordinates only; `compact` and `expand` convert from and to the dense vector of `flatten` and `views`.
    """

    def __init__(self, shapes: Mapping[str, Iterable[int]], active: Tensor | None = None, base: Tensor | None = None) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.sizes = [prod(shape) for shape in self.shapes.values()]
        self.dense_size = sum(self.sizes)
        self.active = active  # [k] positions in the dense vector, ascending; None: all
        self.base = base  # [dense] values of the inactive coordinates
        self.size = self.dense_size if active is None else len(active)

    @classmethod
    def of(cls, model: nn.Module, mask: Mapping[str, Tensor] | None = None) -> "ParamSpace":
        """Return the space of the parameters that require gradients, restricted to the active coordinates of a mask (name -> bool)."""
        shapes = {name: param.shape for name, param in model.named_parameters() if param.requires_grad}
        if mask is None:
            return cls(shapes)
        active = torch.cat([mask[name].flatten() for name in shapes])
        base = cls(shapes).dense(model)
        return cls(shapes, active.to(base.device).nonzero().squeeze(1), base)

    def compact(self, dense: Tensor) -> Tensor:
        """Return the active coordinates, [*lead, dense] -> [*lead, P]."""
        return dense if self.active is None else dense.index_select(-1, self.active)

    def expand(self, vector: Tensor, base: Tensor | None = None) -> Tensor:
        """Return the dense vector of [P]; inactive coordinates come from `base` [dense], by default from the model at construction."""
        base = self.base if base is None else base
        return vector if self.active is None or base is None else base.index_copy(-1, self.active, vector)

    def active_sizes(self) -> list[int]:
        """Return the number of active coordinates per tensor."""
        if self.active is None:
            return self.sizes
        ends = torch.tensor(self.sizes, device=self.active.device).cumsum(0)
        counts = torch.searchsorted(self.active, ends)  # active coordinates before the end of each tensor
        return torch.diff(counts, prepend=counts.new_zeros(1)).tolist()

    def mask(self) -> Tensor | None:
        """Return [dense] floats, 1 where a coordinate is active and 0 elsewhere; None if all are active."""
        if self.active is None:
            return None
        return torch.zeros(self.dense_size, device=self.active.device).index_fill_(0, self.active, 1.0)

    def flatten(self, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> Tensor:
        """Return one vector of tensors by name or in order, [*lead, *shape] -> [*lead, P]."""
        ordered = [tensors[name] for name in self.shapes] if isinstance(tensors, Mapping) else tensors
        flat = [
            t.flatten(t.ndim - len(shape)) if shape else t.unsqueeze(-1) for t, shape in zip(ordered, self.shapes.values(), strict=True)
        ]
        return torch.cat(flat, dim=-1)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return name -> [*lead, *shape] views of a vector [*lead, P]."""
        parts = torch.split(vector, self.sizes, dim=-1)
        return {name: part.view((*vector.shape[:-1], *shape)) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def dense(self, model: nn.Module) -> Tensor:
        """Return the model's tensors as one dense vector."""
        params = dict(model.named_parameters())
        return self.flatten({name: params[name].detach() for name in self.shapes})

    def read(self, model: nn.Module) -> Tensor:
        return self.compact(self.dense(model))

    def write(self, model: nn.Module, vector: Tensor) -> None:
        params = dict(model.named_parameters())
        with torch.no_grad():
            for name, view in self.views(self.expand(vector)).items():
                params[name].copy_(view)


def misfits(expected: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return how tensors differ from the expected names and shapes: one entry per missing, surplus or misshapen tensor."""
    problems = [f"missing {n}" for n in expected if n not in tensors] + [f"surplus {n}" for n in tensors if n not in expected]
    shapes = ((n, list(tensors[n].shape), list(shape)) for n, shape in expected.items() if n in tensors)
    return problems + [f"{n} is {actual}, needs {needed}" for n, actual, needed in shapes if actual != needed]
