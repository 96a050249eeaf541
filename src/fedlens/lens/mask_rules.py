"""What may move: which coordinates a mask may choose, and how it chooses them (TaLoS, Iurada et al. 2025).

A mask is exactly round(density · m) of the m eligible coordinates, chosen by score with ties to the lower index; whole kinds of weight may be
left out of the choice, which changes where a mask lies and not how large it is. The sensitivity
strategies score in rounds: what a round rejects is softened in the forward pass of the next, so that each scores a changed network.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor, nn

from fedlens.errors import UserError, bad_value, unknown
from fedlens.lens.mask import KINDS, PAUSED, Mask, parts
from fedlens.lens.norms import kth_smallest
from fedlens.lens.sensitivity import sensitivity
from fedlens.lens.space import ParamSpace
from fedlens.seeding import torch_rng

Scores = Callable[[Collection[str], Mapping[str, Tensor]], Mapping[str, Tensor]]
# (names, what is still in question: name -> bool) -> sensitivities of these names in the network as it is now: all else softened
WEIGHTS: dict[type[nn.Module], tuple[str, ...]] = {  # what of a module may move
    nn.MultiheadAttention: ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    nn.Linear: ("weight", "bias"),
    nn.modules.conv._ConvNd: ("weight", "bias"),
    nn.LayerNorm: ("weight", "bias"),
}
WRAPPED = re.compile(r"^(_orig_mod\.|module\.)+")  # torch.compile's and DataParallel's names for the model inside
OnRound = Callable[[int, int], None]  # the round, from 1, and how many coordinates it kept


def eligible(model: nn.Module, frozen: Collection[str] = ()) -> dict[str, Tensor]:
    """Weights and biases of every Linear, convolution and LayerNorm of the backbone, the input projections of torch's attention among them; False for
    all else, the classifier `head` and what is `frozen` included.

    The key bias of attention is not eligible: softmax does not see it, so that its gradient is zero and least-sensitive would spend itself there.
    """
    found = {name: torch.zeros(param.shape, dtype=torch.bool) for name, param in model.named_parameters()}
    for path, module in model.named_modules():
        if WRAPPED.sub("", path).split(".")[0] == "head":
            continue
        prefix = f"{path}." if path else ""
        for name in next((names for kind, names in WEIGHTS.items() if isinstance(module, kind)), ()):
            if prefix + name in found and prefix + name not in frozen:
                found[prefix + name].fill_(True)
    for name, mask in found.items():
        kinds = parts(name, tuple(mask.shape))
        if name.endswith("bias") and "key" in kinds:
            mask[kinds["key"]] = False
    return found


def keep_schedule(count: int, density: float, rounds: int) -> list[int]:
    """How many of `count` stay after each round: density^(r/R) of them, at the end round(density · count); at least one."""
    if not 0 < density <= 1:
        raise bad_value("mask.density", density, "0 < density <= 1")
    if rounds < 1:
        raise bad_value("mask.rounds", rounds, ">= 1")
    return [max(1, round(density ** (r / rounds) * count)) for r in range(1, rounds + 1)]


def select(scores: Tensor, among: Tensor, count: int, lowest: bool = True) -> Tensor:
    """Exactly `count` entries of `among` with the lowest (or highest) scores, ties to the lower index: bool [P] of scores [P], among [P]."""
    values = scores[among]
    if not 0 <= count <= len(values):
        raise UserError(f"mask: {count} entries asked for among {len(values)}")
    if bool(values.isnan().any()):
        raise UserError("mask: a score is NaN")
    if count == len(values):
        return among.clone()
    chosen = torch.zeros_like(values, dtype=torch.bool)
    if count:
        edge = kth_smallest(values, count if lowest else len(values) - count + 1)  # not torch.quantile: that fails above 2^24 entries
        chosen = values < edge if lowest else values > edge
        chosen[(values == edge).nonzero().squeeze(1)[: count - int(chosen.sum())]] = True
    result = torch.zeros_like(among)
    result[among] = chosen
    return result


def calibrate(
    score: Callable[[Tensor], Tensor],
    eligible: Tensor,
    density: float,
    rounds: int,
    *,
    lowest: bool = True,
    on_round: OnRound | None = None,
) -> Tensor:
    """TaLoS: rounds of `score(active)` [P] and of keeping the lowest; what leaves the active set [P] never returns."""
    active = eligible
    for r, count in enumerate(keep_schedule(int(eligible.sum()), density, rounds), start=1):
        active = select(score(active), active, count, lowest)
        if on_round is not None:
            on_round(r, count)
    return active


@contextmanager
def softened(model: nn.Module, active: Mapping[str, Tensor], eligible: Mapping[str, Tensor], soft: float) -> Iterator[None]:
    """Inside, every eligible weight that is not active is multiplied by `soft`; afterwards the very same bits are back."""
    if not 0 <= soft <= 1:
        raise bad_value("mask.soft", soft, "0 <= soft <= 1")
    params, saved = dict(model.named_parameters()), dict[str, Tensor]()
    try:
        with torch.no_grad():
            for name in active:
                rejected = (eligible[name] & ~active[name]).to(params[name].device)
                if bool(rejected.any()):
                    saved[name] = params[name].detach().clone()
                    params[name].copy_(torch.where(rejected, saved[name] * soft, saved[name]))
        yield
    finally:
        with torch.no_grad():
            for name, before in saved.items():
                params[name].copy_(before)


@dataclass(frozen=True)
class Request:
    """What a strategy is asked for; vectors [P] are on the model's device."""

    model: nn.Module
    space: ParamSpace  # every parameter of the model
    eligible: Tensor  # bool [P]: what may be chosen
    density: float  # of these
    asked: float  # density of all that is eligible
    rounds: int
    soft: float
    seed: int
    score: Scores | None
    like: Mask | None
    on_round: OnRound | None

    @property
    def count(self) -> int:
        return keep_schedule(int(self.eligible.sum()), self.density, 1)[0]

    def noise(self) -> Tensor:
        """Drawn on the CPU, so that every device gives the same mask."""
        return torch.rand(self.space.size, generator=torch_rng(self.seed, "mask")).to(self.eligible.device)

    def magnitude(self) -> Tensor:
        return _finite(self.space.read(self.model).abs(), "weight")

    def sensitivities(self, active: Tensor) -> Tensor:
        """Of the network whose rejected weights are softened; tensors without active coordinates are not asked for."""
        if self.score is None:
            raise UserError("mask.strategy: a sensitivity strategy needs images to score on")
        masks = self.space.views(active)
        names = [name for name, mask in masks.items() if bool(mask.any())]
        with softened(self.model, masks, self.space.views(self.eligible), self.soft):
            found = self.score(names, masks)
        for name in names:
            if name not in found or tuple(found[name].shape) != self.space.shapes[name]:
                raise UserError(f"mask: the scores lack {name}, or have another shape than the parameter's {list(self.space.shapes[name])}")
        scores = torch.zeros(self.space.size, dtype=found[names[0]].dtype, device=active.device)
        views = self.space.views(scores)
        for name in names:
            views[name].copy_(found[name])
        return _finite(scores, "sensitivity")

    def in_rounds(self, lowest: bool) -> Tensor:
        return calibrate(self.sensitivities, self.eligible, self.density, self.rounds, lowest=lowest, on_round=self.on_round)


def _finite(scores: Tensor, what: str) -> Tensor:
    if not bool(scores.isfinite().all()):
        raise UserError(f"mask: a {what} of the model is not finite, so that coordinates cannot be ranked")
    return scores


def least_sensitive(request: Request) -> Tensor:
    """the weights that the output depends on least, in rounds (TaLoS)"""
    return request.in_rounds(lowest=True)


def most_sensitive(request: Request) -> Tensor:
    """the weights that the output depends on most, in rounds"""
    return request.in_rounds(lowest=False)


def lowest_magnitude(request: Request) -> Tensor:
    """the weights nearest to zero"""
    return select(request.magnitude(), request.eligible, request.count)


def highest_magnitude(request: Request) -> Tensor:
    """the weights farthest from zero"""
    return select(request.magnitude(), request.eligible, request.count, lowest=False)


def random(request: Request) -> Tensor:
    """weights at random"""
    return select(request.noise(), request.eligible, request.count)


def qk_only(request: Request) -> Tensor:
    """weights at random among attention's queries and keys: a control, for least_sensitive favours those"""
    within = of_kinds(request.space, ("query", "key")).to(request.eligible.device) & request.eligible
    most, total = int(within.sum()), int(request.eligible.sum())
    if not most:
        raise UserError(
            "mask.strategy: 'qk_only' given, but there is nothing to choose from in tensors named …qkv.weight, …query.weight or …key.weight"
        )
    if request.count > most:
        bound = floor(1e4 * most / total) / 1e4
        raise bad_value("mask.density", request.asked, f"at most {bound} for qk_only: {most:,} of {total:,} eligible are queries and keys")
    return select(request.noise(), within, request.count)


def of_kinds(space: ParamSpace, kinds: Collection[str]) -> Tensor:
    """bool [P]: the coordinates of these kinds of weight."""
    found = torch.zeros(space.size, dtype=torch.bool)
    for name, view in space.views(found).items():
        for kind, rows in parts(name, space.shapes[name]).items():
            if kind in kinds:
                view[rows] = True
    return found


def random_layerwise(request: Request) -> Tensor:
    """weights at random, in every tensor as many as another mask has there (by default least_sensitive's): a control"""
    space, like = request.space, request.like
    if like is None:
        pattern = least_sensitive(request)
    elif like.space.shapes != space.shapes:
        raise UserError("mask.like: the mask given is of another model: its names or shapes differ")
    elif like.active != request.count:
        raise bad_value("mask.density", request.asked, f"that of the mask given as `like`, {like.density:.6g}: {like.active:,} coordinates")
    else:
        pattern = space.flatten(like.as_dict())
    active = torch.zeros_like(request.eligible)
    views = (space.views(vector) for vector in (active, request.noise(), request.eligible, pattern))
    for chosen, noise, among, like_it in zip(*(view.values() for view in views), strict=True):
        chosen.copy_(select(noise.flatten(), among.flatten(), int(like_it.sum())).view_as(chosen))
    return active


STRATEGIES: dict[str, Callable[[Request], Tensor]] = {
    strategy.__name__: strategy
    for strategy in (least_sensitive, most_sensitive, lowest_magnitude, highest_magnitude, random, qk_only, random_layerwise)
}


def build_mask(
    model: nn.Module,
    strategy: str,
    density: float,
    *,
    rounds: int = 4,
    soft: float = 0.01,
    seed: int = 0,
    score: Scores | None = None,
    like: Mask | None = None,
    on_round: OnRound | None = None,
    without: Collection[str] = (),
    frozen: Collection[str] = (),
) -> Mask:
    """A mask of exactly round(density · m) of the model's m eligible coordinates, naming every parameter, on the CPU.

    frozen: parameters that are not to move at all, and so not eligible. without: kinds of weight (bitmap.KINDS) that are not chosen; m counts them all the same, so that masks with and without them are as large.
    score(names, active): the sensitivities of the model as it is at the call, softened; asked by the sensitivity strategies, once a round.
    """
    if strategy not in STRATEGIES:
        raise unknown("mask.strategy", strategy, STRATEGIES)
    allowed = eligible(model, frozen)
    if not any(bool(mask.any()) for mask in allowed.values()):
        raise UserError(
            "mask: the model has no Linear, convolution or LayerNorm besides its `head` that is not frozen: nothing is eligible"
        )
    space = ParamSpace({name: mask.shape for name, mask in allowed.items()})
    device = next(model.parameters()).device
    keep_schedule(1, density, rounds)  # refuses what is out of range, for every strategy alike
    among, asked = space.flatten(allowed), density
    if without:
        for kind in without:
            if kind not in KINDS:
                raise unknown("mask.without", kind, KINDS)
        wanted = keep_schedule(int(among.sum()), density, 1)[0]
        among &= ~of_kinds(space, without)
        if wanted > int(among.sum()):
            raise bad_value(
                "mask.density", density, f"at most {int(among.sum()):,} coordinates without {', '.join(without)}, not {wanted:,}"
            )
        density = wanted / int(among.sum())
    request = Request(model, space, among.to(device), density, asked, rounds, soft, seed, score, like, on_round)
    chosen = STRATEGIES[strategy](request)
    found = (
        (int(chosen.sum()), int((chosen & ~request.eligible).sum())) if chosen.dtype == torch.bool and chosen.shape == among.shape else None
    )
    if found != (request.count, 0):  # a rule of one's own is found out here, not in a table beside masks of another size
        given = f"{chosen.dtype} {list(chosen.shape)}" if found is None else f"{found[0]:,} coordinates, {found[1]:,} of them not eligible,"
        raise UserError(
            f"mask.strategy: {strategy!r} gave {given} allowed is bool [{space.size}] with exactly {request.count:,} that are eligible"
        )
    return Mask(space.views(chosen.cpu()), allowed)


def calibrate_mask(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    strategy: str = "least_sensitive",
    density: float = 0.1,
    rounds: int = 4,
    soft: float = 0.01,
    labels_from: str = "model",
    score: str = "log_prob",
    seed: int = 0,
    like: Mask | None = None,
    without: Collection[str] = (),
    chunk: int | None = None,
) -> Mask:
    """A mask calibrated on these images, in one place; labels_from, score and chunk are those of `sensitivity`.

    What is frozen (requires_grad) has no part in it, unless all is."""

    def scores(names: Collection[str], active: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return sensitivity(model, images, labels, labels_from=labels_from, score=score, seed=seed, names=names, chunk=chunk)

    still = [name for name, param in model.named_parameters() if not param.requires_grad and not getattr(param, PAUSED, False)]
    still = still if any(bool(mask.any()) for mask in eligible(model, still).values()) else []
    return build_mask(model, strategy, density, rounds=rounds, soft=soft, seed=seed, score=scores, like=like, without=without, frozen=still)


__all__ = ["STRATEGIES", "Mask", "build_mask", "calibrate", "calibrate_mask", "eligible", "keep_schedule", "select", "softened"]
