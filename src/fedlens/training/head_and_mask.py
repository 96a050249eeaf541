"""Step 1 of sparse fine-tuning (TaLoS, Iurada et al. 2025): which coordinates may move, decided before training, in one place or federated.

Sensitivities are sums over samples, so those of the clients add up to the centralised ones: a client sends its sum over its own
data for the coordinates that are still in question, and gets back one bit a coordinate. Step 0, the head, is in models/heads.py.
"""

import inspect
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlens.data.partition import Index
from fedlens.errors import UserError
from fedlens.lens.mask_rules import STRATEGIES, Mask, build_mask
from fedlens.lens.sensitivity import sensitivity
from fedlens.lens.space import ParamSpace
from fedlens.runs.cache import Form, digest, remembered, split_digest
from fedlens.seeding import torch_rng
from fedlens.tasks.image import ImageBank
from fedlens.training.bench import Bench

if TYPE_CHECKING:
    from fedlens.training.clients import Clients

log = logging.getLogger("fedlens")
BYTES = 4  # a number on the wire is float32
BATCH = 512  # images made ready at a time; how many gradients are held at once is the lens's affair


@dataclass
class Scorer:
    """Sensitivities of the bench's model, as it stands, on images of one of its splits."""

    bench: Bench
    bank: ImageBank

    def __call__(self, index: Tensor, names: Collection[str]) -> dict[str, Tensor]:
        """The sum over these samples. The label drawn for a sample is keyed by its position, whoever holds it."""
        c, bench = self.bench.config.mask, self.bench
        uniform = torch.rand(len(self.bank), generator=torch_rng(bench.config.seed, "labels")).to(bench.device)
        total: dict[str, Tensor] = {}
        for part in torch.split(index, BATCH):
            images, labels = self.bank.batch(part)
            with bench.precision.autocast():
                found = sensitivity(
                    bench.model,
                    bench.pipeline(images),
                    labels,
                    labels_from=c.labels_from,
                    score=c.score,
                    names=names,
                    uniform=uniform[part.to(bench.device)],
                )
            total = {name: found[name] + total[name] if total else found[name] for name in names}
        return total


def evenly(total: int, count: int | None) -> Tensor:
    """Up to `count` positions of `total` (all: None) at equal distances: images may lie in order of their classes."""
    count = total if count is None else min(total, count)
    return torch.arange(count) * total // max(1, count)


def some_samples(shard: Index, samples: int | None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(shard))[evenly(len(shard), samples)]


def make_mask(bench: Bench, clients: "Clients | None" = None) -> tuple[Mask, dict[str, Any]]:
    """`calibrated_mask`, or what it gave before for the same model, data and configuration: runs that differ in their rate share it."""
    c = bench.config.mask
    if bench.config.head == "linear" and not getattr(bench.model, "fitted_head", False):
        raise UserError(
            "head: linear given, allowed under a mask is ridge, or weights that bring a head: a mask leaves the head as it is, at random"
        )
    held = clients.fingerprint() if c.scope == "federated" and clients is not None else split_digest(bench.val.split)
    if held is None or c.path is not None:
        return calibrated_mask(bench, clients)
    like = None if c.like is None else digest(Mask.load(c.like).vector)
    settings = (
        c,
        _source(STRATEGIES[str(c.strategy)]),
        like,
        frozen(bench.model),
        bench.config.seed,
        bench.pipeline,
        bench.precision,
        torch.get_num_threads(),
        str(bench.device),
    )
    return remembered(digest(bench.model.state_dict(), held, *settings), lambda: calibrated_mask(bench, clients), MASKS)


def _source(rule: Callable[..., Any]) -> str:
    """A rule that was written anew under its old name is another rule."""
    try:
        return inspect.getsource(rule)
    except (OSError, TypeError):  # typed into an interpreter, or not a Python function
        return repr(rule)


def _write_mask(found: tuple[Mask, dict[str, Any]], folder: Path) -> None:
    mask, facts = found
    mask.save(folder / "mask.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts))


def _read_mask(folder: Path) -> tuple[Mask, dict[str, Any]]:
    return Mask.load(folder / "mask.safetensors"), json.loads((folder / "facts.json").read_text())


MASKS = Form(_write_mask, _read_mask)


def calibrated_mask(bench: Bench, clients: "Clients | None" = None) -> tuple[Mask, dict[str, Any]]:
    """The mask that the configuration asks for, and what there is to say about it, the bytes that its calibration cost included.

    scope central: scores on the validation set. scope federated: every client scores on its own data, the server adds.
    """
    c, began, asked = bench.config.mask, time.monotonic(), 0
    federated = c.scope == "federated" and clients is not None
    before = (clients.traffic.up, clients.traffic.down) if clients else (0, 0)
    if c.path is not None:
        mask = Mask.load(c.path)
    else:

        def scores(names: Collection[str], active: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            nonlocal asked
            asked += 1
            if not federated:
                return Scorer(bench, bench.val)(evenly(len(bench.val), c.samples), names)
            assert clients is not None
            total: dict[str, Tensor] = {}
            for found in clients.sensitivities(names, active):
                total = {name: f + total[name] for name, f in found.items()} if total else found
            return total

        mask = build_mask(
            bench.model,
            str(c.strategy),
            c.density,
            rounds=c.rounds,
            soft=c.soft,
            seed=bench.config.seed,
            score=scores,
            like=None if c.like is None else Mask.load(c.like),
            on_round=lambda r, kept: log.info("mask: round %d keeps %s coordinates", r, f"{kept:,}"),
            without=c.without,
            frozen=frozen(bench.model),
        )
    after = (clients.traffic.up, clients.traffic.down) if clients else (0, 0)
    seconds = time.monotonic() - began
    log.info("mask: %s, %s of %s coordinates (%.1f s)", c.path or c.strategy, f"{mask.active:,}", f"{mask.eligible_count:,}", seconds)
    facts = {
        "strategy": c.strategy,
        "path": c.path,
        "scope": c.scope,
        "without": list(c.without),
        "density": mask.density,
        "active": mask.active,
        "eligible": mask.eligible_count,
        "scorings": asked,
        "seconds": seconds,
        "bytes_up": after[0] - before[0],
        "bytes_down": after[1] - before[1],
        "composition": mask.composition(),
        "by_layer": mask.by_layer(),
    }
    return mask, facts


def masked_space(bench: Bench, mask: Mask | None) -> ParamSpace:
    """The space that training moves in. Tensors without active coordinates are frozen: no gradient is computed for them.

    Compiled blocks share their code, so there a kind of tensor is frozen if it has no active coordinate in any block.
    """
    if mask is None:
        return ParamSpace.of(bench.model)
    params, left = dict(bench.model.named_parameters()), frozen(bench.model)
    mask.freeze(bench.model)
    moving = {_kind(name) for name, param in params.items() if param.requires_grad}
    if not moving:
        raise UserError("mask: no coordinate that it has active is in a parameter that trains (model.freeze_blocks, model.freeze_backbone)")
    if bench.config.train.compile:
        for name, param in params.items():
            param.requires_grad_(_kind(name) in moving and name not in left)
    return ParamSpace.of(bench.model, mask.as_dict())


def frozen(model: nn.Module) -> list[str]:
    """What the configuration has frozen, before a mask freezes more."""
    return [name for name, param in model.named_parameters() if not param.requires_grad]


def _kind(name: str) -> str:
    """blocks.3.norm1.bias -> blocks.*.norm1.bias"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
