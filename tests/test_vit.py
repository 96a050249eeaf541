"""The ViT against independent computations, and its client axis against a loop over clients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedlens.errors import UserError
from fedlens.models import create_model
from fedlens.models.adapters import Adapted
from fedlens.models.vit import ViT, ViTShape, attend, resize_positions

SMALL = ViTShape(patch=4, dim=24, depth=3, heads=3, image_size=16, layer_scale=True)


def random_vit(seed: int, shape: ViTShape = SMALL) -> ViT:
    """All parameters away from their initial zeros and ones, so that none can be forgotten unnoticed."""
    model = ViT(shape, 5, seed=seed).double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.3)
    return model


def plain_forward(state: dict[str, Tensor], images: Tensor, shape: ViTShape) -> Tensor:
    """The textbook ViT: a convolution, explicit softmax attention, every token through every layer."""
    x = F.conv2d(images, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=shape.patch).flatten(2).mT
    x = torch.cat([state["cls_token"].expand(len(x), -1, -1), x], 1) + state["pos_embed"]
    b, n, d = x.shape

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    for i in range(shape.depth):
        p = f"blocks.{i}."
        y = norm(x, p + "norm1") @ state[p + "attn.qkv.weight"].T + state[p + "attn.qkv.bias"]
        q, k, v = (t.view(b, n, shape.heads, -1).transpose(1, 2) for t in y.split(d, -1))
        y = (q @ k.mT / math.sqrt(d // shape.heads)).softmax(-1) @ v
        y = y.transpose(1, 2).reshape(b, n, d) @ state[p + "attn.proj.weight"].T + state[p + "attn.proj.bias"]
        x = x + y * state[p + "ls1.gamma"]
        y = norm(x, p + "norm2") @ state[p + "mlp.fc1.weight"].T + state[p + "mlp.fc1.bias"]
        y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
        x = x + (y @ state[p + "mlp.fc2.weight"].T + state[p + "mlp.fc2.bias"]) * state[p + "ls2.gamma"]
    return norm(x, "norm")[:, 0] @ state["head.weight"].T + state["head.bias"]


def test_forward_equals_the_textbook_computation() -> None:
    model, images = random_vit(0), torch.randn(3, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(model(images), plain_forward(dict(model.state_dict()), images, SMALL), atol=1e-10)


def test_gradients_equal_those_of_the_textbook_computation() -> None:
    model, images = random_vit(1), torch.randn(3, 3, 16, 16, dtype=torch.float64)
    ours = torch.autograd.grad(F.cross_entropy(model(images), torch.tensor([0, 1, 2])), list(model.parameters()))
    leaves = {n: t.clone().requires_grad_() for n, t in model.state_dict().items()}
    theirs = torch.autograd.grad(F.cross_entropy(plain_forward(leaves, images, SMALL), torch.tensor([0, 1, 2])), list(leaves.values()))
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-10), name


def test_attention_in_half_precision_on_a_cpu_equals_torchs_own() -> None:
    halves = [torch.randn(2, 3, 7, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in halves]
    toward = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    ours, theirs = attend(*halves), F.scaled_dot_product_attention(*exact)
    assert ours.dtype == torch.bfloat16 and torch.allclose(ours.double(), theirs, atol=0.02)
    assert "attention" not in str(ours.grad_fn).lower()  # torch's own takes six times as long there
    for half, full in zip(
        torch.autograd.grad(ours, halves, toward.to(ours.dtype)), torch.autograd.grad(theirs, exact, toward), strict=True
    ):
        assert torch.allclose(half.double(), full, atol=0.05)


@pytest.mark.parametrize("size", [16, 24])
def test_a_client_axis_on_all_parameters_equals_a_loop_over_clients(size: int) -> None:
    clients = [random_vit(s) for s in range(3)]
    images = torch.randn(3, 2, 3, size, size, dtype=torch.float64)
    stacked = {n: torch.stack([c.state_dict()[n] for c in clients]) for n in clients[0].state_dict()}
    want = torch.stack([c(x) for c, x in zip(clients, images, strict=True)])
    got = functional_call(clients[0], stacked, (images,))
    assert not torch.allclose(want[0], want[1])
    assert torch.allclose(got, want, atol=1e-10)


@pytest.mark.parametrize("chosen", [f"{n}" for n, _ in ViT(SMALL, 5).named_parameters() if "blocks.1." not in n])
def test_a_client_axis_on_one_parameter_alone_equals_a_loop(chosen: str) -> None:
    base, images = random_vit(0), torch.randn(2, 3, 3, 16, 16, dtype=torch.float64)
    values = torch.stack([base.state_dict()[chosen], base.state_dict()[chosen] + 0.5 * torch.randn_like(base.state_dict()[chosen])])
    got = functional_call(base, {chosen: values}, (images,))
    want = torch.stack([functional_call(base, {chosen: v}, (x,)) for v, x in zip(values, images, strict=True)])
    assert torch.allclose(got, want, atol=1e-10)


def test_grey_images_equal_the_same_image_in_three_channels() -> None:
    model, grey = random_vit(0), torch.randn(2, 1, 16, 16, dtype=torch.float64)
    assert torch.equal(model(grey), model(grey.expand(-1, 3, -1, -1)))


def test_positions_of_the_own_grid_are_untouched_and_others_are_interpolated() -> None:
    pos = torch.randn(1, 17, 8)
    assert resize_positions(pos, 4, 4) is pos
    wide = resize_positions(pos, 6, 3)
    assert wide.shape == (1, 19, 8)
    assert torch.equal(wide[:, 0], pos[:, 0])
    flat = torch.ones(1, 17, 8)
    assert torch.allclose(resize_positions(flat, 7, 7), torch.ones(1, 50, 8), atol=1e-6)


def test_dino_vits16_has_the_parameters_of_the_public_checkpoint() -> None:
    model = create_model("dino_vits16", 100)
    backbone = {n: p for n, p in model.named_parameters() if not n.startswith("head.")}
    assert len(backbone) == 150
    assert sum(p.numel() for p in backbone.values()) == 21_665_664
    assert backbone["blocks.11.attn.qkv.weight"].shape == (1152, 384)
    assert model.head.weight.shape == (100, 384)  # type: ignore[union-attr]


def test_dropout_by_a_given_mask_acts_on_the_features() -> None:
    model, images = random_vit(0), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    keep = torch.zeros(2, 24, dtype=torch.float64)
    assert torch.allclose(model(images, keep=keep), model.head.bias.expand(2, -1))


class DropPath(nn.Module):
    drop_prob = 0.2


def test_chance_inside_someone_elses_backbone_is_turned_off_and_ours_before_the_head_stays() -> None:
    block = nn.ModuleDict({"drop": nn.Dropout(0.1), "path": DropPath(), "attention": nn.MultiheadAttention(4, 2, dropout=0.3)})
    model = Adapted(nn.ModuleList([nn.Linear(4, 4), block]), 4, 3, dropout=0.5)
    assert block["drop"].p == block["path"].drop_prob == block["attention"].dropout == 0
    assert model.drop.p == 0.5


def test_a_backbone_of_hugging_face_in_training_has_one_output() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.ViTConfig(**shape, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    model = Adapted(transformers.ViTModel(config, add_pooling_layer=False), 16, 3, dropout=0.0).train()
    images = torch.randn(2, 3, 28, 28)
    assert torch.equal(model(images), model(images))


def test_initialisation_is_a_function_of_the_seed() -> None:
    a, b, c = (create_model("tiny", 10, image_size=28, seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])


def test_freezing_leaves_what_it_says() -> None:
    model = create_model("tiny", 10, image_size=28, freeze_blocks=2)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.norm1.weight", "blocks.1.mlp.fc2.bias"} <= frozen
    assert not any(n.startswith(("blocks.2.", "norm.", "head.")) for n in frozen)
    probe = create_model("tiny", 10, image_size=28, freeze_backbone=True)
    assert [n for n, p in probe.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


def test_images_that_no_patch_divides_are_refused() -> None:
    with pytest.raises(UserError, match="divisible by 4"):
        ViT(SMALL, 5)(torch.zeros(1, 3, 18, 16))


def test_the_tiny_model_is_small() -> None:
    assert sum(p.numel() for p in create_model("tiny", 10, image_size=28).parameters()) <= 1_500_000
