"""Merge rules equal what plain loops give, on random vectors with ties, zeros and both signs; merge() refuses what does not fit."""

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.errors import UserError
from fedlens.lens.merging import CONTEXT, RULES, check_merge, merge, merge_rows
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector
from fedlens.registry import accepted, options_of, register
from fedlens.seeding import torch_rng

Rows = list[list[float]]
LEVELS = st.sampled_from([0.0, 0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0])  # few values: ties and zeros everywhere
VALUES = LEVELS | st.floats(-4, 4, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)
WEIGHTED_MEANS = ["mean", "sum", "ties", "dare", "fisher", "breadcrumbs", "clipped_mean"]


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """deltas [n, P] and sample counts [n]"""
    clients, size = draw(st.integers(1, 5)), draw(st.integers(1, 13))
    rows = draw(st.lists(st.lists(VALUES, min_size=size, max_size=size), min_size=clients, max_size=clients))
    counts = draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients))
    return torch.tensor(rows), torch.tensor(counts, dtype=torch.float32)


FRACTIONS = st.sampled_from([0.01, 0.1, 0.2, 0.35, 0.5, 0.85])


def options_for(name: str, deltas: Tensor) -> dict[str, object]:
    """Return the rule's own options and what it needs of the round."""
    fishers = torch.rand(deltas.shape, generator=torch.Generator().manual_seed(1))
    options = {"density": 0.4, "drop": 0.3, "trim": 0.2, "clip_norm": None, "seed": 5, "round": 2}
    return accepted(RULES[name], {"fishers": fishers, "clients": list(range(len(deltas))), **options})


# --- oracles: plain loops over numbers


def weighted(rows: Rows, weights: Sequence[float]) -> list[float]:
    return [sum(w * r[i] for r, w in zip(rows, weights, strict=True)) / sum(weights) for i in range(len(rows[0]))]


def ranked(row: Sequence[float]) -> list[int]:
    """Indices by falling magnitude, equal ones by rising index."""
    return sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))


def brute_ties(rows: Rows, weights: Sequence[float], density: float) -> list[float]:
    keep = max(1, round(density * len(rows[0])))
    trimmed = [[v if i in ranked(row)[:keep] else 0.0 for i, v in enumerate(row)] for row in rows]
    merged = []
    for column in zip(*trimmed, strict=True):
        sign = 1 if sum(w * v for v, w in zip(column, weights, strict=True)) >= 0 else -1
        agreeing = [(v, w) for v, w in zip(column, weights, strict=True) if v * sign > 0]
        merged.append(sum(v * w for v, w in agreeing) / sum(w for _, w in agreeing) if agreeing else 0.0)
    return merged


def brute_dare(rows: Rows, weights: Sequence[float], drop: float, seed: int, round_: int) -> list[float]:
    draws = [torch.rand(len(row), generator=torch_rng(seed, "dare", round_, k)).tolist() for k, row in enumerate(rows)]
    return weighted(
        [[v / (1 - drop) if u >= drop else 0.0 for v, u in zip(r, d, strict=True)] for r, d in zip(rows, draws, strict=True)], weights
    )


def brute_fisher(rows: Rows, weights: Sequence[float], fishers: Rows) -> list[float]:
    merged, plain = [], weighted(rows, weights)
    for i in range(len(rows[0])):
        below = sum(w * f[i] for w, f in zip(weights, fishers, strict=True))
        above = sum(w * f[i] * r[i] for w, f, r in zip(weights, fishers, rows, strict=True))
        merged.append(above / below if below else plain[i])
    return merged


def brute_breadcrumbs(rows: Rows, weights: Sequence[float], top: float, bottom: float, sizes: Sequence[int]) -> list[float]:
    masked = [list(row) for row in rows]
    for row in masked:
        start = 0
        for size in sizes:
            order = [start + i for i in ranked(row[start : start + size])]
            for i in order[: round(top * size)] + order[max(size - round(bottom * size), round(top * size)) :]:
                row[i] = 0.0
            start += size
    return weighted(masked, weights)


# --- the rules


@settings(max_examples=150, deadline=None)
@given(cohort=cohorts(), density=FRACTIONS | st.just(1.0))
def test_ties_is_trim_elect_mean(cohort: tuple[Tensor, Tensor], density: float) -> None:
    deltas, weights = cohort
    assert np.allclose(RULES["ties"](deltas, weights, density=density), brute_ties(deltas.tolist(), weights.tolist(), density), atol=1e-5)


def test_ties_on_paper() -> None:
    deltas = torch.tensor([[3.0, -1.0, 2.0, 0.0, 0.5], [-1.0, 4.0, -5.0, 0.0, 0.0], [2.0, -2.0, 2.0, 1.0, 0.0]])
    # two of five kept: [3 . 2 . .] [. 4 -5 . .] [2 -2 . . .] (of the three twos those of lower index); mass 5, 2, -3: signs + + -
    assert RULES["ties"](deltas, torch.ones(3), density=0.4).tolist() == [2.5, 4.0, -5.0, 0.0, 0.0]
    # the third counts three times: mass 9, -2, -3: signs + - -
    assert RULES["ties"](deltas, torch.tensor([1.0, 1.0, 3.0]), density=0.4).tolist() == [2.25, -2.0, -5.0, 0.0, 0.0]
    # the default keeps a fifth: one of five; the mass of the first two coordinates of this pair is balanced, and + is elected
    assert RULES["ties"](deltas, torch.ones(3)).tolist() == [2.5, 0.0, -5.0, 0.0, 0.0]
    assert RULES["ties"](torch.tensor([[2.0, 1.0], [-2.0, -3.0]]), torch.ones(2), density=1.0).tolist() == [2.0, -3.0]


@settings(max_examples=60, deadline=None)
@given(cohort=cohorts(), drop=FRACTIONS | st.just(0.0), seed=st.integers(0, 99), round_=st.integers(0, 9))
def test_dare_is_drop_rescale_mean(cohort: tuple[Tensor, Tensor], drop: float, seed: int, round_: int) -> None:
    deltas, weights = cohort
    want = brute_dare(deltas.tolist(), weights.tolist(), drop, seed, round_)
    assert np.allclose(RULES["dare"](deltas, weights, drop=drop, seed=seed, round=round_), want, atol=1e-4)
    if drop == 0:
        assert torch.allclose(RULES["dare"](deltas, weights, drop=0.0), RULES["mean"](deltas, weights))


def test_dare_on_paper() -> None:
    deltas = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    # keyed by (7, dare, 3, client) the draws are .458 .200 .375 .983 and .689 .377 .451 .865: at one half [. . . 4] and [10 . . 40] stay, doubled
    assert RULES["dare"](deltas, torch.ones(2), drop=0.5, seed=7, round=3).tolist() == [10.0, 0.0, 0.0, 44.0]
    # at 0.4 also the first of the one and the third of the other, all divided by 0.6
    found = RULES["dare"](deltas, torch.tensor([1.0, 3.0]), drop=0.4, seed=7, round=3)
    assert torch.allclose(found, torch.tensor([31.0, 0.0, 90.0, 124.0]) / 4 / 0.6)
    one = RULES["dare"](torch.arange(1.0, 1001.0)[None], torch.ones(1))
    assert set((one / torch.arange(1.0, 1001.0)).tolist()) == {0.0, 2.0}  # the default drops a half


def test_dare_keeps_the_mean_in_expectation_and_its_draws_are_keyed() -> None:
    deltas, weights = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2.0, 3.0])
    draws = torch.stack([RULES["dare"](deltas, weights, drop=0.7, seed=seed) for seed in range(2000)])
    error = draws.std(0) / 2000**0.5
    assert ((draws.mean(0) - RULES["mean"](deltas, weights)).abs() < 5 * error).all()
    assert torch.equal(draws[3], RULES["dare"](deltas, weights, drop=0.7, seed=3))
    assert not torch.equal(draws[3], RULES["dare"](deltas, weights, drop=0.7, seed=3, round=1))
    assert not torch.equal(draws[3], draws[4])
    turned = RULES["dare"](deltas.flip(0), weights.flip(0), drop=0.7, seed=3, clients=[2, 1, 0])  # a client's draws follow it
    assert torch.allclose(turned, draws[3], atol=1e-6)


@settings(max_examples=80, deadline=None)
@given(cohort=cohorts(), seed=st.integers(0, 999))
def test_fisher_is_the_sensitivity_weighted_mean(cohort: tuple[Tensor, Tensor], seed: int) -> None:
    deltas, weights = cohort
    g = torch.Generator().manual_seed(seed)
    fishers = torch.rand(deltas.shape, generator=g) * (torch.rand(deltas.shape, generator=g) > 0.5)  # zeros, whole columns of them too
    want = brute_fisher(deltas.tolist(), weights.tolist(), fishers.tolist())
    assert np.allclose(RULES["fisher"](deltas, weights, fishers=fishers), want, atol=1e-5)
    assert np.allclose(RULES["fisher"](deltas, weights, fishers=fishers * 1e-36), want, atol=1e-3)  # scale does not matter, however small
    assert torch.allclose(RULES["fisher"](deltas, weights, fishers=torch.ones_like(deltas)), RULES["mean"](deltas, weights), atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(cohort=cohorts(), top=FRACTIONS, bottom=FRACTIONS, cut=st.integers(0, 13))
def test_breadcrumbs_zeroes_both_tails_of_each_tensor(cohort: tuple[Tensor, Tensor], top: float, bottom: float, cut: int) -> None:
    deltas, weights = cohort
    bottom = min(bottom, 1 - top)
    cut = min(cut, deltas.shape[1])
    for sizes in ([deltas.shape[1]], [cut, deltas.shape[1] - cut]):
        want = brute_breadcrumbs(deltas.tolist(), weights.tolist(), top, bottom, sizes)
        assert np.allclose(RULES["breadcrumbs"](deltas, weights, top=top, bottom=bottom, sizes=sizes), want, atol=1e-5)


def test_breadcrumbs_defaults_keep_the_fourteen_percent_below_the_top_one() -> None:
    row = torch.arange(1.0, 101.0) * torch.tensor([1.0, -1.0]).repeat(50)
    merged = RULES["breadcrumbs"](row[None], torch.ones(1))
    assert merged.nonzero().flatten().tolist() == list(range(85, 99))
    assert torch.equal(merged[85:99], row[85:99])


@settings(max_examples=40, deadline=None)
@given(cohort=cohorts())
def test_the_sum_is_n_means_and_plain_with_equal_weights(cohort: tuple[Tensor, Tensor]) -> None:
    deltas, weights = cohort
    assert torch.allclose(RULES["sum"](deltas, weights), len(deltas) * RULES["mean"](deltas, weights))
    assert torch.allclose(RULES["sum"](deltas, torch.full((len(deltas),), 7.0)), deltas.sum(0), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(cohort=cohorts(), order=st.randoms(use_true_random=False), name=st.sampled_from(sorted(RULES)))
def test_the_order_of_clients_does_not_matter_and_nothing_is_changed(cohort: tuple[Tensor, Tensor], order: object, name: str) -> None:
    deltas, weights = cohort
    options = options_for(name, deltas)
    inputs = [deltas, weights, *([options["fishers"]] if "fishers" in options else [])]
    before = [tensor.clone() for tensor in inputs]  # type: ignore[attr-defined]
    merged = RULES[name](deltas, weights, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))  # type: ignore[arg-type]
    assert merged.shape == deltas.shape[1:] and merged.dtype == deltas.dtype
    merged.add_(1.0)  # nor does the result share memory with what came in
    assert torch.equal(deltas, before[0])
    clients = list(range(len(deltas)))
    order.shuffle(clients)  # type: ignore[attr-defined]
    turned = options | ({"fishers": options["fishers"][clients]} if "fishers" in options else {})  # type: ignore[index]
    turned |= {"clients": clients} if "clients" in options else {}
    assert torch.allclose(RULES[name](deltas[clients], weights[clients], **turned) + 1.0, merged, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 7), seed=st.integers(0, 999), name=st.sampled_from(["mean", "median", "trimmed_mean", "clipped_mean", "fisher"])
)
def test_equal_updates_merge_to_themselves(clients: int, seed: int, name: str) -> None:
    g = torch.Generator().manual_seed(seed)
    delta, weights = torch.randn(17, generator=g), torch.rand(clients, generator=g) + 0.1
    deltas = delta.repeat(clients, 1)
    assert torch.allclose(RULES[name](deltas, weights, **options_for(name, deltas)), delta, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(cohort=cohorts(), name=st.sampled_from(WEIGHTED_MEANS))
def test_only_the_ratio_of_weights_matters(cohort: tuple[Tensor, Tensor], name: str) -> None:
    deltas, weights = cohort
    options = options_for(name, deltas)
    assert torch.allclose(RULES[name](deltas, weights, **options), RULES[name](deltas, 4 * weights, **options), atol=1e-5)


def test_selection_is_exact_on_a_hundred_thousand_equal_entries() -> None:
    row = torch.ones(100_000)
    merged = RULES["ties"](row[None], torch.ones(1), density=0.1)
    assert merged.nonzero().flatten().tolist() == list(range(10_000))


def test_every_rule_says_in_a_line_what_it_is() -> None:
    for function in RULES.values():
        assert function.__doc__ and "\n" not in function.__doc__
    with pytest.raises(UserError, match=r"server\.merge must be one of .* Did you mean 'ties'"):
        merge_rows("tie", torch.ones(2, 3), torch.ones(2), {})


BAD = [("ties", {"density": d}) for d in (0, -0.1, 1.1)] + [("dare", {"drop": d}) for d in (-0.1, 1.0)]
BAD += [
    ("breadcrumbs", {"top": 0.3, "bottom": 0.8}),
    ("breadcrumbs", {"top": -0.1}),
    ("trimmed_mean", {"trim": 0.5}),
    ("clipped_mean", {"clip_norm": 0}),
]


@pytest.mark.parametrize(("name", "options"), BAD)
def test_an_option_out_of_range_is_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"server\.merge_options\.{next(iter(options))}.* must be .*, got") as direct:
        RULES[name](torch.ones(2, 3), torch.ones(2), **options)
    with pytest.raises(UserError) as before_a_run:
        check_merge(name, options)
    assert str(before_a_run.value) == str(direct.value)


def test_merge_options_are_checked_before_a_run() -> None:
    for name in RULES:
        check_merge(name, {})
    check_merge("breadcrumbs", {"top": 0, "bottom": 0.5})
    for name, options, message in [
        ("tie", {}, r"server\.merge must be one of"),
        ("ties", {"densty": 0.1}, r"server\.merge_options of ties must be one of density; got 'densty'\. Did you mean 'density'"),
        ("mean", {"trim": 0.1}, r"server\.merge_options must be empty for mean"),
        ("dare", {"seed": 1}, r"server\.merge_options of dare must be one of drop; got 'seed'"),
        ("ties", {"density": "all"}, r"server\.merge_options\.density must be a number, got 'all'"),
        ("ties", {"density": True}, r"server\.merge_options\.density must be a number, got True"),
        ("ties", {"density": float("nan")}, r"server\.merge_options\.density must be in \(0, 1\]"),
        ("clipped_mean", {"clip_norm": "far"}, r"server\.merge_options\.clip_norm: rule 'clipped_mean' fails on three test vectors"),
    ]:
        with pytest.raises(UserError, match=message):
            check_merge(name, options)


@patch.dict(RULES)
def test_a_registered_rule_gets_its_options_and_the_context_that_it_names() -> None:
    seen: list[dict[str, object]] = []

    @register("merge rule")
    def first(deltas: Tensor, weights: Tensor, *, scale: float, clients: list[int]) -> Tensor:
        seen.append({"scale": scale, "clients": clients})
        return deltas[0] * scale

    @register("merge rule", "named")
    def everything(deltas: Tensor, weights: Tensor, *, power: float = 1.0, **context: object) -> Tensor:
        seen.append(context)
        return deltas[0]

    rows, context = torch.ones(2, 3), {"seed": 1, "round": 4, "clients": [7, 8], "sizes": [3], "fishers": None}
    assert merge_rows("first", rows, torch.ones(2), {"scale": 2.0}, **context).tolist() == [2.0, 2.0, 2.0]
    assert merge_rows("named", rows, torch.ones(2), {"power": 2.0}, **context).tolist() == [1.0, 1.0, 1.0]
    assert seen == [{"scale": 2.0, "clients": [7, 8]}, context]
    check_merge("first", {"scale": 3})
    with pytest.raises(UserError, match=r"server\.merge_options\.scale must be set"):
        check_merge("first", {})
    assert merge(vectors(2), "first", scale=0.5, clients=[0, 1]) == 0.5 * vectors(2)[0]
    RULES.register(lambda deltas, weights: deltas.mean(), "scalar")
    with pytest.raises(UserError, match="'scalar' must return a floating-point tensor"):
        check_merge("scalar", {})
    assert set(context) == set(CONTEXT)


def test_sensitivities_and_sizes_must_fit() -> None:
    deltas, weights = torch.ones(2, 3), torch.ones(2)
    for fishers in (None, torch.ones(3, 3), torch.ones(2, 4), -torch.ones(2, 3), torch.full((2, 3), float("nan"))):
        with pytest.raises(UserError, match="fishers"):
            RULES["fisher"](deltas, weights, fishers=fishers)
    with pytest.raises(UserError, match="one id for each of 2"):
        RULES["dare"](deltas, weights, clients=[1])
    with pytest.raises(UserError, match="sizes"):
        RULES["breadcrumbs"](deltas, weights, sizes=[1, 1])


# --- merge()

SPACE = ParamSpace({"w": (2, 3), "b": (4,)})


def vectors(count: int, seed: int = 0) -> list[TaskVector]:
    rows = torch.randn(count, SPACE.size, generator=torch.Generator().manual_seed(seed))
    return [TaskVector(SPACE, row) for row in rows]


@pytest.mark.parametrize("name", sorted(RULES))
def test_merge_is_the_rule_on_the_stacked_vectors(name: str) -> None:
    taus, weights = vectors(4), [1.0, 2.0, 3.0, 4.0]
    rows = torch.stack([t.vector for t in taus])
    fishers = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1))
    options = {"fisher": {"fishers": fishers}, "breadcrumbs": {"bottom": 0.5}}.get(name, {})
    merged = merge(taus, name, weights, **options)
    assert merged.space is taus[0].space
    sizes = {"sizes": SPACE.sizes} if name == "breadcrumbs" else {}
    assert torch.equal(merged.vector, RULES[name](rows, torch.tensor(weights), **options, **sizes))
    if name == "fisher":
        named = [SPACE.views(f) for f in fishers]
        assert merge(taus, name, weights, fishers=named) == merged
        assert merge(taus, name, weights, fishers=list(fishers)) == merged


def test_merging_adds_and_averages() -> None:
    a, b = vectors(2)
    assert torch.allclose(merge([a, b]).vector, ((a + b) / 2).vector)
    assert torch.allclose(merge([a, b], "sum").vector, (a + b).vector)
    assert torch.allclose(merge([a, b], weights=torch.tensor([1, 0])).vector, a.vector)
    turned = ParamSpace({"b": (4,), "w": (2, 3)})
    assert merge([a, TaskVector(turned, turned.flatten(b.state()))]) == merge([a, b])


def test_merge_refuses_what_does_not_fit() -> None:
    a, b = vectors(2)
    other = TaskVector(ParamSpace({"w": (2, 3)}), torch.ones(6))
    with pytest.raises(UserError, match="no task vectors"):
        merge([])
    with pytest.raises(UserError, match=r"Did you mean 'ties'"):
        merge([a, b], "tie")
    with pytest.raises(UserError, match="missing b"):
        merge([a, other])
    with pytest.raises(UserError, match="task vector 1 is not finite"):
        merge([a, b * float("inf")])
    for weights in ([1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(UserError, match="weights must be"):
            merge([a, b], weights=weights)
    with pytest.raises(UserError, match="one sensitivity per task vector"):
        merge([a, b], "fisher")
    for sensitivity in ({}, {"w": torch.ones(2, 3), "wrong": torch.ones(1)}, {"w": torch.ones(3, 2)}):
        with pytest.raises(UserError, match="sensitivity"):
            merge([a, b], "fisher", fishers=[sensitivity] * 2)


def test_where_a_sensitivity_lacks_a_name_fisher_merging_takes_the_mean() -> None:
    a, b = vectors(2)
    found = merge([a, b], "fisher", weights=[1.0, 3.0], fishers=[{"w": torch.ones(2, 3)}, {"w": torch.zeros(2, 3)}]).state()
    assert torch.equal(found["w"], a.state()["w"])
    assert torch.allclose(found["b"], merge([a, b], weights=[1.0, 3.0]).state()["b"])


@pytest.mark.parametrize("rule", ["mean", "sum", "dare", "clipped_mean", "ties"])
def test_half_precision_bears_weights_that_are_sample_counts(rule: str) -> None:
    halves = [TaskVector(ParamSpace({"w": (3,)}), torch.full((3,), 2.0, dtype=torch.float16))] * 2
    assert bool(merge(halves, rule, weights=[45_000, 45_000]).vector.isfinite().all())


def test_an_unknown_option_is_an_error_that_lists_those_of_the_rule() -> None:
    taus = vectors(2)
    with pytest.raises(UserError, match=r"merge options of ties must be one of density; got 'densty'"):
        merge(taus, "ties", densty=0.1)
    with pytest.raises(UserError, match="merge options must be empty for mean, which has no options"):
        merge(taus, "mean", trim=0.1)
    with pytest.raises(UserError, match=r"must be one of top, bottom; got 'sizes'"):
        merge(taus, "breadcrumbs", sizes=[10])
    assert {name: list(options_of(rule, ("sizes",))) for name, rule in RULES.items()} == {
        "mean": [],
        "median": [],
        "trimmed_mean": ["trim"],
        "clipped_mean": ["clip_norm"],
        "sum": [],
        "ties": ["density"],
        "dare": ["drop", "seed", "round", "clients"],
        "fisher": ["fishers"],
        "breadcrumbs": ["top", "bottom"],
    }


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda rows, weights, **_: rows.mean(0) * float("nan"), "not finite"),
        (lambda rows, weights, **_: rows.mean(), r"must return a floating-point tensor \[3\], got torch\.float32 \[\]"),
        (lambda rows, weights, **_: rows.mean(0, keepdim=True), r"\[1, 3\]"),
        (lambda rows, weights, **_: None, "got NoneType"),
    ],
)
def test_a_rule_of_one_s_own_that_gives_no_vector_is_found_out(own: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "own", own)
    vectors = [TaskVector(ParamSpace({"w": torch.Size([3])}), torch.ones(3))] * 2
    with pytest.raises(UserError, match=message):
        merge(vectors, "own")


def test_a_trimmed_mean_cuts_as_many_as_its_fraction_says() -> None:
    outliers = torch.cat([torch.zeros(71, 1), torch.ones(29, 1)])
    assert RULES["trimmed_mean"](outliers, torch.ones(100), trim=0.29) == 0  # 0.29 · 100 is 28.999…96 in floating point
