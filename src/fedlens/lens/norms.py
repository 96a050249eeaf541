"""Accurate norms and exact selection on long vectors.

On CPU, torch sums in single precision: it loses 0.1 % of twenty million squares, 3 % of absolute values. Here partial sums are doubles.
"""

import math

import torch
from torch import Tensor

ROW = 4096  # coordinates summed in single precision; the sums of rows are added in double


def l1(vector: Tensor) -> float:
    """Return Σ |v_i|."""
    return power_sum(vector, 1)


def l2(vector: Tensor) -> float:
    """Return ‖v‖."""
    return math.sqrt(power_sum(vector, 2))


def power_sum(vector: Tensor, p: int) -> float:
    """Return Σ |v_i|^p."""
    flat = vector.flatten()
    whole = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), p, dim=1)
    rest = torch.linalg.vector_norm(flat[whole:], p)
    return float(torch.cat([rows, rest[None]]).cpu().double().pow(p).sum())


def row_norms(rows: Tensor) -> Tensor:
    """Return ‖v‖ of each row, [..., size] -> [..., 1], using tensors only so that it can be compiled."""
    if rows.device.type == "cuda":  # a GPU sums in a tree, which is accurate enough
        norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return norms
    whole = rows.shape[-1] // ROW * ROW
    parts = torch.linalg.vector_norm(rows[..., :whole].reshape(*rows.shape[:-1], whole // ROW, ROW), dim=-1)
    rest = torch.linalg.vector_norm(rows[..., whole:], dim=-1, keepdim=True)
    norms = torch.linalg.vector_norm(torch.cat([parts, rest], -1).double(), dim=-1, keepdim=True)
    return norms.to(rows.dtype)


def kth_smallest(values: Tensor, k: int) -> Tensor:
    """Return the k-th smallest value of each row, [..., size] -> [..., 1], k from 1."""
    if values.device.type == "cuda":  # same bits: sorting uses the whole GPU, `kthvalue` one block of threads per row
        return values.sort(dim=-1).values[..., k - 1 : k]
    return values.kthvalue(k, dim=-1, keepdim=True).values


def extremes(values: Tensor, count: int, lowest: bool = False) -> Tensor:
    """Return a mask of exactly the `count` highest (or lowest) values of each row [..., size]; ties go to the lower index."""
    size = values.shape[-1]
    if count == 0 or count == size:
        return torch.full_like(values, count > 0, dtype=torch.bool)
    threshold = kth_smallest(values, count if lowest else size - count + 1)  # torch.quantile fails above 2^24 entries
    beyond, level = values < threshold if lowest else values > threshold, values == threshold
    missing = count - beyond.sum(-1, keepdim=True)  # [..., 1]: entries at the threshold to include
    if not torch.equal(level.sum(-1, keepdim=True), missing):
        level &= level.cumsum(-1, dtype=torch.int32) <= missing
    return beyond | level
