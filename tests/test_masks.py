"""Masks: exactly as many as asked, calibrated in rounds as a plain loop would, never outside what is eligible, saved and read back."""

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlens.errors import UserError
from fedlens.lens.mask_rules import (
    STRATEGIES,
    Mask,
    Request,
    build_mask,
    calibrate,
    calibrate_mask,
    eligible,
    keep_schedule,
    select,
    softened,
)
from fedlens.lens.sensitivity import _hash, _hash_key, sensitivity
from fedlens.models import create_model
from fedlens.models.vit import ViT
from fedlens.optim.sparse_sgdm import SparseSGDM

FROZEN = ("head.", "cls_token", "pos_embed")


class Small(nn.Module):
    """An MLP with a `head`, and a parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second, self.head = nn.Linear(12, 9), nn.LayerNorm(9), nn.Linear(9, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * torch.tanh(self.second(torch.tanh(self.norm(self.first(x.flatten(1)))))))


class Attends(nn.Module):
    """Separate query and key, in Hugging Face's manner; group norm is not eligible, convolution is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group, self.scale = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Parameter(torch.ones(1))
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))


def tiny() -> ViT:
    if not hasattr(ViT, "client_axis"):
        ViT.client_axis = True
    model = create_model("tiny", 10, weights="pretrained", image_size=28)
    assert isinstance(model, ViT)
    return model


def pictures(count: int, side: int = 28) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def by_hand(model: nn.Module) -> dict[str, Tensor]:
    """What is eligible, by names alone."""
    allowed = {}
    for name, param in model.named_parameters():
        allowed[name] = torch.full(param.shape, not name.startswith((*FROZEN, "scale")))
        if name.endswith("qkv.bias"):
            allowed[name][len(param) // 3 : 2 * len(param) // 3] = False
    return allowed


def one_by_one(model: nn.Module, images: Tensor) -> Tensor:
    """The Fisher diagonal [P], one image at a time."""
    uniform = _hash(images, _hash_key(images[0].numel(), 0, torch.device("cpu")))
    params = list(model.parameters())
    total = [torch.zeros_like(param) for param in params]
    for image, u in zip(images, uniform, strict=True):
        log_p = model(image[None])[0].log_softmax(0)
        label = int((log_p.detach().exp().cumsum(0) <= u).sum())
        for sum_, grad in zip(total, torch.autograd.grad(log_p[label], params), strict=True):
            sum_ += grad**2
    return torch.cat([t.flatten() for t in total])


def plain_rounds(model: nn.Module, images: Tensor, density: float, rounds: int, soft: float, lowest: bool) -> list[tuple[Tensor, Tensor]]:
    """The algorithm as it is written down: (the parameters that were scored [P], what stayed [P]) of every round."""
    theta = torch.cat([param.detach().flatten() for param in model.parameters()])
    allowed = torch.cat([mask.flatten() for mask in by_hand(model).values()])
    active, history = allowed.nonzero().flatten().tolist(), []
    for r in range(1, rounds + 1):
        rejected = allowed.clone()
        rejected[active] = False
        network, scored = copy.deepcopy(model).eval(), torch.where(rejected, theta * soft, theta)
        nn.utils.vector_to_parameters(scored, network.parameters())
        scores = (one_by_one(network, images) * (1 if lowest else -1)).tolist()
        count = round(density ** (r / rounds) * int(allowed.sum()))
        active = sorted(sorted(active, key=lambda i: (scores[i], i))[:count])
        kept = torch.zeros_like(allowed)
        kept[active] = True
        history.append((scored, kept))
    return history


@pytest.mark.parametrize(("strategy", "lowest"), [("least_sensitive", True), ("most_sensitive", False)])
@pytest.mark.parametrize(
    ("kind", "count", "density", "rounds", "soft"), [("small", 9, 0.2, 4, 0.01), ("small", 5, 0.37, 3, 0.5), ("tiny", 2, 0.1, 4, 0.01)]
)
def test_calibration_is_the_algorithm_round_by_round(
    kind: str, count: int, density: float, rounds: int, soft: float, strategy: str, lowest: bool
) -> None:
    model = (Small() if kind == "small" else tiny()).double()  # so that no rounding reorders the scores
    images = pictures(count, 2 if kind == "small" else 28).double()
    before, seen, kept = snapshot(model), [], []

    def score(names: Collection[str], active: Mapping[str, Tensor]) -> dict[str, Tensor]:
        seen.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
        return sensitivity(model, images, names=names)

    mask = build_mask(model, strategy, density, rounds=rounds, soft=soft, score=score, on_round=lambda r, k: kept.append((r, k)))
    want = plain_rounds(model, images, density, rounds, soft, lowest)
    assert kept == [(r, int(stayed.sum())) for r, (_, stayed) in enumerate(want, start=1)]
    assert all(torch.equal(a, scored) for a, (scored, _) in zip(seen, want, strict=True))
    assert torch.equal(mask.vector, want[-1][1])
    assert same_bits(model, before)
    public = calibrate_mask(model, images, strategy=strategy, density=density, rounds=rounds, soft=soft, chunk=2)
    assert public == mask


def test_rounds_and_softness_are_real_and_labels_and_score_are_passed_on() -> None:
    model, images = tiny(), pictures(6)
    labels = torch.tensor([3, 1, 4, 1, 5, 9])
    before = snapshot(model)
    masks = {
        "default": calibrate_mask(model, images),
        "one round": calibrate_mask(model, images, rounds=1),
        "not softened": calibrate_mask(model, images, soft=1.0),
        "true labels": calibrate_mask(model, images, labels, labels_from="data", rounds=1),
        "logit": calibrate_mask(model, images, score="logit", rounds=1),
        "another seed": calibrate_mask(model, images, seed=1, rounds=1),
    }
    assert len({mask.active for mask in masks.values()}) == 1
    names = list(masks)
    assert all(masks[a].iou(masks[b]) < 0.999 for i, a in enumerate(names) for b in names[:i] if {a, b} != {"one round", "not softened"})
    # without softening the network never changes, so that rounds change nothing either
    assert masks["not softened"].iou(masks["one round"]) > 0.9999
    assert calibrate_mask(model, images) == masks["default"]
    assert same_bits(model, before)
    with pytest.raises(UserError, match="labels"):
        calibrate_mask(model, images, labels_from="data")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("zero", [False, True], ids=["weights", "all tied"])
def test_every_strategy_activates_exactly_as_many_as_asked_and_only_what_is_eligible(strategy: str, zero: bool) -> None:
    model, images = tiny(), pictures(1)
    if zero:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    before, allowed = snapshot(model), by_hand(model)
    total = sum(int(mask.sum()) for mask in allowed.values())
    for density in (1e-7, 0.0123, 0.1, 0.15) if strategy == "qk_only" else (1e-7, 0.0123, 0.5, 1.0):
        mask = calibrate_mask(model, images, strategy=strategy, density=density, rounds=2)
        assert mask.active == max(1, round(density * total))
        assert mask.eligible_count == total and mask.names == list(allowed)
        assert all(torch.equal(a, b) for a, b in zip(mask.space.views(mask.eligible).values(), allowed.values(), strict=True))
        for name, active in mask.as_dict().items():
            assert not bool((active & ~allowed[name]).any())
    assert same_bits(model, before)


def test_magnitude_strategies_take_the_ends_of_the_magnitudes() -> None:
    model, images = Small(), pictures(1, 2)
    theta = torch.cat([param.detach().flatten().abs() for param in model.parameters()])
    low, high = (calibrate_mask(model, images, strategy=f"{end}_magnitude", density=0.3) for end in ("lowest", "highest"))
    for mask, sign in ((low, 1), (high, -1)):
        assert (sign * theta[mask.vector]).max() <= (sign * theta[mask.eligible & ~mask.vector]).min()
    whole = calibrate_mask(model, images, strategy="lowest_magnitude", density=0.7) & high
    assert whole.active <= 1  # the two halves meet, but for rounding


def test_random_masks_follow_the_seed() -> None:
    model = Small()
    a, again, b = (build_mask(model, "random", 0.5, seed=s) for s in (0, 0, 1))
    assert a == again and a != b and a.iou(b) < 0.6


def test_qk_only_stays_with_queries_and_keys_and_names_the_largest_density() -> None:
    mask = build_mask(tiny(), "qk_only", 0.1)
    table = mask.composition()
    assert table["query"]["share"] + table["key"]["share"] == 1 and table["query"]["share"] == pytest.approx(0.5, abs=0.02)
    for name, active in mask.as_dict().items():
        assert name.endswith(("qkv.weight", "qkv.bias")) or not bool(active.any())
    most = (table["query"]["eligible"] + table["key"]["eligible"]) / mask.eligible_count
    with pytest.raises(UserError, match=f"at most {int(1e4 * most) / 1e4}"):
        build_mask(tiny(), "qk_only", 0.5)
    build_mask(tiny(), "qk_only", int(1e4 * most) / 1e4)
    with pytest.raises(UserError, match="qkv"):
        build_mask(Small(), "qk_only", 0.1)
    separate = build_mask(Attends(), "qk_only", 0.1).per_tensor()
    assert {name for name, (active, _) in separate.items() if active} <= {"query.weight", "query.bias", "key.weight"}


@pytest.mark.parametrize("strategy", ["least_sensitive", "highest_magnitude", "random", "random_layerwise"])
def test_kinds_of_weight_can_be_left_out_and_the_mask_is_as_large(strategy: str) -> None:
    model, images = tiny(), pictures(6)
    free, bound = (calibrate_mask(model, images, strategy=strategy, rounds=2, without=kinds) for kinds in ((), ("query", "key")))
    assert bound.active == free.active == round(0.1 * free.eligible_count) and bound.eligible_count == free.eligible_count
    kinds = bound.composition()
    assert kinds["query"]["active"] == kinds["key"]["active"] == 0 < free.composition()["query"]["active"]


def test_random_layerwise_without_values_has_its_share_of_qkv_in_queries_and_keys() -> None:
    mask = calibrate_mask(tiny(), pictures(6), strategy="random_layerwise", rounds=2, without=("value",))
    kinds = mask.composition()
    assert kinds["value"]["active"] == 0 < kinds["query"]["active"]
    assert abs(kinds["query"]["active"] / kinds["key"]["active"] - 1) < 0.05


def test_leaving_out_too_much_or_the_unknown_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'query'"):
        build_mask(tiny(), "random", 0.1, without=["querry"])
    with pytest.raises(UserError, match=r"mask\.density must be at most 0\.\d+ without mlp in, mlp out .*, got 0\.5"):
        build_mask(tiny(), "random", 0.5, without=["mlp in", "mlp out"])
    with pytest.raises(UserError, match=r"mask\.density must be at most 0\.\d+ for qk_only .*, got 0\.1"):
        build_mask(tiny(), "qk_only", 0.1, without=["query"])
    with pytest.raises(UserError, match="nothing to choose from"):
        build_mask(tiny(), "qk_only", 0.1, without=["query", "key"])


def test_random_layerwise_keeps_the_counts_of_every_tensor() -> None:
    model, images = tiny(), pictures(2)
    like = calibrate_mask(model, images, density=0.05, rounds=2)
    control = calibrate_mask(model, images, strategy="random_layerwise", density=0.05, like=like)
    assert control.per_tensor() == like.per_tensor() and control.iou(like) < 0.5
    assert calibrate_mask(model, images, strategy="random_layerwise", density=0.05, rounds=2) == control  # by default least_sensitive's
    assert build_mask(model, "random_layerwise", 0.05, like=like, seed=1) != control
    with pytest.raises(UserError, match=r"mask\.density must be equal to the density of mask\.like .*, got 0\.1"):
        build_mask(model, "random_layerwise", 0.1, like=like)
    with pytest.raises(UserError, match="another model"):
        build_mask(Small(), "random_layerwise", 0.05, like=like)


def test_dino_vits16_has_the_published_number_of_eligible_weights() -> None:
    model = create_model("dino_vits16", 100, weights=None)
    allowed = eligible(model)
    assert list(allowed) == [name for name, _ in model.named_parameters()]
    assert sum(int(mask.sum()) for mask in allowed.values()) == 21_589_632 - 12 * 384 == 21_585_024
    assert not any(bool(mask.any()) for name, mask in allowed.items() if name.startswith(FROZEN))
    assert allowed["blocks.3.attn.qkv.bias"].tolist() == [True] * 384 + [False] * 384 + [True] * 384


def test_only_linear_convolution_and_layer_norm_of_the_backbone_are_eligible() -> None:
    found = {name for name, mask in eligible(Attends()).items() if bool(mask.all())}
    assert found == {"conv.weight", "conv.bias", "query.weight", "query.bias", "key.weight", "value.weight", "value.bias"}
    assert not bool(eligible(Attends())["key.bias"].any())
    scaled = eligible(create_model("dinov2_vits14", 3, weights=None, image_size=14))
    assert not any(bool(mask.any()) for name, mask in scaled.items() if name.endswith("gamma"))
    assert all(bool(mask.all()) for mask in eligible(nn.Linear(3, 2)).values())


def test_softened_weights_are_multiplied_inside_and_bit_identical_afterwards() -> None:
    model = Small()
    allowed, before = eligible(model), snapshot(model)
    active = {name: mask & (torch.arange(mask.numel()).view(mask.shape) % 3 == 0) for name, mask in allowed.items()}
    with softened(model, active, allowed, 0.1):
        for name, param in model.named_parameters():
            assert torch.equal(param.detach(), torch.where(allowed[name] & ~active[name], before[name] * 0.1, before[name]))
    assert same_bits(model, before)
    with pytest.raises(ZeroDivisionError), softened(model, active, allowed, 0.1):
        raise ZeroDivisionError
    assert same_bits(model, before)
    with pytest.raises(UserError, match=r"mask\.soft"), softened(model, active, allowed, float("nan")):
        pass


def test_a_score_that_fails_in_a_late_round_leaves_the_model_as_it_was() -> None:
    model, calls = Small(), []
    before = snapshot(model)

    def score(names: Collection[str], active: Mapping[str, Tensor]) -> dict[str, Tensor]:
        calls.append(same_bits(model, before))
        if len(calls) == 3:
            raise ZeroDivisionError
        return {name: param.detach().abs() for name, param in model.named_parameters()}

    with pytest.raises(ZeroDivisionError):
        build_mask(model, "least_sensitive", 0.1, score=score)
    assert calls == [True, False, False] and same_bits(model, before)


def test_only_tensors_that_still_have_active_weights_are_scored() -> None:
    model, asked = Small(), []

    def score(names: Collection[str], active: Mapping[str, Tensor]) -> dict[str, Tensor]:
        asked.append(set(names))
        return {name: torch.full(dict(model.named_parameters())[name].shape, float(name.startswith("first"))) for name in names}

    build_mask(model, "least_sensitive", 0.2, rounds=2, score=score)
    backbone = {f"{layer}.{part}" for layer in ("first", "norm", "second") for part in ("weight", "bias")}
    assert asked == [backbone, backbone - {"first.bias"}]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_and_weights_must_be_finite(bad: float) -> None:
    model = Small()
    with pytest.raises(UserError, match="not finite"):
        build_mask(
            model, "least_sensitive", 0.1, score=lambda names, active: {n: torch.full_like(p, bad) for n, p in model.named_parameters()}
        )
    with torch.no_grad():
        model.first.weight[0, 0] = bad
    with pytest.raises(UserError, match="not finite"):
        build_mask(model, "lowest_magnitude", 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "least_sensitve"}, "Did you mean 'least_sensitive'"),
        ({"density": 0.0}, r"mask\.density must be in \(0, 1\]"),
        ({"density": 1.5}, r"mask\.density must be in \(0, 1\]"),
        ({"density": float("nan")}, r"mask\.density must be in \(0, 1\]"),
        ({"rounds": 0}, r"mask\.rounds"),
        ({"soft": -1.0, "score": lambda names, active: {}}, r"mask\.soft"),
        ({}, "needs images"),
        ({"score": lambda names, active: {}}, "scores lack"),
        ({"score": lambda names, active: {name: torch.zeros(1) for name in names}}, "another shape"),
        ({"model": nn.ReLU()}, "nothing is eligible"),
    ],
)
def test_wrong_input_is_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_mask(**{"model": Small(), "strategy": "least_sensitive", "density": 0.1, **options})  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(st.sampled_from([-2.0, -0.0, 0.0, 1.0, 1.5, float("inf"), -float("inf")]) | st.floats(-1, 1, width=32), st.booleans()),
        max_size=60,
    ),
    st.floats(0, 1),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_selection_is_a_sort_with_ties_to_the_lower_index(entries: list[tuple[float, bool]], share: float, lowest: bool) -> None:
    scores, among = torch.tensor([e[0] for e in entries], dtype=torch.float32), torch.tensor([e[1] for e in entries], dtype=torch.bool)
    candidates = [i for i, e in enumerate(entries) if e[1]]
    count = round(share * len(candidates))
    values = scores.tolist()
    want = sorted(candidates, key=lambda i: (values[i] if lowest else -values[i], i))[:count]
    assert select(scores, among, count, lowest).nonzero().flatten().tolist() == sorted(want)


def test_selection_refuses_nan_and_more_than_there_is() -> None:
    scores, among = torch.tensor([1.0, float("nan"), 2.0]), torch.tensor([True, False, True])
    assert select(scores, among, 1).tolist() == [True, False, False]  # outside the candidates a NaN is nobody's business
    with pytest.raises(UserError, match="NaN"):
        select(scores, torch.ones(3, dtype=torch.bool), 1)
    with pytest.raises(UserError, match="cannot select 3 of 2"):
        select(scores, among, 3)


@given(st.integers(1, 10**8), st.floats(1e-6, 1), st.integers(1, 50))
def test_the_schedule_falls_to_the_density(count: int, density: float, rounds: int) -> None:
    kept = keep_schedule(count, density, rounds)
    assert len(kept) == rounds and kept[-1] == max(1, round(density * count))
    assert all(count >= a >= b >= 1 for a, b in zip([count, *kept], kept, strict=False))


def test_the_schedule_of_the_paper() -> None:
    assert keep_schedule(1000, 0.1, 4) == [562, 316, 178, 100]


def test_what_leaves_the_active_set_never_returns() -> None:
    scores = [torch.tensor([0.0, 1, 2, 3, 4, 5]), torch.tensor([9.0, 8, 0, 0, 0, 0])]
    seen: list[list[bool]] = []

    def score(active: Tensor) -> Tensor:
        seen.append(active.tolist())
        return scores[len(seen) - 1]

    allowed = torch.tensor([True, True, True, True, True, False])
    assert calibrate(score, allowed, 0.2, 2).nonzero().flatten().tolist() == [1]
    assert seen == [allowed.tolist(), [True, True, False, False, False, False]]


def pair() -> tuple[Mask, Mask]:
    allowed = {"a": torch.tensor([True, True, True, False]), "b": torch.tensor([True])}
    one = Mask({"a": torch.tensor([True, True, False, False]), "b": torch.tensor([False])}, allowed)
    two = Mask({"b": torch.tensor([True]), "a": torch.tensor([False, True, False, False])}, allowed)
    return one, two


def test_masks_have_an_algebra_within_what_is_eligible() -> None:
    one, two = pair()
    assert (one.active, one.eligible_count, one.size, one.density, one.bitmap_bytes) == (2, 4, 5, 0.5, 1)
    assert (one & two).vector.tolist() == [False, True, False, False, False]
    assert (one | two).vector.tolist() == [True, True, False, False, True]  # by name, whatever the order
    assert (~one).vector.tolist() == [False, False, True, False, True] and ~~one == one
    assert one.iou(two) == pytest.approx(1 / 3) and one.iou(one) == 1 and (one & ~one).iou(two & ~two) == 1
    assert one == Mask(one.as_dict(), one.space.views(one.eligible)) and one != two and one != Mask(one.as_dict()) and one != "mask"
    assert one.per_tensor() == {"a": (2, 3), "b": (0, 1)} and "2 of 4" in repr(one)
    other = Mask({"a": torch.ones(3, dtype=torch.bool)})
    assert other.density == 1 and other != one
    for act in (one.__and__, one.__or__, one.iou):
        with pytest.raises(UserError, match="different models"):
            act(other)


@pytest.mark.parametrize(
    ("masks", "allowed", "message"),
    [
        ({"a": torch.ones(2)}, None, r"torch\.bool"),
        ({}, None, "names no tensor"),
        ({"a": torch.ones(2, dtype=torch.bool)}, {"a": torch.ones(3, dtype=torch.bool)}, "other names or shapes"),
        ({"a": torch.ones(2, dtype=torch.bool)}, {"b": torch.ones(2, dtype=torch.bool)}, "other names or shapes"),
        ({"a": torch.ones(2, dtype=torch.bool)}, {"a": torch.tensor([True, False])}, "not eligible"),
    ],
)
def test_a_mask_that_contradicts_itself_is_refused(masks: dict[str, Tensor], allowed: dict[str, Tensor] | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Mask(masks, allowed)


def test_a_mask_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    for number, mask in enumerate((*pair(), build_mask(tiny(), "random", 0.1))):
        path = tmp_path / "deep" / f"{number}.safetensors"
        mask.save(path)
        again = Mask.load(path)
        assert again == mask and again.names == mask.names and again.density == mask.density
        mask.save(str(path))
        assert len(list(path.parent.iterdir())) == number + 1  # nothing is left beside it
        assert path.stat().st_size < 2 * mask.bitmap_bytes + 20_000


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mask.safetensors"
    mask = build_mask(tiny(), "random", 0.1)
    mask.save(path)
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-1000] ^= 1
    renamed = good.replace(b"blocks.0.norm1", b"blocks.9.norm1")
    for content in (good[: len(good) // 2], bytes(flipped), renamed, b"", b"not a mask at all"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as a mask"):
            Mask.load(path)
    path.write_bytes(good)
    tensors = load_file(path)
    for metadata in (None, {"fedlens.mask": "[]"}, {"fedlens.mask": json.dumps({"shapes": [["a", [3]]], "sha256": "0"})}):
        save_file(tensors, path, metadata)
        with pytest.raises(UserError, match="cannot be read as a mask"):
            Mask.load(path)
    for absent in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="cannot be read as a mask"):
            Mask.load(absent)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair()
    path = tmp_path / "mask.safetensors"
    one.save(path)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(UserError, match="no space"):
        two.save(path)
    assert Mask.load(path) == one and list(tmp_path.iterdir()) == [path]


def test_composition_and_layers_count_every_coordinate_once() -> None:
    model = tiny()
    mask = build_mask(model, "random", 0.2)
    table = mask.composition()
    assert list(table) == [
        "query", "key", "value", "attention output", "mlp in", "mlp out", "norm", "patch embedding", "other",
    ]  # fmt: skip
    assert sum(row["active"] for row in table.values()) == mask.active and sum(row["share"] for row in table.values()) == pytest.approx(1)
    dim, depth = 128, 6
    eligible_of = {kind: row["eligible"] for kind, row in table.items()}
    assert eligible_of == {
        "query": depth * (dim * dim + dim),
        "key": depth * dim * dim,
        "value": depth * (dim * dim + dim),
        "attention output": depth * (dim * dim + dim),
        "mlp in": depth * (4 * dim * dim + 4 * dim),
        "mlp out": depth * (4 * dim * dim + dim),
        "norm": (2 * depth + 1) * 2 * dim,
        "patch embedding": 3 * 7 * 7 * dim + dim,
        "other": 0,
    }
    layers = mask.by_layer()
    assert [label for label, _, _ in layers] == ["embed", *(f"block {i}" for i in range(depth)), "final norm", "other"]
    assert sum(active for _, active, _ in layers) == mask.active and sum(allowed for _, _, allowed in layers) == mask.eligible_count
    assert layers[0][2] == eligible_of["patch embedding"] and layers[-2][2] == 2 * dim and layers[-1][1:] == (0, 0)


def test_composition_knows_the_names_of_hugging_face() -> None:
    block = "backbone.encoder.layer.11"
    kinds = {
        f"{block}.attention.attention.query.bias": "query",
        f"{block}.attention.attention.key.weight": "key",
        f"{block}.attention.v_proj.weight": "value",
        f"{block}.attention.output.dense.weight": "attention output",
        f"{block}.intermediate.dense.weight": "mlp in",
        f"{block}.output.dense.bias": "mlp out",
        f"{block}.layernorm_before.weight": "norm",
        "backbone.layernorm.bias": "norm",
        "backbone.embeddings.patch_embeddings.projection.weight": "patch embedding",
        "backbone.embeddings.cls_token": "other",
    }
    for name, kind in kinds.items():
        mask = Mask({name: torch.ones(6, dtype=torch.bool)})
        assert mask.composition()[kind]["active"] == 6
        label = "block 11" if "layer.11" in name else "final norm" if "layernorm" in name else "embed"
        assert mask.by_layer() == [(label, 6, 6)]


def test_freezing_stops_the_gradient_of_tensors_without_active_weights() -> None:
    model = Small()
    model.second.weight.requires_grad_(False)
    masks = {name: torch.zeros(param.shape, dtype=torch.bool) for name, param in model.named_parameters()}
    masks["first.weight"][2, 3] = masks["second.weight"][0, 0] = True
    Mask(masks).freeze(model)
    trains = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trains == ["first.weight"]  # and what was frozen before stays so


@pytest.mark.parametrize("case", ["absent", "surplus", "shape"])
def test_a_mask_that_does_not_fit_the_model_freezes_nothing(case: str) -> None:
    model = Small()
    masks = {name: torch.zeros(param.shape, dtype=torch.bool) for name, param in model.named_parameters()}
    if case == "absent":
        del masks["head.bias"]
    else:
        masks["more" if case == "surplus" else "norm.bias"] = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(
        UserError, match={"absent": r"missing head\.bias", "surplus": "surplus more", "shape": r"is \[3\], needs \[9\]"}[case]
    ):
        Mask(masks).freeze(model)
    assert all(param.requires_grad for param in model.parameters())


def test_every_strategy_says_in_one_line_what_it_does() -> None:
    assert list(STRATEGIES) == [
        "least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random", "qk_only", "random_layerwise",
    ]  # fmt: skip
    assert all(strategy.__doc__ and "\n" not in strategy.__doc__ for strategy in STRATEGIES.values())


@pytest.mark.parametrize("wrong", ["one less", "all", "not eligible", "scores"])
def test_a_rule_of_ones_own_that_keeps_another_number_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    def rule(request: Request) -> Tensor:
        noise = request.noise()
        return {
            "one less": lambda: select(noise, request.eligible, request.count - 1),
            "all": lambda: request.eligible,
            "not eligible": lambda: select(noise, ~request.eligible, request.count),
            "scores": lambda: noise,
        }[wrong]()

    monkeypatch.setitem(STRATEGIES, "own", rule)
    with pytest.raises(UserError, match=r"mask\.strategy: 'own' must return bool \[.*\] with exactly .* got"):
        build_mask(tiny(), "own", 0.0001)


def test_what_one_mask_has_paused_the_next_may_choose_again() -> None:
    model, images = tiny(), pictures(4)
    whole = calibrate_mask(model, images, strategy="highest_magnitude", density=0.1)
    first = calibrate_mask(model, images, strategy="qk_only", density=0.1)
    optimizer = SparseSGDM(model.named_parameters(), lr=0.1, masks=first)
    assert calibrate_mask(model, images, strategy="highest_magnitude", density=0.1) == whole
    optimizer.set_masks(whole)
    first.freeze(model)
    assert calibrate_mask(model, images, strategy="highest_magnitude", density=0.1) == whole


def test_a_mask_of_a_model_with_frozen_blocks_is_of_what_trains() -> None:
    model, images = create_model("tiny", 10, image_size=28, freeze_blocks=4), torch.randn(4, 3, 28, 28)
    mask = calibrate_mask(model, images, density=0.1, rounds=1)
    still = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert still and not any(bool(mask.as_dict()[name].any()) for name in still if name in mask.as_dict())
    assert abs(mask.density - 0.1) < 1e-4
    model.requires_grad_(False)  # nothing trains yet: all is in question
    assert any(bool(calibrate_mask(model, images, density=0.1, rounds=1).as_dict()[name].any()) for name in still if name in mask.as_dict())


def test_frozen_parameters_are_not_eligible() -> None:
    model = tiny()
    frozen = [name for name, _ in model.named_parameters() if name.startswith(("patch_embed", "blocks.0."))]
    mask = build_mask(model, "random", 0.1, frozen=frozen)
    whole = eligible(model)
    assert mask.eligible_count == sum(int(whole[name].sum()) for name in whole if name not in frozen)
    assert mask.active == round(0.1 * mask.eligible_count) and not any(bool(mask.as_dict()[name].any()) for name in frozen)


@pytest.mark.parametrize("wrap", ["_orig_mod", "module"])
def test_the_head_of_a_wrapped_model_is_its_head(wrap: str) -> None:
    found = eligible(nn.ModuleDict({wrap: tiny()}))
    assert not bool(found[f"{wrap}.head.weight"].any()) and bool(found[f"{wrap}.blocks.0.attn.qkv.weight"].all())


class Torchs(nn.Module):
    """A model on torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).mean(1))
        return out


def test_torchs_own_attention_is_scored_and_masked_with_its_projections() -> None:
    """In eval mode torch takes a shortcut that has no gradient; and its projections are no Linear modules."""
    model, images = Torchs(), torch.randn(6, 5, 8)
    found = sensitivity(model, images, labels_from="exact")
    alone = [sensitivity(model, image[None], labels_from="exact", chunk=1) for image in images]
    assert all(torch.allclose(found[name], sum(each[name] for each in alone), rtol=1e-4) for name in found)  # type: ignore[arg-type]
    assert torch.backends.mha.get_fastpath_enabled()
    allowed = eligible(model)
    assert bool(allowed["layer.self_attn.in_proj_weight"].all())
    assert allowed["layer.self_attn.in_proj_bias"].tolist() == [True] * 8 + [False] * 8 + [True] * 8  # softmax does not see the keys' bias
    assert float(found["layer.self_attn.in_proj_bias"][8:16].max()) < 1e-9 < float(found["layer.self_attn.in_proj_bias"][:8].max())
    mask = calibrate_mask(model, images, density=0.2, rounds=2)
    assert mask.active == round(0.2 * mask.eligible_count)
    shares = build_mask(model, "qk_only", 0.05).composition()
    assert shares["query"]["share"] + shares["key"]["share"] == 1
