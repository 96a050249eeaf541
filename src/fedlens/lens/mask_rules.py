"""Mask rules: which coordinates of a model train, chosen before training (TaLoS, Iurada et al. 2025).

A mask has exactly round(density · m) of the m eligible coordinates, chosen by score with ties to the lower index. Excluding kinds of weight
changes where a mask lies, not its size. Sensitivity rules score in rounds: weights rejected in one round are softened in the next.
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
from fedlens.lens.norms import extremes
from fedlens.lens.sensitivity import sensitivity
from fedlens.lens.space import ParamSpace
from fedlens.registry import Registry
from fedlens.seeding import torch_rng

# (names, active coordinates by name) -> sensitivities of these names in the model as it is at the call, softened
Scores = Callable[[Collection[str], Mapping[str, Tensor]], Mapping[str, Tensor]]
WEIGHTS: dict[type[nn.Module], tuple[str, ...]] = {  # module type -> its eligible parameters
    nn.MultiheadAttention: ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    nn.Linear: ("weight", "bias"),
    nn.modules.conv._ConvNd: ("weight", "bias"),
    nn.LayerNorm: ("weight", "bias"),
}
WRAPPED = re.compile(r"^(_orig_mod\.|module\.)+")  # prefixes that torch.compile and DataParallel add
OnRound = Callable[[int, int], None]  # (round from 1, active coordinates after it)


def eligible(model: nn.Module, frozen: Collection[str] = ()) -> dict[str, Tensor]:
    """Return name -> bool: True for weights and biases of the backbone's Linear, convolution, LayerNorm and torch attention layers.

    False elsewhere, in the classifier `head` and in `frozen`. Attention's key bias is excluded: softmax ignores it, its gradient is zero.
    """
    masks = {name: torch.zeros(param.shape, dtype=torch.bool) for name, param in model.named_parameters()}
    for path, module in model.named_modules():
        if WRAPPED.sub("", path).split(".")[0] != "head":
            names = next((names for kind, names in WEIGHTS.items() if isinstance(module, kind)), ())
            for name in {f"{path}.{name}".removeprefix(".") for name in names} & masks.keys() - set(frozen):
                masks[name].fill_(True)
    for name, mask in masks.items():
        kinds = parts(name, tuple(mask.shape))
        if name.endswith("bias") and "key" in kinds:
            mask[kinds["key"]] = False
    return masks


def keep_schedule(count: int, density: float, rounds: int) -> list[int]:
    """Return how many of `count` coordinates stay active after each round r of R: round(density^(r/R) · count), at least one."""
    if not 0 < density <= 1:
        raise bad_value("mask.density", density, "in (0, 1]")
    if rounds < 1:
        raise bad_value("mask.rounds", rounds, ">= 1")
    return [max(1, round(density ** (r / rounds) * count)) for r in range(1, rounds + 1)]


def select(scores: Tensor, among: Tensor, count: int, lowest: bool = True) -> Tensor:
    """Return bool [P]: exactly `count` entries of `among` [P] with the lowest (or highest) scores [P], ties to the lower index."""
    values = scores[among]
    if not 0 <= count <= len(values):
        raise UserError(f"mask: cannot select {count} of {len(values)} coordinates.")
    if bool(values.isnan().any()):
        raise UserError("mask: a score is NaN.")
    result = torch.zeros_like(among)
    result[among] = extremes(values, count, lowest)
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
    """Select in rounds of `score(active)` [P], as TaLoS does; a coordinate that leaves the active set [P] never returns."""
    active = eligible
    for r, count in enumerate(keep_schedule(int(eligible.sum()), density, rounds), start=1):
        active = select(score(active), active, count, lowest)
        if on_round is not None:
            on_round(r, count)
    return active


@contextmanager
def softened(model: nn.Module, active: Mapping[str, Tensor], eligible: Mapping[str, Tensor], soft: float) -> Iterator[None]:
    """Multiply every eligible weight that is not active by `soft` inside the context; restore the same bits afterwards."""
    if not 0 <= soft <= 1:
        raise bad_value("mask.soft", soft, "in [0, 1]")
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
    """The input of a mask rule; vectors [P] are on the model's device."""

    model: nn.Module
    space: ParamSpace  # every parameter of the model
    eligible: Tensor  # bool [P]: coordinates that may be chosen
    density: float  # fraction of `eligible` to choose
    configured_density: float  # mask.density: fraction of all eligible coordinates, excluded kinds included
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
        """Return uniform numbers [P], drawn on the CPU so that every device gives the same mask."""
        return torch.rand(self.space.size, generator=torch_rng(self.seed, "mask")).to(self.eligible.device)

    def magnitude(self) -> Tensor:
        return _finite(self.space.read(self.model).abs(), "weight")

    def sensitivities(self, active: Tensor) -> Tensor:
        """Return the sensitivities [P] of the model with rejected weights softened; 0 in tensors without active coordinates."""
        if self.score is None:
            raise UserError("mask.strategy: a sensitivity strategy needs images to score on.")
        masks = self.space.views(active)
        names = [name for name, mask in masks.items() if bool(mask.any())]
        with softened(self.model, masks, self.space.views(self.eligible), self.soft):
            by_name = self.score(names, masks)
        for name in names:
            if name not in by_name or tuple(by_name[name].shape) != self.space.shapes[name]:
                raise UserError(
                    f"mask: the scores lack {name}, or have another shape than the parameter's {list(self.space.shapes[name])}."
                )
        scores = torch.zeros(self.space.size, dtype=by_name[names[0]].dtype, device=active.device)
        views = self.space.views(scores)
        for name in names:
            views[name].copy_(by_name[name])
        return _finite(scores, "sensitivity")

    def in_rounds(self, lowest: bool) -> Tensor:
        """Calibrate by sensitivity in rounds."""
        return calibrate(self.sensitivities, self.eligible, self.density, self.rounds, lowest=lowest, on_round=self.on_round)


def _finite(scores: Tensor, quantity: str) -> Tensor:
    if not bool(scores.isfinite().all()):
        raise UserError(f"mask: a {quantity} of the model is not finite, so that coordinates cannot be ranked.")
    return scores


def least_sensitive(request: Request) -> Tensor:
    """Choose the weights that the output depends on least, in rounds (TaLoS)."""
    return request.in_rounds(lowest=True)


def most_sensitive(request: Request) -> Tensor:
    """Choose the weights that the output depends on most, in rounds."""
    return request.in_rounds(lowest=False)


def lowest_magnitude(request: Request) -> Tensor:
    """Choose the weights nearest to zero."""
    return select(request.magnitude(), request.eligible, request.count)


def highest_magnitude(request: Request) -> Tensor:
    """Choose the weights farthest from zero."""
    return select(request.magnitude(), request.eligible, request.count, lowest=False)


def random(request: Request) -> Tensor:
    """Choose weights at random."""
    return select(request.noise(), request.eligible, request.count)


def qk_only(request: Request) -> Tensor:
    """Choose at random among attention's queries and keys: a control, since least_sensitive favours those."""
    within = of_kinds(request.space, ("query", "key")).to(request.eligible.device) & request.eligible
    if not bool(within.any()):
        raise UserError(
            "mask.strategy: qk_only has nothing to choose from: no eligible tensor is …qkv.weight, …query.weight or …key.weight."
        )
    _check_room(within, request.eligible, request.count, request.configured_density, "for qk_only")
    return select(request.noise(), within, request.count)


def of_kinds(space: ParamSpace, kinds: Collection[str]) -> Tensor:
    """Return bool [P]: the coordinates of these kinds of weight."""
    mask = torch.zeros(space.size, dtype=torch.bool)
    for name, view in space.views(mask).items():
        for kind, rows in parts(name, space.shapes[name]).items():
            if kind in kinds:
                view[rows] = True
    return mask


def random_layerwise(request: Request) -> Tensor:
    """Choose at random, per tensor as many as another mask has there (mask.like, by default least_sensitive's): a control."""
    space, like = request.space, request.like
    if like is None:
        pattern = least_sensitive(request)
    elif like.space.shapes != space.shapes:
        raise UserError("mask.like: the mask belongs to another model: its names or shapes differ.")
    elif like.active != request.count:
        expected = f"equal to the density of mask.like ({like.density:.6g}, {like.active:,} coordinates)"
        raise bad_value("mask.density", request.configured_density, expected)
    else:
        pattern = space.flatten(like.as_dict())
    active = torch.zeros_like(request.eligible)
    views = (space.views(vector).values() for vector in (active, request.noise(), request.eligible, pattern))
    for chosen, noise, among, reference in zip(*views, strict=True):
        chosen.copy_(select(noise.flatten(), among.flatten(), int(reference.sum())).view_as(chosen))
    return active


STRATEGIES: Registry[Callable[[Request], Tensor]] = Registry(
    "mask rule", least_sensitive, most_sensitive, lowest_magnitude, highest_magnitude, random, qk_only, random_layerwise
)


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
    """Return a mask, on the CPU, of exactly round(density · m) of the model's m eligible coordinates; it names every parameter.

    frozen: parameters that are not eligible. without: kinds of weight (mask.KINDS) that are not chosen but count in m.
    score: called once per round by the sensitivity strategies, on the softened model.
    """
    rule = STRATEGIES.choose(strategy, "mask.strategy")
    masks = eligible(model, frozen)
    if not any(bool(mask.any()) for mask in masks.values()):
        raise UserError("mask: nothing is eligible: besides its `head`, the model has no Linear, convolution or LayerNorm that trains.")
    space = ParamSpace({name: mask.shape for name, mask in masks.items()})
    keep_schedule(1, density, rounds)  # checks both for every strategy
    among, share = _exclude(space, space.flatten(masks), density, without)
    among = among.to(next(model.parameters()).device)
    request = Request(model, space, among, share, density, rounds, soft, seed, score, like, on_round)
    chosen = rule(request)
    fits = chosen.dtype == torch.bool and chosen.shape == among.shape
    active, outside = (int(chosen.sum()), int((chosen & ~among).sum())) if fits else (-1, 0)
    if (active, outside) != (request.count, 0):  # a registered rule must not give masks of another size
        result = f"{active:,} coordinates, {outside:,} of them not eligible" if fits else f"{chosen.dtype} {list(chosen.shape)}"
        raise UserError(
            f"mask.strategy: {strategy!r} must return bool [{space.size}] with exactly {request.count:,} eligible coordinates, got {result}."
        )
    return Mask(space.views(chosen.cpu()), masks)


def _exclude(space: ParamSpace, eligible: Tensor, density: float, without: Collection[str]) -> tuple[Tensor, float]:
    """Return the eligible coordinates [P] outside these kinds, and the density among them that gives as many active coordinates."""
    if not without:
        return eligible, density
    for kind in without:
        if kind not in KINDS:
            raise unknown("mask.without", kind, KINDS)
    count = keep_schedule(int(eligible.sum()), density, 1)[0]
    among = eligible & ~of_kinds(space, without)
    _check_room(among, eligible, count, density, f"without {', '.join(without)}")
    return among, count / int(among.sum())


def _check_room(among: Tensor, eligible: Tensor, count: int, density: float, restriction: str) -> None:
    """Raise if a restriction leaves fewer than `count` of the eligible coordinates."""
    left, total = int(among.sum()), int(eligible.sum())
    if count > left:
        bound = floor(1e4 * left / total) / 1e4
        raise bad_value("mask.density", density, f"at most {bound} {restriction} ({left:,} of {total:,} eligible coordinates)")


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
    """Return a mask calibrated on images, with the options of `sensitivity`. Frozen parameters are not eligible unless all are frozen."""

    def scores(names: Collection[str], active: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return sensitivity(model, images, labels, labels_from=labels_from, score=score, seed=seed, names=names, chunk=chunk)

    frozen = [name for name, param in model.named_parameters() if not param.requires_grad and not getattr(param, PAUSED, False)]
    frozen = frozen if any(bool(mask.any()) for mask in eligible(model, frozen).values()) else []
    return build_mask(
        model, strategy, density, rounds=rounds, soft=soft, seed=seed, score=scores, like=like, without=without, frozen=frozen
    )


SCORED = ("least_sensitive", "most_sensitive", "random_layerwise")  # rules that need samples to score
__all__ = ["SCORED", "STRATEGIES", "Mask", "build_mask", "calibrate", "calibrate_mask", "eligible", "keep_schedule", "select", "softened"]
