"""The diagonal Fisher information: per-sample squares, equal to a plain loop, additive over clients, independent of the batch."""

import logging

import pytest
import torch
from torch import Tensor, nn

from fedlens.errors import UserError
from fedlens.lens import sensitivity as module
from fedlens.lens.sensitivity import _hash, _hash_key, sensitivity
from fedlens.models import create_model
from fedlens.models.vit import ViT

CPU = torch.device("cpu")
VARIANTS = [(labels, score) for labels in ("model", "data", "exact") for score in ("log_prob", "logit")]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_labels(count: int, classes: int) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(7))


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))


def cnn() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(6),
        nn.Linear(6, 4),
    )


class Attends(nn.Module):
    """Fused attention, which vmap cannot batch by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, tokens, 6]
        q, k, v = self.qkv(tokens)[:, None].chunk(3, dim=-1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


class Stubborn(nn.Module):
    """A branch on the data: no vmap can follow it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.unused = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def tiny() -> nn.Module:
    if not hasattr(ViT, "client_axis"):
        ViT.client_axis = True
    return create_model("tiny", 10, weights="pretrained", image_size=28)


SMALL = {
    "mlp": (mlp, (3, 2, 2)),
    "cnn": (cnn, (3, 9, 9)),
    "attends": (Attends, (5, 6)),
    "stubborn": (Stubborn, (5,)),
}


def brute(
    model: nn.Module, images: Tensor, labels: Tensor | None, labels_from: str, score: str, names: list[str], seed: int = 0
) -> dict[str, Tensor]:
    """One image, one class at a time, by plain autograd; the drawn label by searching the distribution function."""
    model.eval()
    params = dict(model.named_parameters())
    wanted = [params[name] for name in names]
    uniform = _hash(images, _hash_key(images[0].numel(), seed, CPU))
    total = {name: torch.zeros_like(params[name], dtype=torch.float64) for name in names}
    for i in range(len(images)):
        logits = model(images[i : i + 1])[0]
        p = logits.detach().double().softmax(0)
        if labels_from == "exact":
            weights = {c: float(p[c]) for c in range(len(p))}
        elif labels_from == "data":
            weights = {int(labels[i]): 1.0}  # type: ignore[index]
        else:
            weights = {int(torch.searchsorted(p.cumsum(0), uniform[i].double(), right=True)): 1.0}
        for c, weight in weights.items():
            value = logits.log_softmax(0)[c] if score == "log_prob" else logits[c]
            grads = torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
            for name, grad in zip(names, grads, strict=True):
                if grad is not None:
                    total[name] += weight * grad.double() ** 2
    return total


def assert_close(found: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Every entry to a relative 1e-5; below that, to as much of the tensor's largest entry, for the exact zeros of theory."""
    assert list(found) == list(want)
    for name in want:
        assert found[name].shape == want[name].shape
        scale = float(want[name].abs().max())
        assert torch.allclose(found[name].double(), want[name].double(), rtol=rtol, atol=rtol * scale + 1e-12), name


@pytest.mark.parametrize(("labels_from", "score"), VARIANTS)
@pytest.mark.parametrize("kind", SMALL)
def test_any_module_gives_what_a_loop_over_samples_gives(kind: str, labels_from: str, score: str) -> None:
    make, shape = SMALL[kind]
    model, images, labels = make(), randn(7, *shape), some_labels(7, 4)
    names = [name for name, _ in model.named_parameters()]
    found = sensitivity(model, images, labels, labels_from=labels_from, score=score)
    assert_close(found, brute(model, images, labels, labels_from, score, names))


@pytest.mark.parametrize(("labels_from", "score"), VARIANTS)
def test_the_vit_gives_what_a_loop_over_samples_gives(labels_from: str, score: str) -> None:
    model, images, labels = tiny(), randn(3, 3, 28, 28), some_labels(3, 10)
    names = [name for name, _ in model.named_parameters()]
    assert_close(
        sensitivity(model, images, labels, labels_from=labels_from, score=score), brute(model, images, labels, labels_from, score, names)
    )


@pytest.mark.parametrize("kind", [*SMALL, "tiny"])
def test_in_double_precision_the_loop_is_met_entry_by_entry(kind: str) -> None:
    make, shape = SMALL.get(kind, (tiny, (3, 28, 28)))
    model, images = make().double(), randn(3, *shape).double()
    names = [name for name, _ in model.named_parameters()]
    found, want = sensitivity(model, images), brute(model, images, None, "model", "log_prob", names)
    assert all(torch.allclose(found[name], want[name], rtol=1e-7, atol=1e-25) for name in names)


def test_a_subset_of_names_is_answered_exactly_and_frozen_or_not() -> None:
    model, images = tiny(), randn(4, 1, 28, 28)
    names = ["blocks.2.attn.qkv.weight", "blocks.0.norm1.bias", "cls_token", "patch_embed.proj.weight"]
    model.requires_grad_(False)
    assert_close(
        sensitivity(model, images, names=names, seed=3),
        brute(model.requires_grad_(True), images, None, "model", "log_prob", names, seed=3),
    )


def test_the_vit_through_vmap_is_the_vit_with_a_client_axis() -> None:
    model, images = tiny(), randn(3, 3, 28, 28)
    stacked = sensitivity(model, images)
    model.client_axis = False  # type: ignore[assignment]
    assert_close(sensitivity(model, images), stacked)


def test_without_names_the_parameters_that_train_are_answered() -> None:
    model = mlp()
    model[1].requires_grad_(False)
    found = sensitivity(model, randn(3, 3, 2, 2))
    assert list(found) == ["2.weight", "2.bias", "5.weight", "5.bias"]


def test_a_model_that_cannot_be_batched_says_so_in_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fedlens"):
        found = sensitivity(Stubborn(), randn(6, 5), chunk=2)
    assert [r.levelname for r in caplog.records] == ["DEBUG"] and "one sample at a time" in caplog.text
    assert not found["unused.weight"].any()  # what the output does not depend on
    assert not any(f.any() for f in sensitivity(Stubborn(), randn(6, 5), names=["unused.bias"]).values())


@pytest.mark.parametrize("labels_from", ["model", "data"])
@pytest.mark.parametrize("kind", ["mlp", "tiny"])
def test_sensitivities_of_clients_add_up_to_the_centralised_one(kind: str, labels_from: str) -> None:
    model = mlp() if kind == "mlp" else tiny()
    images, labels = (randn(24, 3, 2, 2), some_labels(24, 4)) if kind == "mlp" else (randn(9, 3, 28, 28), some_labels(9, 10))
    whole = sensitivity(model, images, labels, labels_from=labels_from)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(5))
    for shards in (order.tensor_split([1, 3, len(images) - 2]), torch.arange(len(images)).split(1), [order]):
        parts = [sensitivity(model, images[s], labels[s], labels_from=labels_from) for s in shards]
        assert_close({name: sum(p[name] for p in parts) for name in whole}, whole)  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["mlp", "tiny"])
def test_the_chunk_does_not_matter(kind: str) -> None:
    model, images = (mlp(), randn(11, 3, 2, 2)) if kind == "mlp" else (tiny(), randn(5, 3, 28, 28))
    whole = sensitivity(model, images)
    for chunk in (1, 2, 4):
        assert_close(sensitivity(model, images, chunk=chunk), whole)


def test_memory_that_runs_out_halves_the_chunk_and_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = mlp(), randn(11, 3, 2, 2)
    whole, sizes, real = sensitivity(model, images), [], module._Sampler.squares

    def scarce(self: object, x: Tensor, *rest: object) -> dict[str, Tensor]:
        sizes.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError("scarce")
        return real(self, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module._Sampler, "squares", scarce)
    assert_close(sensitivity(model, images, chunk=11), whole)
    assert sizes == [11, 6, 3, 3, 3, 2]
    monkeypatch.setattr(module._Sampler, "squares", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none at all")))
    with pytest.raises(torch.OutOfMemoryError):
        sensitivity(model, images)


def test_the_default_chunk_keeps_the_gradients_within_bounds() -> None:
    big = dict(nn.Linear(4000, 4000).named_parameters())
    assert module._default_chunk(big, CPU) * 4000 * 4001 * 4 <= module.CPU_BYTES
    assert module._default_chunk(dict(mlp().named_parameters()), CPU) == module.MOST
    assert module._default_chunk({"huge": nn.Parameter(torch.empty(2**28, device="meta"))}, CPU) == 1


def test_the_exact_expectation_of_a_softmax_regression_is_the_closed_form() -> None:
    model, x = nn.Linear(6, 5), randn(40, 6)
    with torch.no_grad():
        model.weight.copy_(randn(5, 6, seed=1))
    p = model(x).detach().softmax(1)
    found = sensitivity(model, x, labels_from="exact")
    spread = p * (1 - p)  # [n, classes]
    assert_close(found, {"weight": torch.einsum("nc,nd->cd", spread, x**2), "bias": spread.sum(0)})
    found = sensitivity(model, x, labels_from="exact", score="logit")
    assert_close(found, {"weight": torch.einsum("nc,nd->cd", p, x**2), "bias": p.sum(0)})
    # and one drawn label a sample estimates it
    drawn = sensitivity(model, x.repeat(500, 1), uniform=torch.rand(20_000, generator=torch.Generator().manual_seed(0)), reduce="mean")
    assert torch.allclose(drawn["bias"], spread.mean(0), rtol=0.05)


def test_the_square_of_the_mean_gradient_is_something_else() -> None:
    model, x, y = mlp().eval(), randn(16, 3, 2, 2), some_labels(16, 4)
    found = sensitivity(model, x, y, labels_from="data")
    loss = nn.functional.cross_entropy(model(x), y)
    wrong = [16 * g**2 for g in torch.autograd.grad(loss, list(model.parameters()))]
    assert all(float(w.sum()) < 0.7 * float(f.sum()) for w, f in zip(wrong, found.values(), strict=True))


def test_drawn_labels_follow_the_models_distribution() -> None:
    model, x = nn.Linear(3, 4, bias=False), randn(20_000, 3, seed=2)
    with torch.no_grad():
        model.weight.copy_(randn(4, 3, seed=3))
    # ∂ logit_y / ∂ bias_c = 1 where c was drawn: the bias's sensitivity counts the labels
    counted = nn.Linear(3, 4)
    counted.load_state_dict({"weight": model.weight, "bias": torch.zeros(4)})
    p = model(x).detach().softmax(1)
    want, variance = p.sum(0), (p * (1 - p)).sum(0)
    for seed in (0, 1, 2):
        counts = sensitivity(counted, x, score="logit", seed=seed, names=["bias"])["bias"]
        assert float(counts.sum()) == len(x)
        assert bool(((counts - want) ** 2 / variance < 16).all())  # within four standard deviations


def test_the_hash_is_uniform_and_every_bit_of_an_image_matters() -> None:
    key = _hash_key(12, 0, CPU)
    u = _hash(randn(50_000, 3, 2, 2), key)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    counts = torch.histc(u, bins=20, min=0, max=1)
    assert bool(((counts - 2500) ** 2 / 2500 < 20).all())
    black = torch.zeros(13, 12)
    black[1:] += torch.eye(12) * 2**-140  # the lowest bits of one pixel
    assert len(set(_hash(black, key).tolist())) == 13
    assert not torch.equal(_hash(black, key), _hash(black, _hash_key(12, 1, CPU)))


def test_equal_seeds_draw_alike_and_other_seeds_otherwise() -> None:
    model, images = mlp(), randn(40, 3, 2, 2)
    one, again, other = (sensitivity(model, images, seed=s) for s in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.allclose(one["5.bias"], other["5.bias"], rtol=1e-3)


def test_copies_of_an_image_count_each() -> None:
    model, images = mlp(), randn(3, 3, 2, 2)
    once = sensitivity(model, images)
    thrice = sensitivity(model, images.repeat(3, 1, 1, 1))
    assert_close(thrice, {name: 3 * f for name, f in once.items()})
    mean = sensitivity(model, images.repeat(3, 1, 1, 1), reduce="mean")
    assert_close(mean, {name: f / 3 for name, f in once.items()})


def test_given_uniform_numbers_choose_the_labels() -> None:
    model, images = nn.Linear(3, 4), randn(5, 3)
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.9999999])
    counts = sensitivity(model, images, uniform=uniform, score="logit", names=["bias"])["bias"]
    assert counts.tolist() == [2, 1, 1, 1]


def test_precision_follows_the_parameters() -> None:
    images = randn(4, 3, 2, 2)
    double = sensitivity(mlp().double(), images.double())
    half = sensitivity(mlp().bfloat16(), images.bfloat16())
    assert {f.dtype for f in double.values()} == {torch.float64} and {f.dtype for f in half.values()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sensitivity(tiny(), randn(2, 3, 28, 28), uniform=torch.tensor([0.3, 0.6]))
    plain = sensitivity(tiny(), randn(2, 3, 28, 28), uniform=torch.tensor([0.3, 0.6]))
    assert {f.dtype for f in mixed.values()} == {torch.float32}
    assert torch.allclose(mixed["head.weight"].sum(), plain["head.weight"].sum(), rtol=0.05)


def test_the_model_is_left_as_it_was_even_after_an_error() -> None:
    model = mlp().train()
    model[2].eval()
    model[1].weight.requires_grad_(False)
    modes = [m.training for m in model.modules()]
    before = {name: (p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    with torch.no_grad():
        sensitivity(model, randn(4, 3, 2, 2))
    with pytest.raises(RuntimeError):
        sensitivity(model, randn(4, 3, 5, 5))
    assert [m.training for m in model.modules()] == modes
    for name, param in model.named_parameters():
        assert param.requires_grad == before[name][0] and torch.equal(param, before[name][1]) and param.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels_from": "modle"}, "Did you mean 'model'"),
        ({"score": "prob"}, "log_prob"),
        ({"reduce": "max"}, "sum, mean"),
        ({"names": ["1.wieght"]}, "Did you mean '1.weight'"),
        ({"names": []}, "no parameter to score"),
        ({"images": torch.zeros(0, 3, 2, 2)}, "at least one image"),
        ({"images": torch.zeros(4, 3, 2, 2, dtype=torch.uint8)}, "floating point"),
        ({"labels_from": "data"}, "one label per image"),
        ({"labels_from": "data", "labels": torch.zeros(3, dtype=torch.long)}, r"\[4\] integers"),
        ({"labels_from": "data", "labels": torch.zeros(4)}, r"\[4\] integers"),
        ({"labels_from": "data", "labels": torch.tensor([0, 1, 2, 4])}, "0 to 3"),
        ({"uniform": torch.tensor([0.0, 0.5, 1.0, 0.2])}, r"in \[0, 1\), one per image"),
        ({"uniform": torch.zeros(3)}, r"in \[0, 1\), one per image"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_wrong_input_is_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sensitivity(**{"model": mlp(), "images": randn(4, 3, 2, 2), **options})  # type: ignore[arg-type]


def test_a_model_that_gives_no_logits_or_is_all_frozen_is_refused() -> None:
    with pytest.raises(UserError, match="frozen"):
        sensitivity(mlp().requires_grad_(False), randn(4, 3, 2, 2))
    with pytest.raises(UserError, match=r"logits \[images, classes\]"):
        sensitivity(nn.Conv2d(3, 2, 1), randn(4, 3, 2, 2))
