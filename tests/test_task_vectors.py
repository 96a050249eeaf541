"""Task vectors: the algebra of the paper, exact application, and a file that is whole or refused."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from fedlens.errors import UserError
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector, pack_bits, unpack_bits

SPACE = ParamSpace({"a": (2, 3), "b": (), "c": (4,)})
QUARTERS = st.integers(-64, 64).map(lambda n: n / 4)  # sums and small multiples of these are exact in float32
VECTORS = st.lists(QUARTERS, min_size=SPACE.size, max_size=SPACE.size).map(lambda v: TaskVector(SPACE, torch.tensor(v)))


def model(seed: int = 0) -> nn.Sequential:
    """With an integer buffer, float buffers and no two tensors alike."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    made(torch.randn(8, 3))
    return made


class AsMask:
    def __init__(self, masks: dict[str, Tensor]) -> None:
        self.masks = masks

    def as_dict(self) -> dict[str, Tensor]:
        return self.masks


# --- the algebra


@settings(max_examples=60, deadline=None)
@given(a=VECTORS, b=VECTORS, c=VECTORS, s=st.integers(-8, 8), t=st.integers(-8, 8))
def test_task_vectors_are_a_vector_space(a: TaskVector, b: TaskVector, c: TaskVector, s: int, t: int) -> None:
    zero = TaskVector(SPACE, torch.zeros(SPACE.size))
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + zero == a
    assert a - b == a + (-b)
    assert a + (-a) == zero
    assert s * (a + b) == a * s + b * s
    assert (s + t) * a == s * a + t * a
    assert (s * t) * a == s * (t * a)
    assert 1 * a == a
    assert a * 4 / 4 == a
    assert -1 * (-a) == a
    assert sum([a, b, c]) == a + b + c


@settings(max_examples=60, deadline=None)
@given(a=VECTORS, b=VECTORS, s=st.integers(-8, 8))
def test_norm_dot_and_cosine_are_those_of_numpy(a: TaskVector, b: TaskVector, s: int) -> None:
    x, y = a.vector.double().numpy(), b.vector.double().numpy()
    assert a.dot(b) == float(x @ y) == b.dot(a)
    assert a.norm() == pytest.approx(float(np.linalg.norm(x)))
    assert a.dot(b * s) == s * a.dot(b)
    norms = a.norm() * b.norm()
    assert a.cosine(b) == pytest.approx(a.dot(b) / norms if norms else 0.0)
    assert abs(a.cosine(b)) <= 1
    assert a.density == np.count_nonzero(x) / len(x)


def test_the_dot_product_is_accumulated_in_float64() -> None:
    space = ParamSpace({"w": (3,)})
    a, ones = TaskVector(space, torch.tensor([1e8, 1.0, -1e8])), TaskVector(space, torch.ones(3))
    assert a.dot(ones) == 1.0
    huge = TaskVector(space, torch.full((3,), 1e30))
    assert huge.norm() == pytest.approx(math.sqrt(3) * 1e30)  # its square is beyond float32
    assert huge.cosine(huge) == pytest.approx(1.0)


def test_the_cosine_of_a_zero_vector_is_zero() -> None:
    zero, one = TaskVector(SPACE, torch.zeros(SPACE.size)), TaskVector(SPACE, torch.ones(SPACE.size))
    assert zero.cosine(one) == one.cosine(zero) == zero.cosine(zero) == 0.0


def test_operations_leave_their_operands_alone() -> None:
    a, b = TaskVector(SPACE, torch.randn(SPACE.size)), TaskVector(SPACE, torch.randn(SPACE.size))
    before = a.vector.clone(), b.vector.clone()
    results = [a + b, a - b, -a, 2 * a, a / 2, a * 1, a.restricted(AsMask({n: t > 0 for n, t in a.state().items()}))]
    for result in results:
        result.vector.fill_(7)
    assert torch.equal(a.vector, before[0])
    assert torch.equal(b.vector, before[1])


def test_names_in_another_order_are_the_same_space() -> None:
    turned = ParamSpace({"c": (4,), "a": (2, 3), "b": ()})
    a = TaskVector(SPACE, torch.arange(11.0))
    b = TaskVector(turned, turned.flatten(a.state()))
    assert a == b
    assert a - b == 0 * a
    assert a.cosine(b) == pytest.approx(1.0)


def test_scalars_are_numbers_of_any_kind_and_nothing_else() -> None:
    a = TaskVector(SPACE, torch.arange(11.0))
    assert np.float64(2) * a == a * np.float32(2) == 2 * a == a + a
    for wrong in (lambda: a * a, lambda: a * "2", lambda: a + 1, lambda: 1 + a, lambda: a - 1, lambda: a / a):
        with pytest.raises(TypeError):
            wrong()  # type: ignore[no-untyped-call]
    with pytest.raises(UserError, match="divisor"):
        a / 0


@pytest.mark.parametrize("other", [{"a": (2, 3), "b": ()}, {"a": (3, 2), "b": (), "c": (4,)}, {"a": (2, 3), "b": (), "c": (4,), "d": (1,)}])
def test_different_spaces_do_not_mix(other: dict[str, tuple[int, ...]]) -> None:
    a, space = TaskVector(SPACE, torch.ones(SPACE.size)), ParamSpace(other)
    b = TaskVector(space, torch.ones(space.size))
    operations: list[Callable[[], object]] = [lambda: a + b, lambda: a - b, lambda: a.dot(b), lambda: a.cosine(b), lambda: b + a]
    for operation in operations:
        with pytest.raises(UserError, match=r"(missing|surplus) [cd]|a is \[[23], [23]\], needs \[[23], [23]\]"):
            operation()
    assert a != b
    assert a != "a"


def test_a_vector_must_fit_its_space() -> None:
    for wrong in (torch.ones(10), torch.ones(1, 11), torch.ones(11, dtype=torch.int64)):
        with pytest.raises(UserError, match="vector of 11"):
            TaskVector(SPACE, wrong)


# --- between and apply_to


def test_the_difference_applied_to_the_first_gives_the_second() -> None:
    a, b = model(0), model(1)
    tau = TaskVector.between(a, b)
    assert tau.vector.dtype == torch.float32
    assert tau.space.size == sum(t.numel() for t in a.state_dict().values() if t.is_floating_point())
    assert "1.num_batches_tracked" not in tau.space.shapes
    moved = tau.apply_to(a)
    for name, tensor in moved.state_dict().items():
        assert torch.allclose(tensor.double(), b.state_dict()[name].double(), atol=1e-6), name
    assert TaskVector.between(a.state_dict(), b) == tau
    assert TaskVector.between(a, b.state_dict()) == tau


def test_alpha_scales_and_negative_alpha_forgets() -> None:
    a, b = model(0), model(1)
    tau = TaskVector.between(a, b)
    for alpha in (-1.0, 0.0, 0.3, 2.5):
        want = tau.space.flatten(a.state_dict()) + alpha * tau.vector
        assert torch.allclose(tau.space.flatten(tau.apply_to(a, alpha).state_dict()), want)
    assert TaskVector.between(a, tau.apply_to(a, 0.0)).norm() == 0


def test_applying_touches_neither_the_model_nor_the_state_dict() -> None:
    a = model(0)
    tau = TaskVector.between(a, model(1))
    kept = {name: tensor.clone() for name, tensor in a.state_dict().items()}
    moved, state = tau.apply_to(a), tau.apply_to(a.state_dict())
    assert isinstance(moved, nn.Sequential)
    assert all(p.requires_grad for p in moved.parameters())
    for tensor in [*moved.state_dict().values(), *state.values()]:
        tensor.fill_(3)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in a.state_dict().items())


def test_names_beyond_the_task_vector_stay_as_they_are() -> None:
    a = model(0).state_dict()
    part = {name: tensor for name, tensor in a.items() if name.startswith("0.")}
    tau = TaskVector.between(part, {name: tensor + 1 for name, tensor in part.items()})
    moved = tau.apply_to(a)
    assert list(moved) == list(a)
    for name, tensor in moved.items():
        assert torch.equal(tensor, a[name] + 1 if name in part else a[name])


def test_a_checkpoint_that_does_not_fit_is_refused_by_name() -> None:
    a = model(0)
    tau = TaskVector.between(a, model(1))
    state = dict(a.state_dict())
    lacking = {name: tensor for name, tensor in state.items() if name != "2.weight"}
    with pytest.raises(UserError, match=r"the model does not fit: missing 2\.weight"):
        tau.apply_to(lacking)
    with pytest.raises(UserError, match=r"2\.bias is \[3\], needs \[2\]"):
        tau.apply_to(state | {"2.bias": torch.zeros(3)})
    with pytest.raises(UserError, match=r"missing 0\.weight"):
        tau.apply_to(nn.Linear(3, 5))
    with pytest.raises(UserError, match=r"missing 2\.bias"):
        tau.apply_to(state | {"2.bias": torch.zeros(2, dtype=torch.int64)})


def test_between_names_the_first_difference() -> None:
    state = dict(model(0).state_dict())
    with pytest.raises(UserError, match=r"missing 0\.bias"):
        TaskVector.between(state, {name: tensor for name, tensor in state.items() if name != "0.bias"})
    with pytest.raises(UserError, match="surplus extra"):
        TaskVector.between(state, state | {"extra": torch.zeros(1)})
    with pytest.raises(UserError, match=r"0\.weight is \[9, 3\], needs \[5, 3\]"):
        TaskVector.between(state, state | {"0.weight": torch.zeros(9, 3)})
    with pytest.raises(UserError, match="no floating-point"):
        TaskVector.between({}, {})
    with pytest.raises(UserError, match="'z' is complex"):
        TaskVector.between({"z": torch.zeros(1, dtype=torch.complex64)}, {"z": torch.zeros(1, dtype=torch.complex64)})


def test_half_precision_checkpoints_keep_their_precision() -> None:
    half = {"w": torch.ones(3, dtype=torch.bfloat16)}
    tau = TaskVector.between({"w": torch.zeros(3)}, {"w": torch.full((3,), 0.5)})
    assert tau.apply_to(half)["w"].dtype == torch.bfloat16
    assert tau.apply_to(half)["w"].tolist() == [1.5] * 3


def test_tied_weights_stay_tied_and_move_once() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    target = {name: tensor + 1 for name, tensor in tied.state_dict().items()}
    moved = TaskVector.between(tied, target).apply_to(tied)
    assert moved[0].weight is moved[1].weight
    assert torch.allclose(moved[0].weight, tied[0].weight + 1)


def test_state_gives_views_and_a_mask_restricts() -> None:
    tau = TaskVector(SPACE, -torch.arange(1.0, 12.0))
    assert {name: tuple(t.shape) for name, t in tau.state().items()} == SPACE.shapes
    tau.state()["b"].fill_(9.0)
    assert tau.vector[6] == 9.0
    masks = {
        "a": torch.tensor([[True, False, False], [False, False, True]]),
        "b": torch.tensor(False),
        "c": torch.ones(4, dtype=torch.bool),
    }
    some = tau.restricted(AsMask(masks))
    assert some.vector.tolist() == [-1, 0, 0, 0, 0, -6, 0, -8, -9, -10, -11]
    assert some.density == 6 / 11
    with pytest.raises(UserError, match="the mask does not fit: missing c"):
        tau.restricted(AsMask({name: masks[name] for name in ("a", "b")}))
    with pytest.raises(UserError, match=r"c is \[5\], needs \[4\]"):
        tau.restricted(AsMask(masks | {"c": torch.ones(5, dtype=torch.bool)}))


# --- the file


def same_bits(a: TaskVector, b: TaskVector) -> bool:
    same_space = list(a.space.shapes.items()) == list(b.space.shapes.items())
    return same_space and a.vector.dtype == b.vector.dtype and torch.equal(a.vector.view(torch.uint8), b.vector.view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 70),
    fill=st.sampled_from([0.0, 0.1, 0.25, 0.26, 0.5, 1.0]),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_file_holds_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, size: int, fill: float, seed: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, generator=g)
    vector[torch.randperm(size, generator=g)[round(fill * size) :]] = 0.0
    space = ParamSpace({"z.w": (size // 2,), "a": (size - size // 2, 1)})  # names out of order, perhaps an empty tensor
    tau = TaskVector(space, vector.to(dtype))
    path = tmp_path_factory.mktemp("tau") / "tau.safetensors"
    tau.save(path)
    assert same_bits(TaskVector.load(path), tau)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_negative_zeros_not_a_number_and_infinities_survive_the_file(tmp_path: Path) -> None:
    strange = TaskVector(ParamSpace({"w": (20,)}), torch.tensor([-0.0, float("nan"), float("inf"), 1e-44, *[0.0] * 16]))
    strange.save(tmp_path / "t")
    assert same_bits(TaskVector.load(tmp_path / "t"), strange)


def test_a_sparse_vector_is_stored_as_a_bitmap_and_its_values_and_so_is_its_negative(tmp_path: Path) -> None:
    space = ParamSpace({"w": (400, 200)})
    vector = torch.zeros(80_000)
    vector[::10] = torch.randn(8000)
    tau = TaskVector(space, vector)
    for name, each in (("plus", tau), ("minus", -tau), ("scaled", -0.5 * tau), ("divided", tau / -3)):
        each.save(tmp_path / name)
        assert 80_000 / 8 + 4 * 8000 <= (tmp_path / name).stat().st_size <= 80_000 / 8 + 4 * 8000 + 1000
        assert TaskVector.load(tmp_path / name) == each
    quarter, more = vector.clone(), vector.clone()
    quarter[:20_000], more[:20_001] = 1.0, 1.0
    quarter[20_000:], more[20_001:] = 0.0, 0.0
    TaskVector(space, quarter).save(tmp_path / "quarter")
    TaskVector(space, more).save(tmp_path / "more")
    assert (tmp_path / "quarter").stat().st_size < 100_000 < 320_000 < (tmp_path / "more").stat().st_size


@settings(max_examples=40, deadline=None)
@given(bits=st.lists(st.booleans(), min_size=1, max_size=40))
def test_bits_pack_eight_a_byte(bits: list[bool]) -> None:
    packed = pack_bits(torch.tensor(bits))
    assert packed.numpy().tobytes() == np.packbits(np.array(bits)).tobytes()
    assert unpack_bits(packed, len(bits)).tolist() == bits


@pytest.mark.parametrize("sparse", [False, True])
def test_a_file_damaged_anywhere_is_refused_or_unharmed(tmp_path: Path, sparse: bool) -> None:
    vector = torch.where(torch.arange(SPACE.size) < (2 if sparse else 11), torch.arange(1.0, 12.0), 0.0)
    tau, path = TaskVector(SPACE, vector), tmp_path / "tau.safetensors"
    tau.save(path)
    whole = path.read_bytes()
    refused = 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x11]) + whole[position + 1 :])
        try:
            assert same_bits(TaskVector.load(path), tau)
        except UserError:
            refused += 1
    assert refused >= len(whole) - 16  # blanks that pad the header carry nothing
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"tau\.safetensors"):
            TaskVector.load(path)


def test_a_foreign_or_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model")
    save_file({"w": torch.ones(2)}, tmp_path / "empty", {"format": "fedlens.task_vector.v1"})
    (tmp_path / "text").write_text("not a tensor in sight, but long enough to have a header")
    (tmp_path / "folder").mkdir()
    for name, reason in (("model", "not a task vector"), ("empty", "damaged"), ("text", "read"), ("folder", "read"), ("none", "exist")):
        with pytest.raises(UserError, match=reason) as caught:
            TaskVector.load(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be written"):
        TaskVector(SPACE, torch.ones(SPACE.size)).save(tmp_path / "text" / "tau")
    with pytest.raises(UserError, match="cannot be written"):
        TaskVector(SPACE, torch.ones(SPACE.size)).save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "folder", "model", "text"]


def test_a_save_replaces_what_was_there(tmp_path: Path) -> None:
    first, second = TaskVector(SPACE, torch.ones(SPACE.size)), TaskVector(SPACE, torch.zeros(SPACE.size))
    first.save(str(tmp_path / "new" / "t"))
    loaded = TaskVector.load(str(tmp_path / "new" / "t"))
    second.save(tmp_path / "new" / "t")
    assert loaded == first
    assert TaskVector.load(tmp_path / "new" / "t") == second
    assert "norm 3.317" in repr(loaded)


def test_the_difference_of_two_halves_brings_back_the_second_half() -> None:
    torch.manual_seed(0)
    before, after = ({"w": torch.randn(1000).bfloat16()} for _ in range(2))
    tau = TaskVector.between(before, after)
    assert tau.vector.dtype == torch.float32
    assert torch.equal(tau.apply_to(before)["w"], after["w"]) and tau.apply_to(before)["w"].dtype == torch.bfloat16


def test_what_both_have_is_no_difference_even_where_it_is_infinite() -> None:
    """The −inf of an attention's mask among the buffers."""
    state = {"w": torch.ones(3), "mask": torch.tensor([0.0, float("-inf")])}
    tau = TaskVector.between(state, {**state, "w": torch.zeros(3)})
    assert tau.norm() == pytest.approx(3**0.5) and torch.equal(tau.apply_to(state, 2.0)["mask"], state["mask"])


def test_what_is_subtracted_from_a_variance_leaves_one() -> None:
    before = nn.BatchNorm1d(4)
    after = nn.BatchNorm1d(4)
    after.running_var = torch.full((4,), 7.0)
    tau = TaskVector.between(before, after)
    assert torch.equal(tau.apply_to(before).running_var, after.running_var)  # type: ignore[arg-type]
    negated = (-tau).apply_to(before)
    assert torch.equal(negated.running_var, torch.zeros(4)) and bool(negated.eval()(torch.randn(3, 4)).isfinite().all())  # type: ignore[arg-type]
