"""What repeated runs say: equal to scipy where scipy has an answer, and silent where there is none."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedlens.errors import UserError
from fedlens.study.statistics import (
    CORRECTIONS,
    Comparison,
    Summary,
    benjamini_hochberg,
    compare,
    holm,
    rounds_and_bytes_to,
    summarise,
    to_target,
    unpaired,
)

# --- summaries


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 12), scale=st.floats(1e-3, 1e3), confidence=st.floats(0.5, 0.999))
def test_a_summary_is_that_of_scipy(seed: int, n: int, scale: float, confidence: float) -> None:
    values = np.random.default_rng(seed).normal(0.86, scale, n)
    found = summarise(values, confidence)
    low, high = stats.t.interval(confidence, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert found.n == n
    assert found.mean == pytest.approx(values.mean(), abs=1e-12 * scale + 1e-15)
    assert found.sd == pytest.approx(values.std(ddof=1))
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-9 * scale), pytest.approx(high, abs=1e-9 * scale))


def test_a_summary_of_three_runs_by_hand() -> None:
    found = summarise([1, 2, 3])  # sd 1, t(0.975, 2) = 4.302653
    assert (found.n, found.mean, found.sd) == (3, 2.0, 1.0)
    assert (found.low, found.high) == (pytest.approx(2 - 4.302653 / math.sqrt(3)), pytest.approx(2 + 4.302653 / math.sqrt(3)))


def test_a_summary_is_shown_with_its_n() -> None:
    assert summarise([0.8589, 0.8610, 0.8631]).text() == "86.10 ± 0.21 [85.58, 86.62] (n = 3)"
    assert summarise([0.861]).text() == "86.10 (n = 1)"
    assert summarise([-0.00001]).text() == "0.00 (n = 1)"
    assert summarise([1.0, 2.0]).text(scale=1, digits=1) == "1.5 ± 0.7 [-4.9, 7.9] (n = 2)"


def test_one_run_has_no_spread_and_equal_runs_have_none_to_the_last_bit() -> None:
    assert summarise([0.7]) == Summary(1, 0.7, None, None, None)
    for n in (2, 3, 7, 10):
        assert summarise([0.1] * n) == Summary(n, 0.1, 0.0, 0.1, 0.1)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), data=st.data())
def test_neither_order_nor_container_matters(values: list[float], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(values))
    assert summarise(values) == summarise(shuffled) == summarise(np.array(shuffled)) == summarise(dict(enumerate(values)))


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for confidence in (0.5, 0.9):
        intervals = [summarise(rng.normal(3.0, 2.0, 4), confidence) for _ in range(600)]
        covered = np.mean([s.low is not None and s.high is not None and s.low <= 3.0 <= s.high for s in intervals])
        assert covered == pytest.approx(confidence, abs=0.06)


# --- comparisons


@st.composite
def tables(draw: st.DrawFn) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = ["dense", "sparse", "random", "dare"][: draw(st.integers(2, 4))]
    seeds = {name: draw(st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True)) for name in names}
    return {name: {s: float(rng.normal(0.8, 0.02)) for s in seeds[name]} for name in names}


@settings(max_examples=60, deadline=None)
@given(runs=tables(), confidence=st.floats(0.5, 0.999), data=st.data())
def test_comparisons_are_paired_tests_on_the_shared_seeds(
    runs: dict[str, dict[int, float]], confidence: float, data: st.DataObject
) -> None:
    found = {(c.name_a, c.name_b): c for c in compare(runs, confidence=confidence)}
    assert set(found) | set(unpaired(runs)) == set(combinations(runs, 2))
    assert not set(found) & set(unpaired(runs))
    for (a, b), c in found.items():
        shared = sorted(set(runs[a]) & set(runs[b]))
        x, y = (np.array([runs[name][s] for s in shared]) for name in (a, b))
        assert c.n == len(shared) > 0
        assert c.difference == pytest.approx((y - x).mean(), abs=1e-12)
        if c.n == 1:
            assert (c.low, c.high, c.p, c.p_adjusted, c.wilcoxon_p) == (None,) * 5
            continue
        want = stats.ttest_rel(y, x)
        interval = want.confidence_interval(confidence)
        assert c.p == pytest.approx(want.pvalue, rel=1e-6)
        assert (c.low, c.high) == (pytest.approx(interval.low, abs=1e-9), pytest.approx(interval.high, abs=1e-9))
        assert c.wilcoxon_p == pytest.approx(stats.wilcoxon(y, x).pvalue)
    shuffled = {name: dict(data.draw(st.permutations(list(values.items())))) for name, values in runs.items()}
    assert compare(shuffled, confidence=confidence) == list(found.values())


@settings(max_examples=30, deadline=None)
@given(runs=tables(), confidence=st.floats(0.5, 0.999))
def test_pooled_comparisons_have_the_variance_within_all_names(runs: dict[str, dict[int, float]], confidence: float) -> None:
    groups = [np.array(list(values.values())) for values in runs.values()]
    freedom = sum(len(group) - 1 for group in groups)
    for c in compare(runs, confidence=confidence, pooled=True):
        x, y = (np.array(list(runs[name].values())) for name in (c.name_a, c.name_b))
        assert c.difference == pytest.approx(y.mean() - x.mean(), abs=1e-12)
        if c.n == 1:
            assert (c.low, c.high, c.p, c.p_adjusted) == (None,) * 4
            continue
        error = math.sqrt(sum(((g - g.mean()) ** 2).sum() for g in groups) / freedom * (1 / len(x) + 1 / len(y)))
        interval = stats.t.interval(confidence, freedom, loc=c.difference, scale=error)
        assert (c.low, c.high) == (pytest.approx(interval[0], abs=1e-9), pytest.approx(interval[1], abs=1e-9))
        assert c.p == pytest.approx(2 * stats.t.sf(abs(c.difference) / error, freedom), rel=1e-6)
    a, b = ({0: 0.1, 1: 0.3, 2: 0.25}, {0: 0.4, 1: 0.45})
    (two,) = compare({"a": a, "b": b}, pooled=True)
    assert two.p == pytest.approx(stats.ttest_ind(list(b.values()), list(a.values())).pvalue)


def test_against_a_baseline_the_others_are_subtracted_from_in_their_order() -> None:
    runs = {"b": {0: 2.0, 1: 4.0}, "base": {0: 1.0, 1: 1.0, 2: 9.0}, "c": {1: 0.0, 3: 5.0}, "alone": {7: 1.0}}
    first, second = compare(runs, "base")
    assert (first.name_a, first.name_b, first.n, first.difference) == ("base", "b", 2, 2.0)
    assert first.p == pytest.approx(2 * math.atan(1 / 2) / math.pi)  # one degree of freedom is Cauchy's, and t = 2
    assert (second.name_a, second.name_b, second.n, second.difference) == ("base", "c", 1, -1.0)
    assert unpaired(runs, "base") == [("base", "alone")]
    assert compare({"base": {0: 1.0}}) == unpaired({"base": {0: 1.0}}, "base") == []


def test_each_may_have_a_baseline_of_its_own_and_all_tests_are_counted() -> None:
    runs = {"a": {0: 1.0, 1: 1.0}, "a2": {0: 2.0, 1: 4.0}, "b": {0: 5.0, 1: 5.0}, "b2": {0: 4.0, 1: 1.0}, "b3": {7: 1.0}}
    own = {"a": "a", "a2": "a", "b": "b", "b2": "b", "b3": "b"}
    first, second = compare(runs, own)
    assert (first.name_a, first.name_b, first.difference) == ("a", "a2", 2.0)
    assert (second.name_a, second.name_b, second.difference) == ("b", "b2", -2.5)
    assert first.p is not None and first.p_adjusted == pytest.approx(2 * first.p)
    assert unpaired(runs, own) == [("b", "b3")]
    assert compare(runs, {"a2": "a"}) == [replace(first, p_adjusted=first.p)], "who has none is compared with nothing"


def test_a_swap_of_the_pair_turns_the_sign_and_nothing_else() -> None:
    a, b = {0: 0.81, 1: 0.80, 2: 0.84}, {0: 0.83, 1: 0.81, 2: 0.88}
    (there,), (back,) = compare({"a": a, "b": b}), compare({"b": b, "a": a})
    assert there.difference == -back.difference > 0
    assert there.low is not None and back.high is not None and there.low == -back.high
    assert (there.p, there.wilcoxon_p) == (back.p, back.wilcoxon_p)


def test_differences_that_are_all_the_same_are_no_miracle() -> None:
    a = {0: 0.85, 1: 0.86, 2: 0.871}
    for b in ({s: v + 0.01 for s, v in a.items()}, {0: 0.86, 1: 0.87, 2: 0.881}):  # spread of 1e-17, by rounding
        (found,) = compare({"a": a, "b": b})
        assert found.difference == pytest.approx(0.01)
        assert (found.low, found.high, found.p, found.p_adjusted) == (None,) * 4
        assert found.wilcoxon_p == 0.25
    (same,) = compare({"a": a, "b": dict(a)})
    assert (same.n, same.difference, same.p, same.p_adjusted, same.wilcoxon_p) == (3, 0.0, 1.0, 1.0, 1.0)
    for tiny in (0.0, 5e-324, 1e-300):
        assert compare({"a": {0: 0.0, 1: 0.0}, "b": {0: tiny, 1: tiny}})[0].difference == pytest.approx(tiny, abs=1e-301)


@pytest.mark.parametrize("method", sorted(CORRECTIONS))
def test_only_tests_that_were_made_count_as_tests(method: str) -> None:
    rng = np.random.default_rng(1)
    runs = {name: {s: float(rng.normal(i, 1.0)) for s in range(5)} for i, name in enumerate("abc")}
    found = compare(runs | {"single": {0: 1.0}}, method=method)
    tested = [c for c in found if c.p is not None]
    assert len(found) == 6 and len(tested) == 3
    assert [c.p_adjusted for c in tested] == CORRECTIONS[method]([c.p for c in tested if c.p is not None])
    assert all(c.p_adjusted is None for c in found if c.p is None)


def test_a_difference_never_comes_without_its_n() -> None:
    assert [f.name for f in fields(Comparison)][:4] == ["name_a", "name_b", "n", "difference"]
    three, one = Comparison("dense", "sparse", 3, 0.0052, 0.001, 0.0094, 0.034, 0.068, 0.25), Comparison("a", "b", 1, -0.1, *[None] * 5)
    assert three.text() == "sparse − dense: +0.52 [0.10, 0.94] (n = 3, p = 0.034, adjusted 0.068)"
    assert one.text() == "b − a: -10.00 (n = 1, no test)"


# --- many tests

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_holm_by_hand() -> None:
    # sorted 0.005 0.01 0.03 0.04, times 4 3 2 1: 0.02 0.03 0.06 0.04, and the last may not fall below the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_benjamini_hochberg_by_hand() -> None:
    # sorted 0.005 0.01 0.03 0.04, times 4/1 4/2 4/3 4/4: 0.02 0.02 0.04 0.04
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.02, 0.04, 0.04, 0.02])
    assert benjamini_hochberg([0.03]) == [0.03]
    assert benjamini_hochberg([]) == []


@settings(max_examples=100, deadline=None)
@given(p=P_VALUES)
def test_benjamini_hochberg_is_that_of_scipy(p: list[float]) -> None:
    assert benjamini_hochberg(p) == pytest.approx(stats.false_discovery_control(p).tolist(), abs=1e-15)


@settings(max_examples=100, deadline=None)
@given(p=P_VALUES, alpha=st.floats(0.001, 0.5))
def test_holm_rejects_what_its_step_down_procedure_rejects(p: list[float], alpha: float) -> None:
    adjusted = holm(p)
    rejected: list[int] = []
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] * (len(p) - rank) > alpha:
            break
        rejected.append(i)
    assert [i for i in range(len(p)) if adjusted[i] <= alpha] == sorted(rejected)


@settings(max_examples=100, deadline=None)
@given(p=P_VALUES, data=st.data())
def test_corrections_keep_order_and_never_flatter(p: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(p))))
    for correct in CORRECTIONS.values():
        adjusted = correct(p)
        assert all(q <= a * (1 + 1e-12) and a <= 1 for q, a in zip(p, adjusted, strict=True))
        assert correct([p[i] for i in order]) == [adjusted[i] for i in order]
        assert [adjusted[i] for i in sorted(range(len(p)), key=lambda i: p[i])] == sorted(adjusted)
    assert all(b <= h * (1 + 1e-12) for b, h in zip(benjamini_hochberg(p), holm(p), strict=True))


# --- cost


def test_the_target_is_reached_at_a_point_that_was_measured() -> None:
    curve = [(10, 0.2), (20, 0.6), (30, 0.5), (40, 0.7)]
    assert [to_target(curve, y) for y in (0.1, 0.2, 0.21, 0.6, 0.61, 0.7, 0.71)] == [10, 10, 20, 20, 40, 40, None]
    assert to_target(curve[::-1], 0.5) == 20


def test_rounds_and_bytes_come_from_the_first_evaluation_at_the_target() -> None:
    metrics = [{"round": r, "bytes_up": 100 * r} | ({"val_accuracy": r / 10, "own": 1.0} if r % 2 == 0 else {}) for r in range(1, 9)]
    assert rounds_and_bytes_to(metrics, 0.5) == {"rounds": 6, "bytes_up": 600}
    assert rounds_and_bytes_to(metrics, 0.9) == {"rounds": None, "bytes_up": None}
    assert rounds_and_bytes_to(metrics, 0.9, key="own") == {"rounds": 2, "bytes_up": 200}


# --- refusals

A, B = {0: 1.0, 1: 2.0}, {0: 3.0, 1: 5.0}
LINE = {"round": 1, "bytes_up": 8, "val_accuracy": 0.5}
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: summarise([]), "values must have one number or more"),
    (lambda: summarise([1.0, math.nan]), "values must be finite .* got nan"),
    (lambda: summarise([math.inf]), "values must be finite .* got inf"),
    (lambda: summarise([1e200, 1.0]), "values must be finite .* got 1e.200"),
    (lambda: summarise([None]), "values must be finite .*NoneType"),  # type: ignore[list-item]
    *[(lambda c=c: summarise([1.0], confidence=c), "confidence") for c in (0.0, 1.0, 95, -0.1, math.nan)],
    *[(lambda c=c: compare({"a": A, "b": {7: 1.0}}, confidence=c), "confidence") for c in (0, 1, 95)],
    (lambda: compare({}), "no runs"),
    (lambda: unpaired({}), "no runs"),
    (lambda: compare({"a": A, "b": {}}), "b must have one number or more"),
    (lambda: compare({"a": A, "b": B | {2: math.nan}}), "b must be finite .* got nan"),
    (lambda: compare({"a": A, "b": B}, baseline="c"), "baseline must be one of a, b; got 'c'"),
    (lambda: unpaired({"a": A, "b": B}, baseline="c"), "baseline must be one of a, b; got 'c'"),
    (lambda: compare({"a": A, "b": B}, baseline={"a": "c"}), "baseline must be one of a, b; got 'c'"),
    (lambda: compare({"a": A, "b": B}, method="holms"), "Did you mean 'holm'"),
    (lambda: holm([0.1, 1.1]), "p_values must be in \\[0, 1\\], got 1.1"),
    (lambda: benjamini_hochberg([math.nan]), "p_values must be in .* got nan"),
    (lambda: to_target([], 0.5), "curve must have one number or more"),
    (lambda: to_target([(1, math.nan)], 0.5), "curve must be finite .* got nan"),
    (lambda: to_target([(1, 0.5)], math.nan), "target must be finite .* got nan"),
    (lambda: rounds_and_bytes_to([LINE], 0.5, key="val_acuracy"), "no line has 'val_acuracy'"),
    (lambda: rounds_and_bytes_to([], 0.5), "no line"),
    (lambda: rounds_and_bytes_to([{"step": 1, "val_accuracy": 0.5}], 0.5), "no 'round'"),
    (lambda: rounds_and_bytes_to([{"round": 1, "val_accuracy": 0.5}], 0.5), "no 'bytes_up'"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_invalid_input_raises_a_one_line_error(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_scipy_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, fedlens.study.statistics as s; s.summarise([1.0]); assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
