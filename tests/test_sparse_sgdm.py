"""SparseSGDM: torch's SGD where the mask is one, nothing at all where it is zero, and no way to train by accident."""

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from fedlens.errors import UserError
from fedlens.optim import sparse_sgdm
from fedlens.optim.sparse_sgdm import SparseSGDM

SHAPES = [(), (1,), (7,), (3, 5), (17, 13), (2, 3, 5, 7), (1031,)]
OPTIONS = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay}
    for momentum, dampening, nesterov, decay in product((0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.1))
    if not nesterov or (momentum > 0 and dampening == 0)  # what torch allows
]
ALL_ON = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}


@dataclass
class Named:
    """What our Mask looks like from here."""

    masks: dict[str, Tensor]

    def as_dict(self) -> Mapping[str, Tensor]:
        return self.masks


def tensors(shapes: list[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]


def bernoulli(params: list[Tensor], density: float, seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(p.shape, generator=g) < density for p in params]


def ones(params: list[Tensor]) -> list[Tensor]:
    return [torch.ones(p.shape, dtype=torch.bool) for p in params]


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 2) -> None:
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                grad = torch.randn(p.shape, generator=g)
                p.grad = grad if p.requires_grad else None
        optimizer.step()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def bits(x: Tensor) -> Tensor:
    return x.detach().clone().view(torch.int32)  # tells 0.0 from -0.0, and nan from nan


def masks_of(optimizer: SparseSGDM) -> list[Tensor]:
    """The mask of each parameter, in order."""
    state = optimizer.state_dict()["state"]
    return [state[i]["mask"] for i in range(len(state))]


def velocity(optimizer: SparseSGDM, p: Tensor) -> Tensor:
    """Momentum in the shape of the parameter, however it is held."""
    held, saved = optimizer.state[p]["momentum_buffer"], masks_of(optimizer)
    if held.shape == p.shape:
        return held.clone()
    mask = saved[next(i for i, q in enumerate(q for group in optimizer.param_groups for q in group["params"]) if q is p)]
    return torch.zeros_like(p, requires_grad=False).masked_scatter(mask, held)


# 1. dense


@pytest.mark.parametrize("foreach", [False, None])
@pytest.mark.parametrize("given_masks", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_all_ones_it_is_torch_sgd_bit_for_bit(options: dict[str, Any], given_masks: bool, foreach: bool | None) -> None:
    ours, theirs = tensors(), tensors()
    train(SparseSGDM(ours, 0.05, **options, masks=ones(ours) if given_masks else None), 50)
    train(torch.optim.SGD(theirs, 0.05, **options, foreach=foreach), 50)
    assert same(ours, theirs)
    assert not same(ours, tensors())


def test_it_follows_torch_sgd_on_a_model_with_groups_a_scheduler_and_a_closure() -> None:
    def fit(make: Callable[..., torch.optim.Optimizer]) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        x, y = torch.randn(20, 6), torch.arange(20) % 3
        optimizer = make([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3}], 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

        def closure() -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.item()

        losses = []
        for _ in range(10):
            losses.append(optimizer.step(closure))
            scheduler.step()
        return [p.detach() for p in model.parameters()], losses

    (ours, our_losses), (theirs, their_losses) = fit(SparseSGDM), fit(torch.optim.SGD)
    assert same(ours, theirs) and our_losses == their_losses and our_losses[-1] < our_losses[0]


def test_a_group_may_maximize_as_in_torch() -> None:
    ours, theirs = tensors(), tensors()
    train(SparseSGDM([{"params": ours, "maximize": True}], 0.05), 5)
    train(torch.optim.SGD(theirs, 0.05, momentum=0.9, maximize=True), 5)
    assert same(ours, theirs)


# 2. sparse


def dense_oracle(params: list[Tensor], masks: list[Tensor], grads: list[list[Tensor]], lr: float, o: dict[str, Any]) -> list[Tensor]:
    out = []
    for i, (p, mask) in enumerate(zip(params, masks, strict=True)):
        theta, v = p.detach().clone(), None
        for step in grads:
            g = mask * (step[i] + o["weight_decay"] * theta)
            v = g if v is None or not o["momentum"] else o["momentum"] * v + (1 - o["dampening"]) * g  # as torch: no μ, no dampening
            theta = theta - lr * (g + o["momentum"] * v if o["nesterov"] else v)
        out.append(theta)
    return out


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(OPTIONS), st.sampled_from([0.05, 0.2, 0.3, 0.9]), st.integers(0, 10**6))
def test_active_entries_follow_the_formula_and_the_rest_keep_their_bits(options: dict[str, Any], density: float, seed: int) -> None:
    params, before = tensors(seed=seed), tensors(seed=seed)
    masks = bernoulli(params, density, seed + 1)
    g = torch.Generator().manual_seed(seed + 2)
    grads = [[torch.randn(p.shape, generator=g) for p in params] for _ in range(20)]
    optimizer = SparseSGDM(params, 0.05, **options, masks=masks)
    for step in grads:
        for p, grad in zip(params, step, strict=True):
            p.grad = grad.clone()
        optimizer.step()
    for p, old, mask, want in zip(params, before, masks, dense_oracle(before, masks, grads, 0.05, options), strict=True):
        assert torch.allclose(p, want, atol=1e-6)
        assert torch.equal(bits(p)[~mask], bits(old)[~mask])


@pytest.mark.parametrize("density", [0.0, 0.1, 0.6])
def test_masked_out_entries_are_bit_identical_after_200_steps_with_everything_on(density: float) -> None:
    params = tensors()
    with torch.no_grad():
        for p in params:
            p.view(-1)[::2] = -0.0  # a sum with +0.0 would change its sign bit
    before, masks = [p.detach().clone() for p in params], bernoulli(params, density)
    optimizer = SparseSGDM(params, 0.05, **ALL_ON, masks=masks)
    train(optimizer, 200)
    for p, old, mask in zip(params, before, masks, strict=True):
        assert torch.equal(bits(p)[~mask], bits(old)[~mask])
        assert bool((bits(p) != bits(old))[mask].all())
        if mask.any():
            assert not velocity(optimizer, p)[~mask].any()


@pytest.mark.parametrize("density", [0.1, 0.6])
def test_a_gradient_that_is_not_finite_where_the_mask_is_zero_does_no_harm(density: float) -> None:
    p = torch.randn(100, requires_grad=True)
    (mask,) = bernoulli([p], density)
    old, optimizer = p.detach().clone(), SparseSGDM([p], 0.1, **ALL_ON, masks=[mask])
    p.grad = torch.where(mask, 1.0, torch.tensor([float("nan"), float("inf")]).repeat(50))
    assert float(optimizer.clip_grad_norm_(1.0)) == pytest.approx(float(mask.sum()) ** 0.5)
    for _ in range(3):
        optimizer.step()
    assert torch.equal(bits(p)[~mask], bits(old)[~mask])
    assert p.isfinite().all() and velocity(optimizer, p).isfinite().all()


def test_a_channels_last_weight_is_masked_in_its_own_order() -> None:
    plain = torch.randn(4, 8, 3, 3, requires_grad=True)
    last = plain.detach().clone(memory_format=torch.channels_last).requires_grad_()
    masks = bernoulli([plain], 0.1)
    train(SparseSGDM([plain], 0.1, **ALL_ON, masks=masks), 10)
    optimizer = SparseSGDM([last], 0.1, **ALL_ON, masks=masks)
    train(optimizer, 10)
    assert torch.allclose(plain, last, atol=1e-6) and last.is_contiguous(memory_format=torch.channels_last)
    compact = SparseSGDM([plain], 0.1, **ALL_ON, masks=masks)
    compact.load_state_dict(optimizer.state_dict())  # held densely there, by index here
    assert torch.equal(velocity(compact, plain), velocity(optimizer, last))


# 3. which mask belongs to which parameter


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


@pytest.mark.parametrize("form", ["sequence", "tuple", "mapping", "mask", "mapping in order", "mask in order"])
def test_every_form_of_masks_gives_the_same_training(form: str) -> None:
    def masked(form: str) -> list[Tensor]:
        model = net()
        names, params = [n for n, _ in model.named_parameters()], list(model.parameters())
        masks = bernoulli(params, 0.5)
        by_name = dict(zip(names, masks, strict=True))
        shuffled = {"elsewhere": torch.zeros(2), **dict(reversed(by_name.items()))}
        given = {"sequence": masks, "tuple": tuple(masks), "mapping": shuffled, "mask": Named(shuffled)}
        given |= {"mapping in order": by_name, "mask in order": Named(by_name)}
        handed = model.named_parameters() if form in ("mapping", "mask") else params
        train(SparseSGDM(handed, 0.1, masks=given[form]), 5)
        return [p.detach() for p in params]

    assert same(masked(form), masked("sequence"))


def test_names_find_their_masks_across_groups_with_their_own_rates() -> None:
    model = net()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    masks = {n: m for (n, p), m in zip(model.named_parameters(), bernoulli(list(model.parameters()), 0.5), strict=True)}
    named = list(model.named_parameters())
    groups = [{"params": named[2:], "lr": 0.0}, {"params": named[:2]}]
    train(SparseSGDM(groups, 0.1, **ALL_ON, masks=masks), 3)
    for name, p in named:
        moved = p != before[name]
        assert torch.equal(moved, masks[name]) if name.startswith("0.") else not moved.any()


def wrong(**change: Any) -> dict[str, Tensor]:
    good = {n: torch.ones(p.shape, dtype=torch.bool) for n, p in net().named_parameters()}
    return {n: m for n, m in {**good, **{k.replace("_", "."): v for k, v in change.items()}}.items() if m is not None}


BAD_NAMED: list[tuple[Any, str]] = [
    (wrong(**{"1_weight": None}), r"masks\['1.weight'\] must be torch.bool of shape \(3, 4\), got NoneType"),
    (wrong(**{"0_weight": torch.full((4, 5), 0.5)}), r"masks\['0.weight'\] must be torch.bool of shape \(4, 5\), got torch.float32"),
    (wrong(**{"0_weight": torch.full((4, 5), 2, dtype=torch.uint8)}), r"torch.uint8 of shape"),
    (wrong(**{"0_bias": torch.ones(1, dtype=torch.bool)}), r"masks\['0.bias'\] must be torch.bool of shape \(4,\), got .*\(1,\)"),
    (wrong(**{"0_bias": True}), r"masks\['0.bias'\] must be .*, got bool"),
    (Named(wrong(**{"1_bias": None})), r"masks\['1.bias'\] must be .*, got NoneType"),
    ({}, r"masks\['0.weight'\] must be .*, got NoneType"),
    (list(wrong().values())[:3], "masks must be 4 tensors, one per parameter, got 3"),
    ([*wrong().values(), torch.ones(1, dtype=torch.bool)], "masks must be 4 tensors, one per parameter, got 5"),
    (torch.ones(4, 5, dtype=torch.bool), "masks must be a sequence, .*, got Tensor"),
    (iter(wrong().values()), "masks must be a sequence, .*, got generator|masks must be a sequence, .*, got .*iterator"),
]
BAD_UNNAMED: list[tuple[Any, str]] = [
    (wrong(**{"1_weight": None}), "masks must be 4 tensors, one per parameter, got 3"),
    ({"extra": torch.ones(1, dtype=torch.bool), **wrong()}, "masks must be 4 tensors, one per parameter, got 5"),
    (dict(reversed(wrong().items())), r"masks\[0\] must be torch.bool of shape \(4, 5\), got torch.bool of shape \(3,\)"),
    (Named(dict(reversed(wrong().items()))), r"masks\[0\]"),
    ([*list(wrong().values())[:3], None], r"masks\[3\] must be .*, got NoneType"),
]


@pytest.mark.parametrize(("named", "masks", "message"), [(True, *case) for case in BAD_NAMED] + [(False, *case) for case in BAD_UNNAMED])
def test_a_parameter_without_its_own_fitting_mask_is_refused(named: bool, masks: Any, message: str) -> None:
    model = net()
    with pytest.raises(UserError, match=message) as caught:
        SparseSGDM(model.named_parameters() if named else model.parameters(), 0.1, masks=masks)
    assert "\n" not in str(caught.value)


def test_new_masks_that_do_not_fit_are_refused_and_change_nothing() -> None:
    params = tensors([(3,), (4,)])
    optimizer = SparseSGDM(params, 0.1, masks=[torch.zeros(3, dtype=torch.bool), torch.ones(4, dtype=torch.bool)])
    with pytest.raises(UserError, match=r"masks\[1\]"):
        optimizer.set_masks([torch.ones(3, dtype=torch.bool), torch.ones(5, dtype=torch.bool)])
    assert [int(m.sum()) for m in masks_of(optimizer)] == [0, 4]
    assert [p.requires_grad for p in params] == [False, True]


def test_a_group_may_be_added_later_with_masks_or_without() -> None:
    """As in torch, and as if the group had been there from the start."""
    first, second, third = (tensors([(20, 30), (7,)], seed) for seed in (0, 1, 2))
    masks = bernoulli(second, 0.1)
    optimizer = SparseSGDM(first, 0.1)
    optimizer.add_param_group({"params": second, "lr": 0.3, "masks": masks})
    optimizer.add_param_group({"params": third})
    assert [set(group) - set(optimizer.defaults) for group in optimizer.param_groups] == [{"params"}] * 3
    copies = [tensors([(20, 30), (7,)], seed) for seed in (0, 1, 2)]
    groups = [{"params": copies[0]}, {"params": copies[1], "lr": 0.3}, {"params": copies[2]}]
    whole = SparseSGDM(groups, 0.1, masks=[*ones(first), *masks, *ones(third)])
    for each in (optimizer, whole):
        train(each, 5)
    assert same([*first, *second, *third], [p for group in copies for p in group])


def test_a_group_added_later_whose_masks_do_not_fit_is_refused_and_changes_nothing() -> None:
    optimizer = SparseSGDM(tensors([(3,)]), 0.1)
    for masks in ([torch.ones(3, dtype=torch.bool)], [], {"x": torch.ones(4, dtype=torch.bool), "y": torch.ones(4, dtype=torch.bool)}):
        with pytest.raises(UserError, match="masks"):
            optimizer.add_param_group({"params": tensors([(4,)]), "masks": masks})
    with pytest.raises(UserError, match="lr must be"):
        optimizer.add_param_group({"params": tensors([(4,)]), "lr": -1.0})
    assert len(optimizer.param_groups) == 1 and len(masks_of(optimizer)) == 1


def test_masks_may_be_numbers_that_are_0_or_1() -> None:
    ours, theirs = tensors(), tensors()
    masks = bernoulli(ours, 0.4)
    train(SparseSGDM(ours, 0.1, masks=[m.float() for m in masks]), 5)
    train(SparseSGDM(theirs, 0.1, masks=masks), 5)
    assert same(ours, theirs)
    for value in (0.5, 2.0, float("nan")):
        with pytest.raises(UserError, match=r"masks\[0\] must be torch.bool of shape \(3,\), got torch.float32 .* other than 0 and 1"):
            SparseSGDM(tensors([(3,)]), 0.1, masks=[torch.tensor([0.0, 1.0, value])])


def test_changing_the_given_mask_afterwards_changes_nothing() -> None:
    params = tensors()
    masks = bernoulli(params, 0.5)
    kept = [m.clone() for m in masks]
    optimizer = SparseSGDM(params, 0.1, masks=masks)
    for m in masks:
        m.fill_(True)
    assert all(torch.equal(a, b) for a, b in zip(masks_of(optimizer), kept, strict=True))


# 4. tensors without an active entry


def test_an_all_zero_mask_computes_no_gradient_until_it_has_entries_again() -> None:
    model = net()
    params = dict(model.named_parameters())
    params["1.bias"].requires_grad_(False)  # handed in frozen: never switched on
    none = {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in params.items()}
    some = {n: torch.ones(p.shape, dtype=torch.bool) for n, p in params.items()}
    optimizer = SparseSGDM(model.named_parameters(), 0.1, masks={**none, "1.weight": some["1.weight"]})

    def backward() -> list[str]:
        optimizer.zero_grad()
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        return [n for n, p in params.items() if p.grad is not None]

    assert backward() == ["1.weight"]
    optimizer.set_masks({**some, "1.weight": none["1.weight"]})
    assert params["1.weight"].grad is None  # a stale one would be taken for fresh when the tensor comes back
    assert backward() == ["0.weight", "0.bias"]
    optimizer.set_masks(None)
    assert backward() == ["0.weight", "0.bias", "1.weight"]
    assert not params["1.bias"].requires_grad


def test_set_masks_leaves_a_tensor_alone_that_the_user_froze_in_between() -> None:
    (p,) = tensors([(3,)])
    optimizer = SparseSGDM([p], 0.1)
    p.requires_grad_(False)
    optimizer.set_masks([torch.tensor([True, False, True])])
    assert not p.requires_grad


def test_a_parameter_without_gradient_is_skipped() -> None:
    a, b = tensors([(5,), (5,)])
    before = b.detach().clone()
    optimizer = SparseSGDM([a, b], 0.1, **ALL_ON, masks=bernoulli([a, b], 0.8))
    a.grad = torch.ones(5)
    optimizer.step()
    assert torch.equal(b, before) and b not in optimizer.state


# 5. new masks


@pytest.mark.parametrize(("first", "second"), list(product((0.1, 0.5, 1.1), repeat=2)))
def test_new_masks_keep_what_stays_and_forget_what_leaves(first: float, second: float) -> None:
    (p,) = tensors([(20, 50)])
    (old,), (new,) = bernoulli([p], first, seed=3), bernoulli([p], second, seed=4)
    optimizer = SparseSGDM([p], 0.1, dampening=0.3, masks=[old])
    train(optimizer, 5)
    before = velocity(optimizer, p)
    optimizer.set_masks([new])
    assert torch.equal(velocity(optimizer, p), torch.where(old & new, before, 0.0))
    theta, p.grad = p.detach().clone(), torch.randn(p.shape)
    optimizer.step()
    want = torch.where(new, 0.9 * torch.where(old & new, before, 0.0) + 0.7 * p.grad, 0.0)  # who joins starts at v = 0
    assert torch.allclose(velocity(optimizer, p), want, atol=1e-6)
    assert torch.allclose(p, theta - 0.1 * want, atol=1e-6)


def test_momentum_is_gone_after_a_tensor_was_all_masked() -> None:
    (p,) = tensors([(20, 50)])
    optimizer = SparseSGDM([p], 0.1)
    train(optimizer, 5)
    optimizer.set_masks([torch.zeros(p.shape, dtype=torch.bool)])
    train(optimizer, 2)
    optimizer.set_masks(None)
    assert not velocity(optimizer, p).any()


# 6. clipping


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clipping_with_all_ones_is_torch_s_bit_for_bit(max_norm: float) -> None:
    ours, theirs = tensors(), tensors()
    for a, b in zip(ours, theirs, strict=True):
        a.grad, b.grad = a.detach().clone(), b.detach().clone()
    ours[2].grad = theirs[2].grad = None
    norm = SparseSGDM(ours, 0.1, masks=ones(ours)).clip_grad_norm_(max_norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    assert same([p.grad for p in ours if p.grad is not None], [p.grad for p in theirs if p.grad is not None])


@pytest.mark.parametrize("density", [0.1, 0.6])
def test_clipping_counts_active_entries_only(density: float) -> None:
    params = tensors([(40, 30), (50,)])
    masks = [*bernoulli(params[:1], density), torch.zeros(50, dtype=torch.bool)]
    optimizer = SparseSGDM(params, 0.1, masks=masks)
    grads = [torch.randn(p.shape) for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    norm = optimizer.clip_grad_norm_(0.5)
    want = grads[0][masks[0]].norm()
    assert torch.allclose(norm, want)
    assert params[0].grad is not None and torch.allclose(params[0].grad, grads[0] * 0.5 / (want + 1e-6))
    assert optimizer.clip_grad_norm_(10.0) == pytest.approx(0.5, abs=1e-4)  # clipped now, so left alone
    with pytest.raises(UserError, match="max_norm"):
        optimizer.clip_grad_norm_(-1.0)


def test_clipping_without_any_gradient_is_zero() -> None:
    assert SparseSGDM(tensors(), 0.1).clip_grad_norm_(1.0) == 0


# 7. memory


def held_bytes(thing: object, params: list[Tensor]) -> int:
    """Bytes of all tensors an optimizer holds beside the parameters, whatever it calls them."""
    if isinstance(thing, Tensor):
        return 0 if any(thing is p for p in params) else thing.untyped_storage().nbytes()
    if isinstance(thing, dict):
        return sum(held_bytes(v, params) for v in thing.values())
    if isinstance(thing, list | tuple | set):
        return sum(held_bytes(v, params) for v in thing)
    return held_bytes(vars(thing), params) if type(thing).__module__ == sparse_sgdm.__name__ else 0


def test_a_tenth_of_the_entries_takes_less_memory_than_dense_momentum() -> None:
    def after_a_step(density: float) -> int:
        params = tensors([(100, 200), (500,)])
        optimizer = SparseSGDM(params, 0.1, masks=bernoulli(params, density))
        train(optimizer, 1)
        return held_bytes(optimizer, params)

    dense = 4 * (100 * 200 + 500)
    assert after_a_step(1.1) == dense
    assert after_a_step(0.1) < 0.4 * dense


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("density", [0.01, 0.3, 0.9])
def test_both_ways_of_holding_momentum_train_the_same(options: dict[str, Any], density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(compact_below: float) -> tuple[list[Tensor], int]:
        monkeypatch.setattr(sparse_sgdm, "COMPACT_BELOW", compact_below)
        params = tensors()
        optimizer = SparseSGDM(params, 0.05, **options, masks=bernoulli(params, density))
        train(optimizer, 30)
        return params, sum(s["momentum_buffer"].numel() for s in optimizer.state.values())

    (compact, k), (dense, n) = trained(2.0), trained(0.0)
    assert k < n or not options["momentum"]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(compact, dense, strict=True))


# 8. resume


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("carry", [through_a_file, lambda state: state], ids=["file", "memory"])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.1])
def test_resume_goes_on_bit_identically_and_brings_the_masks(density: float, carry: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    params = tensors()
    optimizer = SparseSGDM(params, 0.05, dampening=0.3, weight_decay=0.1, masks=bernoulli(params, density))
    train(optimizer, 7)
    copies = [p.detach().clone().requires_grad_() for p in params]
    resumed = SparseSGDM(copies, 1.0)  # other options, no masks: all come from the state
    resumed.load_state_dict(carry(optimizer.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(masks_of(resumed), bernoulli(params, density), strict=True))
    assert [p.requires_grad for p in copies] == [p.requires_grad for p in params]
    for o in (optimizer, resumed):  # in turn: neither may write into the other's momentum
        train(o, 7, seed=5)
    assert same(params, copies)
    assert [velocity(optimizer, p).tolist() for p in optimizer.state] == [velocity(resumed, p).tolist() for p in resumed.state]


def test_resume_keeps_positions_beyond_what_a_float_can_count() -> None:
    p = torch.zeros(2**24 + 3, requires_grad=True)
    mask = torch.zeros(p.shape, dtype=torch.bool)
    mask[-2:] = True  # as float32, 2^24 + 1 would be 2^24
    optimizer = SparseSGDM([p], 0.1, masks=[mask])
    p.grad = torch.ones_like(p)
    optimizer.step()
    resumed = SparseSGDM([p], 0.1)
    resumed.load_state_dict(optimizer.state_dict())
    resumed.step()
    assert torch.equal(p != 0, mask)
    assert torch.allclose(p[-2:], torch.tensor(-0.1 * (1 + 1.9)))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    saved = SparseSGDM(tensors([(3,), (4, 5)]), 0.5).state_dict()
    for shapes in ([(3,)], [(3,), (5, 4)], [(3,), (4, 5), (1,)]):
        optimizer = SparseSGDM(tensors(shapes), 0.1)
        with pytest.raises((UserError, ValueError), match=r"masks|group"):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.1
    a, b = tensors([(3,), (4, 5)])
    with pytest.raises(ValueError, match="group"):
        SparseSGDM([{"params": [a]}, {"params": [b]}], 0.1).load_state_dict(saved)


# 9. options


@pytest.mark.parametrize("field", ["lr", "momentum", "dampening", "weight_decay"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_options_below_zero_or_not_finite_are_refused_also_in_a_group(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{field} must be a finite number >= 0, got"):
        SparseSGDM(tensors(), **{"lr": 0.1, field: value})
    with pytest.raises(UserError, match=field):
        SparseSGDM([{"params": tensors(), field: value}], 0.1)


@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_and_no_dampening(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="nesterov"):
        SparseSGDM(tensors(), 0.1, nesterov=True, **options)
    with pytest.raises(ValueError, match="Nesterov"):
        torch.optim.SGD(tensors(), 0.1, nesterov=True, **options)


# 10. on any device


class NoWaiting(TorchDispatchMode):
    """Fails on what makes the host wait for a device: a value read, a size that depends on values, a copy across."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "masked_select", "_to_copy", "equal"}, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.1])
def test_neither_a_step_nor_clipping_reads_a_value_on_the_host(density: float) -> None:
    params = tensors()
    optimizer = SparseSGDM(params, 0.1, **ALL_ON, masks=bernoulli(params, density))
    for p in params:
        p.grad = torch.ones(p.shape) if p.requires_grad else None
    with NoWaiting():
        for _ in range(3):
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        params[2].detach().sum().item()


def test_names_for_groups_that_have_none_are_refused() -> None:
    """By position a mask would come to lie on another tensor of the same shape."""
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    masks = {name: torch.full(p.shape, name == "0.bias") for name, p in model.named_parameters()}
    groups = [{"params": [m.weight for m in model]}, {"params": [m.bias for m in model]}]
    with pytest.raises(UserError, match="named_parameters"):
        SparseSGDM(groups, lr=1.0, masks=masks)
    named = [{"params": [(n, p) for n, p in model.named_parameters() if n.endswith(kind)]} for kind in ("weight", "bias")]
    optimizer = SparseSGDM(named, lr=1.0, masks=masks)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    assert [name for name, p in model.named_parameters() if not torch.equal(p, before[name])] == ["0.bias"]


def test_a_copy_goes_on_as_the_original_does() -> None:
    params = tensors()
    optimizer = SparseSGDM(params, lr=0.1, masks=bernoulli(params, 0.1))
    train(optimizer, 3)
    other = copy.deepcopy(optimizer)
    train(optimizer, 3)
    train(other, 3)
    copied = [p for group in other.param_groups for p in group["params"]]
    assert same(params, copied) and all(a is not b for a, b in zip(params, copied, strict=True))


# 11. where torch's own SGD is expected


def small() -> tuple[nn.Module, SparseSGDM]:
    """A model of which one tensor is paused, one is held by index, one densely and one whole."""
    model = net()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    masks = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    masks["0.weight"][0, 0] = True
    masks["1.weight"][:, :2] = True
    masks["1.bias"][:] = True
    return model, SparseSGDM(model.named_parameters(), 0.1, masks=masks)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    g = torch.Generator().manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=g)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("masked", [True, False], ids=["into the same masks", "into no masks"])
def test_distributed_checkpoint_s_functions_carry_masks_and_momentum(masked: bool) -> None:
    model, optimizer = small()
    fit(model, optimizer)
    saved = through_a_file(get_optimizer_state_dict(model, optimizer))
    other, resumed = small() if masked else (net(), None)
    resumed = resumed or SparseSGDM(list(reversed(list(other.named_parameters()))), 1.0)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved)
    assert {name: p.requires_grad for name, p in other.named_parameters()} == {n: p.requires_grad for n, p in model.named_parameters()}
    fit(model, optimizer)
    fit(other, resumed)
    assert same(list(model.parameters()), list(other.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_on_disk_is_loaded_in_place(tmp_path: Path) -> None:
    model, optimizer = small()
    fit(model, optimizer)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    other, resumed = small()
    other.load_state_dict(model.state_dict())
    state = {"optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, resumed, state["optimizer"])
    fit(model, optimizer)
    fit(other, resumed)
    assert same(list(model.parameters()), list(other.parameters()))


def test_masks_that_torch_leaves_out_of_a_state_are_missed() -> None:
    """set_optimizer_state_dict drops the state of a tensor that is paused where it is loaded."""
    model, optimizer = small()
    optimizer.set_masks(None)
    fit(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer)
    other, paused = small()
    with pytest.raises(UserError, match="lacks masks"):
        set_optimizer_state_dict(other, paused, saved)
    assert not other.get_parameter("0.bias").requires_grad


def test_compact_momentum_without_its_mask_is_refused() -> None:
    model, optimizer = small()
    fit(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    with pytest.raises(UserError, match="momentum"):
        set_optimizer_state_dict(*small(), saved, options=flat)


def test_a_state_of_version_0_2_with_masks_at_the_top_is_loaded() -> None:
    model, optimizer = small()
    fit(model, optimizer)
    state = optimizer.state_dict()
    masks = [state["state"][i].pop("mask") for i in range(4)]
    old = {"state": {i: s for i, s in state["state"].items() if s}, "param_groups": state["param_groups"], "masks": masks}
    for group in old["param_groups"]:
        for name in set(group) - {"params", "param_names", "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"}:
            del group[name]
    other = net()
    resumed = SparseSGDM(other.named_parameters(), 1.0)
    resumed.load_state_dict(old)
    other.load_state_dict(model.state_dict())
    fit(model, optimizer)
    fit(other, resumed)
    assert same(list(model.parameters()), list(other.parameters()))
    with pytest.raises(UserError, match="masks"):
        resumed.load_state_dict({**old, "masks": masks[:2]})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_state_of_torch_sgd_is_loaded_and_the_masks_stay(momentum: float) -> None:
    params = tensors()
    sgd = torch.optim.SGD(params, 0.3, momentum=momentum, foreach=True, fused=None)
    train(sgd, 3)
    copies, masks = [p.detach().clone().requires_grad_() for p in params], bernoulli(params, 0.1)
    optimizer = SparseSGDM(copies, 0.1, masks=masks)
    optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3 and not optimizer.param_groups[0]["foreach"]
    train(sgd, 1, seed=5)
    g = torch.Generator().manual_seed(5)
    for p in copies:
        grad = torch.randn(p.shape, generator=g)
        p.grad = grad if p.requires_grad else None
    optimizer.step()
    for p, copied, mask in zip(params, copies, masks, strict=True):
        assert torch.equal(bits(p)[mask], bits(copied)[mask])
    wrong = sgd.state_dict()
    wrong["state"] = {2: {"momentum_buffer": torch.ones(5)}}
    with pytest.raises(UserError, match="momentum"):
        optimizer.load_state_dict(wrong)


def test_a_hook_may_change_a_state_before_it_is_loaded() -> None:
    (a,) = tensors([(6,)])
    optimizer = SparseSGDM([a], 0.1)
    mask = torch.arange(6) < 1
    for at_the_top in (False, True):

        def add_mask(_: Any, state: dict[str, Any], at_the_top: bool = at_the_top) -> dict[str, Any]:
            return {**state, "masks": [mask]} if at_the_top else {**state, "state": {0: {"mask": mask}}}

        optimizer.set_masks(None)
        handle = optimizer.register_load_state_dict_pre_hook(add_mask)
        optimizer.load_state_dict(torch.optim.SGD([a], 0.1).state_dict())
        handle.remove()
        assert torch.equal(masks_of(optimizer)[0], mask)


def test_maximize_is_torch_s() -> None:
    ours, theirs = tensors(), tensors()
    train(SparseSGDM(ours, 0.05, maximize=True, foreach=None, fused=False, differentiable=False), 5)
    train(torch.optim.SGD(theirs, 0.05, momentum=0.9, maximize=True), 5)
    assert same(ours, theirs)


@pytest.mark.parametrize("option", ["foreach", "fused", "differentiable"])
def test_implementations_of_torch_sgd_that_do_not_know_masks_are_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"{option} must be False or None"):
        SparseSGDM(tensors(), 0.1, **{option: True})
    with pytest.raises(UserError, match=option):
        SparseSGDM([{"params": tensors(), option: True}], 0.1)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.1])
def test_a_sparse_gradient_is_refused_under_a_mask_before_anything_moves(density: float) -> None:
    other, weight = tensors([(3,), (10, 4)])
    mask = bernoulli([weight], density)[0]
    optimizer = SparseSGDM([other, weight], 0.1, momentum=0.0, masks=[torch.ones(3, dtype=torch.bool), mask])
    before = [p.detach().clone() for p in (other, weight)]
    other.grad = torch.ones(3)
    if weight.requires_grad:
        nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()
    if density in (0.0, 1.1):  # no entry active, or all: as in torch
        optimizer.step()
        assert torch.equal(weight[0], before[1][0]) and bool((weight[1] != before[1][1]).all()) == (density > 1)
        return
    for act in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(UserError, match=r"parameter 1: .*sparse=False"):
            act()
    assert same(before, [other, weight]) and not optimizer.state
