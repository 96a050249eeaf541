"""Walking along task vectors: sweeps, choices that never see a test set, and the geometry behind them."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.errors import UserError
from fedlens.lens import geometry
from fedlens.lens.editing import SweepPoint, alphas, best, interpolate, negate
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector

# --- alphas


def test_alphas_are_read_from_a_range_a_list_or_numbers() -> None:
    assert alphas("0:1:11") == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert alphas("-0.7:2.1:5") == [-0.7, 0.0, 0.7, 1.4, 2.1]
    assert alphas("1:-1:3") == [1.0, 0.0, -1.0]
    assert alphas(" -1, 0,.5 ,1e1") == [-1.0, 0.0, 0.5, 10.0]
    assert alphas("0.3") == [0.3]
    assert alphas([1, 0.25, np.float64(2)]) == [1.0, 0.25, 2.0]


@settings(max_examples=60, deadline=None)
@given(start=st.floats(-1e6, 1e6), stop=st.floats(-1e6, 1e6), count=st.integers(2, 50))
def test_a_range_has_its_ends_exactly_and_even_steps(start: float, stop: float, count: int) -> None:
    found = alphas(f"{start!r}:{stop!r}:{count}")
    assert len(found) == count
    assert (found[0], found[-1]) == (start, stop)
    assert np.allclose(found, np.linspace(start, stop, count))


NONSENSE = [
    "",
    "a",
    "1,",
    "0:1",
    "0:1:1",
    "0:1:2.5",
    "0:1:-3",
    "0:nan:3",
    "inf",
    "0:1:3:4",
    "1e999",
    "0:1:99999999999",
    [],
    [math.nan],
    ["x"],
]


@pytest.mark.parametrize("text", NONSENSE, ids=repr)
def test_nonsense_is_no_alpha(text: str) -> None:
    with pytest.raises(UserError, match="alphas"):
        alphas(text)


# --- sweeps and choices


def points(*values: tuple[float, float, float]) -> list[SweepPoint]:
    return [SweepPoint(a, {"target": t, "control": c, "test_accuracy": -t}) for a, t, c in values]


def test_the_best_point_is_the_highest_and_of_equals_the_nearest_to_zero() -> None:
    found = points((-1.0, 0.7, 0), (2.0, 0.9, 0), (1.0, 0.9, 0), (-1.5, 0.9, 0), (0.0, math.nan, 0))
    assert best(found, "target").alpha == 1.0
    assert best(found[::-1], "target").alpha == 1.0
    assert best(points((-1.0, 0.9, 0), (1.0, 0.9, 0)), "target").alpha == 1.0
    assert best([SweepPoint(0.5, {"val_accuracy": 0.1})]).alpha == 0.5
    with pytest.raises(UserError, match=r"'val_accuracy'.*control, target"):
        best(found)
    for empty in ([], points((0.0, math.nan, 1.0))):
        with pytest.raises(UserError, match="no point"):
            best(empty, "target")


def test_negation_takes_the_lowest_target_that_keeps_the_control() -> None:
    found = points((0.0, 0.8, 0.60), (-0.5, 0.4, 0.58), (-1.0, 0.1, 0.57), (-1.5, 0.1, 0.60), (-2.0, 0.0, 0.56))
    chosen = negate(found, "target", "control")
    assert chosen is not None and chosen.alpha == -1.0  # 0.57 is 95 % of 0.60; of two equal targets the smaller |α|
    chosen = negate(found, "target", "control", keep=0.0)
    assert chosen is not None and chosen.alpha == -2.0
    chosen = negate(found[:1] + found[-1:], "target", "control")
    assert chosen is not None and chosen.alpha == 0.0  # nothing may be forgotten
    assert negate(points((0.0, 0.5, math.nan), (-1.0, 0.1, 0.9)), "target", "control") is None


def test_negation_needs_the_point_before_it_and_known_metrics() -> None:
    with pytest.raises(UserError, match="alpha 0"):
        negate(points((-1.0, 0.1, 0.5)), "target", "control")
    with pytest.raises(UserError, match="'accuracy'"):
        negate(points((0.0, 0.1, 0.5)), "target", "accuracy")
    with pytest.raises(UserError, match="'accuracy'"):
        negate(points((0.0, 0.1, 0.5)), "accuracy", "control")
    with pytest.raises(UserError, match="keep"):
        negate(points((0.0, 0.1, 0.5)), "target", "control", keep=95)


def test_choices_do_not_move_when_other_metrics_do() -> None:
    found = points((0.0, 0.8, 0.6), (-1.0, 0.1, 0.6), (1.0, 0.9, 0.6))
    other = [SweepPoint(p.alpha, p.metrics | {"test_accuracy": math.cos(7 * p.alpha)}) for p in found]
    first, second = negate(found, "target", "control"), negate(other, "target", "control")
    assert first is not None and second is not None and first.alpha == second.alpha == -1.0
    assert best(found, "target").alpha == best(other, "target").alpha == 1.0


def test_interpolation_is_exact_at_both_ends_and_goes_beyond() -> None:
    a, b = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).mul(torch.tensor([[1.0], [1e-3]]))
    assert torch.equal(interpolate(a, b, 0), a)
    assert torch.equal(interpolate(a, b, 1.0), b)
    for alpha in (-1.0, 0.25, 3.0):
        assert torch.allclose(interpolate(a, b, alpha), a + alpha * (b - a), atol=1e-6)
    with pytest.raises(UserError, match="same shape"):
        interpolate(a, b[:3], 0.5)


# --- geometry


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[Tensor, list[float]]:
    clients, size = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    value = st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-3, 3, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)
    rows = draw(st.lists(st.lists(value, min_size=size, max_size=size), min_size=clients, max_size=clients))
    return torch.tensor(rows), draw(st.lists(st.floats(0.125, 8), min_size=clients, max_size=clients))


@settings(max_examples=80, deadline=None)
@given(cohort=cohorts(), chunk=st.integers(1, 9))
def test_the_geometry_is_that_of_plain_loops(cohort: tuple[Tensor, list[float]], chunk: int) -> None:
    deltas, weights = cohort
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "CHUNK", chunk)
        cosines, conflict, drift = geometry.cosines(deltas), geometry.sign_conflict(deltas, weights), geometry.drift_ratio(deltas, weights)
    d, w = deltas.double().numpy(), np.array(weights)
    norms = np.linalg.norm(d, axis=1)
    for k in range(len(d)):
        for j in range(len(d)):
            want = d[k] @ d[j] / norms[k] / norms[j] if norms[k] and norms[j] else 0.0
            assert float(cosines[k, j]) == pytest.approx(want, abs=1e-9)
    opposing = mass = 0.0
    for column in d.T:
        shares = column * w
        elected = 1 if shares.sum() >= 0 else -1
        opposing += sum(abs(s) for s in shares if s * elected < 0)
        mass += sum(abs(s) for s in shares)
    assert conflict == pytest.approx(opposing / mass if mass else 0.0, abs=1e-9)
    assert 0 <= conflict <= 0.5
    apart = (w * norms).sum() / w.sum()
    assert drift == pytest.approx(np.linalg.norm((w[:, None] * d).sum(0) / w.sum()) / apart if apart else 1.0, abs=1e-9)


def test_geometry_takes_task_vectors_and_has_known_ends() -> None:
    space = ParamSpace({"w": (4,)})
    taus = [TaskVector(space, row) for row in torch.eye(4)]
    assert torch.equal(geometry.cosines(taus), torch.eye(4, dtype=torch.float64))
    assert geometry.drift_ratio(taus) == pytest.approx(0.5)
    assert geometry.sign_conflict(taus) == 0.0
    assert geometry.sign_conflict([taus[0], -taus[0]]) == 0.5
    assert geometry.sign_conflict([taus[0], -taus[0]], [3.0, 1.0]) == 0.25
    assert geometry.drift_ratio([taus[1], taus[1]]) == geometry.drift_ratio([taus[1] * 0]) == 1.0


def test_geometry_refuses_what_has_no_geometry() -> None:
    calls: list[Callable[[], object]] = [
        lambda: geometry.cosines([]),
        lambda: geometry.cosines(torch.ones(3)),
        lambda: geometry.sign_conflict(torch.ones(0, 3)),
        lambda: geometry.drift_ratio(torch.ones(2, 3), [1.0]),
        lambda: geometry.sign_conflict(torch.ones(2, 3), [0.0, 0.0]),
        lambda: geometry.drift_ratio(torch.ones(2, 3), [1.0, -1.0]),
    ]
    for call in calls:
        with pytest.raises(UserError):
            call()


# --- disentanglement: a linear model whose two tasks read features of their own

FEATURES, CLASSES = 6, 3
TASK1, TASK2 = torch.randn(2, 40, FEATURES, generator=torch.Generator().manual_seed(0)).unbind()
TASK1[:, 3:] = 0  # task 1 lives on the first three features, task 2 on the others
TASK2[:, :3] = 0


def predict(theta: Tensor) -> tuple[Tensor, Tensor]:
    weight = theta.view(CLASSES, FEATURES)
    return (TASK1 @ weight.T).argmax(1), (TASK2 @ weight.T).argmax(1)


def direction(seed: int, features: slice) -> Tensor:
    tau = torch.zeros(CLASSES, FEATURES)
    tau[:, features] = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(seed))
    return tau.flatten()


def test_task_vectors_with_inputs_of_their_own_are_disentangled() -> None:
    theta0 = torch.randn(CLASSES * FEATURES, generator=torch.Generator().manual_seed(9))
    xi = geometry.disentanglement(predict, theta0, direction(1, slice(0, 3)), direction(2, slice(3, 6)), [-1.0, 0.0, 2.0], [0.5, 1.0])
    assert xi.shape == (3, 2)
    assert torch.equal(xi, torch.zeros(3, 2, dtype=torch.float64))


def test_task_vectors_that_collide_are_entangled_unless_one_is_absent() -> None:
    theta0 = torch.randn(CLASSES * FEATURES, generator=torch.Generator().manual_seed(9))
    tau1, tau2 = (direction(s, slice(0, 3)) + direction(s + 1, slice(3, 6)) for s in (1, 3))
    grid1, grid2 = [0.0, 1.0, 2.0], [0.0, 1.5]
    xi = geometry.disentanglement(predict, theta0, tau1, tau2, grid1, grid2)
    assert xi[0, 0] == 0  # nothing was added
    assert (xi[1:, 1:] > 0).all()
    assert (xi <= 1).all()
    for i, a1 in enumerate(grid1):
        for j, a2 in enumerate(grid2):
            both = predict(theta0 + a1 * tau1 + a2 * tau2)
            alone = predict(theta0 + a1 * tau1)[0], predict(theta0 + a2 * tau2)[1]
            wrong = [sum(int(p != q) for p, q in zip(a, b, strict=True)) / 40 for a, b in zip(alone, both, strict=True)]
            assert float(xi[i, j]) == pytest.approx(sum(wrong) / 2)


def test_single_task_predictions_are_made_once_an_alpha() -> None:
    calls = 0

    def counted(theta: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return predict(theta)

    tau = direction(1, slice(0, 3))
    geometry.disentanglement(counted, torch.zeros(18), tau, tau, [0.0, 1.0, 2.0], [0.0, 1.0])
    assert calls == 3 + 2 + 3 * 2
    with pytest.raises(UserError, match="predict"):
        geometry.disentanglement(lambda theta: (torch.zeros(0), torch.zeros(0)), torch.zeros(18), tau, tau, [1.0], [1.0])


# --- linearity


@pytest.mark.parametrize(("scale", "rounding"), [(1e-3, 2e-3), (1.0, 2e-6), (1e3, 2e-6)])
def test_a_linear_model_has_no_linearity_gap(scale: float, rounding: float) -> None:
    g = torch.Generator().manual_seed(4)
    x, theta0 = torch.randn(30, FEATURES, generator=g), torch.randn(CLASSES * FEATURES, generator=g)
    tau = scale * torch.randn(CLASSES * FEATURES, generator=g)
    lines = geometry.linearity_gap(lambda theta: x @ theta.view(CLASSES, FEATURES).T, theta0, tau, [-2.0, 0.0, 0.5, 1.0])
    assert [line["alpha"] for line in lines] == [-2.0, 0.0, 0.5, 1.0]
    assert all(line["gap"] < rounding for line in lines), lines
    assert all(line["agreement"] == 1.0 for line in lines)
    assert lines[1]["gap"] == 0.0


@pytest.mark.parametrize("scale", [1e-2, 1.0, 30.0])
def test_the_gap_of_a_small_network_is_that_of_automatic_differentiation(scale: float) -> None:
    g = torch.Generator().manual_seed(3)
    x, theta0, tau = torch.randn(50, 4, generator=g), torch.randn(4 * 8 + 8 * 3, generator=g), torch.randn(56, generator=g)
    tau = tau / scale  # alphas that are `scale` times as long undo it: the choice of step must not care

    def logits(theta: Tensor) -> Tensor:
        return torch.tanh(x.to(theta) @ theta[:32].view(4, 8)) @ theta[32:].view(8, 3)

    slope = torch.autograd.functional.jvp(logits, theta0.double(), tau.double())[1]
    found = geometry.directional_derivative(logits, theta0, tau, scale)
    assert float((found - slope).norm() / slope.norm()) < 2e-3
    grid = [scale * a for a in (-0.5, 0.1, 0.5, 1.0)]
    for line in geometry.linearity_gap(logits, theta0, tau, grid):
        f, f0 = logits(theta0.double() + line["alpha"] * tau.double()), logits(theta0.double())
        linear = f0 + line["alpha"] * slope
        assert line["gap"] == pytest.approx(float((f - linear).norm() / (f - f0).norm()), abs=5e-3)
        assert line["agreement"] == pytest.approx(float((f.argmax(1) == linear.argmax(1)).double().mean()), abs=0.021)


def test_the_gap_grows_along_a_bent_path_and_is_nothing_without_a_path() -> None:
    theta0, tau = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])

    def logits(theta: Tensor) -> Tensor:
        return torch.stack([theta[0] ** 2, theta[1]])[None]

    gaps = [line["gap"] for line in geometry.linearity_gap(logits, theta0, tau, [0.1, 1.0, 4.0])]
    assert gaps == pytest.approx([a / (2 + a) for a in (0.1, 1.0, 4.0)], abs=1e-5)  # (1 + a)² − 1 = 2a + a²
    assert [line["gap"] for line in geometry.linearity_gap(logits, theta0, 0 * tau, [0.0, 1.0])] == [0.0, 0.0]
    assert geometry.linearity_gap(logits, theta0, tau, [-2.0])[0]["gap"] == math.inf  # back where it was, which a line is not
