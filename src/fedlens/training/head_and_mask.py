"""Step 1 of sparse fine-tuning (TaLoS, Iurada et al. 2025): the mask of coordinates that train, centralised or federated.

Sensitivities are sums over samples, so those of the clients add up to the centralised ones. A client sends its sum over its own
data for the coordinates that are still active, and receives one bit per coordinate. Step 0, the head, is in models/heads.py.
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
from fedlens.errors import UserError, bad_value
from fedlens.lens.mask_rules import SCORED, STRATEGIES, Mask, build_mask
from fedlens.lens.sensitivity import sensitivity
from fedlens.lens.space import ParamSpace
from fedlens.models.heads import choose_ridge, ridge_statistics
from fedlens.runs.cache import Codec, cached, digest, split_digest
from fedlens.seeding import torch_rng
from fedlens.tasks import Samples
from fedlens.training.bench import Bench

if TYPE_CHECKING:
    from fedlens.training.clients import Clients

log = logging.getLogger("fedlens")
Fitted = tuple[Mask | None, dict[str, Any]]
BYTES = 4  # per number on the wire: float32
BATCH = 512  # samples prepared at once; sensitivity() itself limits how many gradients it holds


@dataclass
class Scorer:
    """Sensitivities of the bench's model, in its current state, on samples of a split."""

    bench: Bench
    split: Samples

    def __call__(self, index: Tensor, names: Collection[str]) -> dict[str, Tensor]:
        """Return the sum over these samples. The label drawn for a sample depends on its position only, not on its client."""
        c, bench = self.bench.config.mask, self.bench
        uniform = torch.rand(len(self.split), generator=torch_rng(bench.config.seed, "labels")).to(bench.device)
        total: dict[str, Tensor] = {}
        for part in torch.split(index, BATCH):
            inputs, labels = bench.task.batch(self.split, part)
            with bench.precision.autocast():
                scores = sensitivity(
                    bench.model,
                    inputs,
                    labels,
                    labels_from=c.labels_from,
                    score=c.score,
                    names=names,
                    uniform=uniform[part.to(bench.device)],
                )
            total = {name: scores[name] + total[name] if total else scores[name] for name in names}
        return total


def evenly(total: int, count: int | None) -> Tensor:
    """Return up to `count` of `total` positions (None: all) at equal distances, since samples may be sorted by class."""
    count = total if count is None else min(total, count)
    return torch.arange(count) * total // max(1, count)


def some_samples(shard: Index, samples: int | None) -> Tensor:
    """Return up to `samples` positions of a client's data."""
    return torch.from_numpy(np.ascontiguousarray(shard))[evenly(len(shard), samples)]


def make_mask(bench: Bench, clients: "Clients | None" = None) -> tuple[Mask, dict[str, Any]]:
    """Return `calibrated_mask`, cached by model, data and configuration: runs that differ only in their learning rate share it."""
    c = bench.config.mask
    if bench.config.head == "linear" and not getattr(bench.model, "fitted_head", False):
        raise bad_value("head", "linear", "ridge under a mask, unless the weights contain a head: a mask never trains the head")
    if c.scope == "central" and c.path is None and c.strategy in SCORED and not len(bench.val):
        raise UserError("No validation set to score on: set data.val_fraction > 0 or mask.scope=federated.")
    data = clients.fingerprint() if c.scope == "federated" and clients is not None else split_digest(bench.val.split)
    if data is None or c.path is not None:
        return calibrated_mask(bench, clients)
    like = None if c.like is None else digest(Mask.load(c.like).vector)
    rule = (c, _source(STRATEGIES[str(c.strategy)]), like, frozen(bench.model), bench.config.seed)
    machine = (bench.task.key, bench.precision, torch.get_num_threads(), str(bench.device))
    return cached(digest(bench.model.state_dict(), data, *rule, *machine), lambda: calibrated_mask(bench, clients), MASKS)


def _source(rule: Callable[..., Any]) -> str:
    """Return a rule's source, so that a rule changed under its old name misses the cache."""
    try:
        return inspect.getsource(rule)
    except (OSError, TypeError):  # typed into an interpreter, or not a Python function
        return repr(rule)


def _write_mask(result: tuple[Mask, dict[str, Any]], folder: Path) -> None:
    mask, facts = result
    mask.save(folder / "mask.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts))


def _read_mask(folder: Path) -> tuple[Mask, dict[str, Any]]:
    return Mask.load(folder / "mask.safetensors"), json.loads((folder / "facts.json").read_text())


MASKS = Codec(_write_mask, _read_mask)


def sent(clients: "Clients | None", since: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return the bytes so far from and to the clients, or those after an earlier count."""
    return (0, 0) if clients is None else (clients.traffic.up - since[0], clients.traffic.down - since[1])


def calibrated_mask(bench: Bench, clients: "Clients | None" = None) -> tuple[Mask, dict[str, Any]]:
    """Return the configured mask and its facts, including the bytes of its calibration.

    scope=central scores on the validation set; with scope=federated every client scores on its own data and the server adds.
    """
    c, began, before, scorings = bench.config.mask, time.monotonic(), sent(clients), 0
    scoring_clients = clients if c.scope == "federated" else None
    if c.path is not None:
        mask = Mask.load(c.path)
    else:

        def scores(names: Collection[str], active: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            nonlocal scorings
            scorings += 1
            if scoring_clients is None:
                return Scorer(bench, bench.val)(evenly(len(bench.val), c.samples), names)
            total: dict[str, Tensor] = {}
            for sums in scoring_clients.sensitivities(names, active):
                total = {name: each + total[name] for name, each in sums.items()} if total else sums
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
            on_round=lambda r, active: log.info("mask: %s coordinates after round %d", f"{active:,}", r),
            without=c.without,
            frozen=frozen(bench.model),
        )
    (up, down), seconds = sent(clients, since=before), time.monotonic() - began
    log.info("mask: %s, %s of %s coordinates (%.1f s)", c.path or c.strategy, f"{mask.active:,}", f"{mask.eligible_count:,}", seconds)
    facts = {
        "strategy": c.strategy,
        "path": c.path,
        "scope": c.scope,
        "without": list(c.without),
        "density": mask.density,
        "active": mask.active,
        "eligible": mask.eligible_count,
        "scorings": scorings,
        "seconds": seconds,
        "bytes_up": up,
        "bytes_down": down,
        "composition": mask.composition(),
        "by_layer": mask.by_layer(),
    }
    return mask, facts


def masked_space(bench: Bench, mask: Mask | None) -> ParamSpace:
    """Return the space of the parameters that train. Tensors without active coordinates are frozen and get no gradient.

    Compiled blocks share their code: there a tensor is frozen only if it has no active coordinate in any block.
    """
    if mask is None:
        return ParamSpace.of(bench.model)
    params, already_frozen = dict(bench.model.named_parameters()), frozen(bench.model)
    mask.freeze(bench.model)
    moving = {_kind(name) for name, param in params.items() if param.requires_grad}
    if not moving:
        raise UserError("mask: all of its active coordinates are frozen; lower model.freeze_blocks or set model.freeze_backbone=false.")
    if bench.config.train.compile:
        for name, param in params.items():
            param.requires_grad_(_kind(name) in moving and name not in already_frozen)
    return ParamSpace.of(bench.model, mask.as_dict())


def frozen(model: nn.Module) -> list[str]:
    """Return the parameters that the configuration freezes; call it before a mask freezes more."""
    return [name for name, param in model.named_parameters() if not param.requires_grad]


def _kind(name: str) -> str:
    """Return the name without block numbers: blocks.3.norm1.bias -> blocks.*.norm1.bias."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def fit_head_and_mask(bench: Bench, clients: "Clients | None" = None, broadcast: Callable[[Any], Any] = lambda value: value) -> Fitted:
    """Fit the head in closed form, then calibrate the mask, as the configuration asks; with `clients`, from their sums.

    Return the mask (None: dense) and what the summary reports about both.
    """
    ridge = fit_ridge_head(bench, clients) if bench.config.head == "ridge" else None
    if not bench.config.mask.strategy:
        return None, {"ridge": ridge, "mask": None}
    up, down = sent(clients)
    mask, facts = broadcast(make_mask(bench, clients))
    if clients is not None:  # also for a cached mask
        clients.traffic.up, clients.traffic.down = up + facts["bytes_up"], down + facts["bytes_down"]
    return mask, {"ridge": ridge, "mask": facts}


def fit_ridge_head(bench: Bench, clients: "Clients | None") -> dict[str, Any]:
    """Set the closed-form head on the pretrained features (step 0); validation chooses lambda and temperature. Return what the summary reports.

    The clients' sums are additive, so their head equals the centralised one for every split.
    """
    before = sent(clients)
    A = b = None
    if clients is None:
        A, b = ridge_statistics(bench.features(bench.train), bench.train.labels, bench.dataset.num_classes)
    for a_k, b_k in () if clients is None else clients.ridge_sums():
        A, b = (a_k, b_k) if A is None or b is None else (A + a_k, b + b_k)
    if A is None or b is None:
        raise UserError("head: no client sent valid sums for the ridge head.")
    choice = choose_ridge(A, b, bench.features(bench.val), bench.val.labels)
    bench.set_head(choice)
    facts = {"lambda": choice.lam, "temperature": choice.temperature, "val_accuracy": choice.val_accuracy}
    up, down = sent(clients, since=before)
    return facts if clients is None else {**facts, "bytes_up": up, "bytes_down": down}
