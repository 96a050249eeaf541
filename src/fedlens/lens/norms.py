"""Norms and order statistics of long vectors. On a CPU torch adds twenty million squares in single precision and is 0.1 % short, for absolute
values 3 %; these can be relied on."""

import math

import torch
from torch import Tensor

ROW = 4096  # coordinates that are added in single precision; their sums are added in double


def l1(vector: Tensor) -> float:
    """Σ |v_i|."""
    return _powers(vector, 1)


def l2(vector: Tensor) -> float:
    """‖v‖."""
    return math.sqrt(squared(vector))


def squared(vector: Tensor) -> float:
    """‖v‖²."""
    return _powers(vector, 2)


def row_norms(rows: Tensor) -> Tensor:
    """‖v‖ of each row [..., size] -> [..., 1], in tensors alone, so that it can be compiled."""
    if rows.device.type == "cuda":  # a GPU adds in a tree
        norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return norms
    whole = rows.shape[-1] // ROW * ROW
    parts = torch.linalg.vector_norm(rows[..., :whole].reshape(*rows.shape[:-1], whole // ROW, ROW), dim=-1)
    rest = torch.linalg.vector_norm(rows[..., whole:], dim=-1, keepdim=True)
    norms = torch.linalg.vector_norm(torch.cat([parts, rest], -1).double(), dim=-1, keepdim=True)
    return norms.to(rows.dtype)


def kth_smallest(values: Tensor, k: int) -> Tensor:
    """The k-th smallest of each row [..., size] -> [..., 1], k from 1. On a GPU by sorting, which uses all of it: `kthvalue` gives
    a row to one block of threads. Both have the same bits."""
    if values.device.type == "cuda":
        return values.sort(dim=-1).values[..., k - 1 : k]
    return values.kthvalue(k, dim=-1, keepdim=True).values


def _powers(vector: Tensor, p: int) -> float:
    flat = vector.flatten()
    whole = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), p, dim=1)
    rest = torch.linalg.vector_norm(flat[whole:], p)
    return float(torch.cat([rows, rest[None]]).cpu().double().pow(p).sum())
