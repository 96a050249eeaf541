"""Checkpoints in every layout people have, loaded strictly; the public download against local files."""

import hashlib
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedlens.errors import UserError
from fedlens.models import SHAPES, create_model, weights
from fedlens.models.vit import ViT, ViTShape
from fedlens.models.weights import PublicFile, load_weights, read_tensors

CONVERT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "dino_from_dinov2.py"))  # its functions; nothing is converted
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SHAPE = ViTShape(patch=8, dim=24, depth=2, heads=2, image_size=32)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """A small `dino_vits16` and the tensors of its public checkpoint: no head."""
    monkeypatch.setitem(SHAPES, "dino_vits16", SHAPE)
    return {n: torch.randn_like(t) for n, t in ViT(SHAPE, 3).state_dict().items() if not n.startswith("head.")}


def to_huggingface(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """DINO's names -> those of transformers' ViTModel, as facebook/dino-vits16 has them."""
    out = {
        "embeddings.cls_token": state["cls_token"],
        "embeddings.position_embeddings": state["pos_embed"],
        "embeddings.patch_embeddings.projection.weight": state["patch_embed.proj.weight"],
        "embeddings.patch_embeddings.projection.bias": state["patch_embed.proj.bias"],
        "layernorm.weight": state["norm.weight"],
        "layernorm.bias": state["norm.bias"],
        "pooler.dense.weight": torch.zeros(24, 24),
        "pooler.dense.bias": torch.zeros(24),
    }
    for i in range(2):
        for kind in ("weight", "bias"):
            ours, theirs = f"blocks.{i}.", f"encoder.layer.{i}."
            for part, value in zip(("query", "key", "value"), state[f"{ours}attn.qkv.{kind}"].chunk(3), strict=True):
                out[f"{theirs}attention.attention.{part}.{kind}"] = value
            out[f"{theirs}attention.output.dense.{kind}"] = state[f"{ours}attn.proj.{kind}"]
            out[f"{theirs}intermediate.dense.{kind}"] = state[f"{ours}mlp.fc1.{kind}"]
            out[f"{theirs}output.dense.{kind}"] = state[f"{ours}mlp.fc2.{kind}"]
            out[f"{theirs}layernorm_before.{kind}"] = state[f"{ours}norm1.{kind}"]
            out[f"{theirs}layernorm_after.{kind}"] = state[f"{ours}norm2.{kind}"]
    return out


def assert_loaded(path: Path, want: dict[str, Tensor]) -> None:
    got = create_model("dino_vits16", 3, weights=path, image_size=32).state_dict()
    assert all(torch.equal(got[n], t) for n, t in want.items())


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"teacher": {f"module.backbone.{n}": t for n, t in s.items()}, "epoch": 3}])
def test_the_torch_hub_layout_loads(small: dict[str, Tensor], tmp_path: Path, wrap: object) -> None:
    torch.save(wrap(small), tmp_path / "dino.pth")  # type: ignore[operator]
    assert_loaded(tmp_path / "dino.pth", small)


def test_timm_s_layout_loads_with_its_head(small: dict[str, Tensor], tmp_path: Path) -> None:
    state = small | {"head.weight": torch.randn(3, 24), "head.bias": torch.randn(3)}
    save_file(state, tmp_path / "model.safetensors")
    assert_loaded(tmp_path / "model.safetensors", state)


def test_hugging_face_s_layout_loads(small: dict[str, Tensor], tmp_path: Path) -> None:
    save_file({n: t.contiguous().clone() for n, t in to_huggingface(small).items()}, tmp_path / "model.safetensors")
    assert_loaded(tmp_path / "model.safetensors", small)


def test_a_checkpoint_of_two_models_is_refused(small: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(
        {**{f"model.{n}": t for n, t in small.items()}, **{f"backbone.{n}": torch.zeros_like(t) for n, t in small.items()}},
        tmp_path / "two.pth",
    )
    with pytest.raises(UserError, match="two models"):
        assert_loaded(tmp_path / "two.pth", small)


def test_what_is_left_out_of_a_checkpoint_may_be_anything(small: dict[str, Tensor], tmp_path: Path) -> None:
    beside = {"head.mlp.1.num_batches_tracked": torch.tensor(3), "mask_token": torch.full((1, 24), float("nan"))}
    torch.save(small | beside, tmp_path / "dino.pth")
    assert_loaded(tmp_path / "dino.pth", small)
    torch.save(small | {"norm.bias": torch.full((24,), float("nan"))}, tmp_path / "dino.pth")
    with pytest.raises(UserError, match="not finite"):
        assert_loaded(tmp_path / "dino.pth", small)


def test_a_hugging_face_checkpoint_that_is_not_sound_is_one_line(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "image_size": 32,
        "patch_size": 8,
    }
    model = transformers.ViTModel(transformers.ViTConfig(**shape))
    model.save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(file.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
    with torch.no_grad():
        model.layernorm.weight[3] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    transformers.ViTMAEModel(transformers.ViTMAEConfig(**shape)).save_pretrained(tmp_path / "mae")
    for name, why in (("other", "cannot be loaded"), ("nan", "not finite"), ("mae", "draws at random")):
        with pytest.raises(UserError, match=why):
            create_model(f"hf:{tmp_path / name}", 5, weights="pretrained", image_size=32)


def test_hugging_face_s_dinov2_layout_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8, mlp_ratio=4)
    theirs = transformers.Dinov2Model(config).eval()
    model = ViT(ViTShape(8, 24, 2, 2, 32, layer_scale=True), 3).eval()
    load_weights(model, theirs.state_dict(), "Dinov2Model")
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.allclose(model.features(images), theirs(images).last_hidden_state[:, 0], atol=1e-4)


def test_hugging_face_s_vit_computes_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96, image_size=32, patch_size=8, layer_norm_eps=1e-6
    )
    theirs = transformers.ViTModel(config, add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path)
    model = ViT(SHAPE, 3).eval()
    load_weights(model, read_tensors(tmp_path / "model.safetensors"), "ViTModel")
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.allclose(model.features(images), theirs(images).last_hidden_state[:, 0], atol=1e-4)


def test_a_hugging_face_backbone_is_adapted_and_trains(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    model = create_model(f"hf:{tmp_path}", 5, weights="pretrained", image_size=32)
    model(torch.randn(2, 1, 32, 32)).sum().backward()
    assert model.head.weight.shape == (5, 24)  # type: ignore[union-attr]
    assert model.head.weight.grad is not None  # type: ignore[union-attr]


def test_a_hugging_face_backbone_without_its_pooler_gives_the_class_token(tmp_path: Path) -> None:
    """transformers would put a random layer there."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    theirs = transformers.ViTModel(config, add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    for seed in (0, 1):
        model = create_model(f"hf:{tmp_path}", 5, weights="pretrained", image_size=32, seed=seed).eval()
        with torch.inference_mode():
            assert torch.allclose(model.features(images), theirs(images).last_hidden_state[:, 0])  # type: ignore[operator]
    save_file(
        {n: t.clone() for n, t in theirs.state_dict().items() if "layernorm.bias" not in n},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(UserError, match=r"lacks layernorm\.bias"):
        create_model(f"hf:{tmp_path}", 5, weights="pretrained", image_size=32)


def test_a_hugging_face_backbone_takes_other_sizes_or_says_that_it_does_not(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    config.save_pretrained(tmp_path / "vit")
    assert create_model(f"hf:{tmp_path / 'vit'}", 5, image_size=64)(torch.randn(2, 3, 64, 64)).shape == (2, 5)
    with pytest.raises(UserError, match=r"model\.image_size must be a size that .* takes, got 4"):
        create_model(f"hf:{tmp_path / 'vit'}", 5, image_size=4)
    transformers.BertConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(UserError, match="must be a size that"):
        create_model(f"hf:{tmp_path / 'bert'}", 5, image_size=32)


def test_dino_s_full_checkpoint_and_those_of_compiled_and_wrapped_models_are_read(small: dict[str, Tensor], tmp_path: Path) -> None:
    projection = {"head.mlp.0.weight": torch.zeros(8, 24), "head.last_layer.weight_v": torch.zeros(8, 8)}
    layouts = {
        "teacher": {"teacher": {**{f"backbone.{n}": t for n, t in small.items()}, **projection}},
        "compiled": {f"_orig_mod.{n}": t for n, t in small.items()},
        "lightning": {"state_dict": {f"model._orig_mod.{n}": t for n, t in small.items()}},
    }
    for name, found in layouts.items():
        torch.save(found, tmp_path / f"{name}.pth")
        model = create_model("dino_vits16", 3, weights=tmp_path / f"{name}.pth", image_size=32)
        assert all(torch.equal(model.state_dict()[n], t) for n, t in small.items()), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: (100 * t).to(torch.int8), "is int8"),
        (lambda t: t * float("nan"), "not finite"),
        (lambda t: t.to_sparse(), "no plain tensor"),
        (lambda t: t.to("meta"), "no plain tensor"),
    ],
)
def test_what_is_no_number_is_refused_by_name(small: dict[str, Tensor], change: object, message: str) -> None:
    small["norm.weight"] = change(small["norm.weight"])  # type: ignore[operator]
    with pytest.raises(UserError, match=rf"norm\.weight .*{message}|norm\.weight {message}"):
        load_weights(ViT(SHAPE, 3), small, "a file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm.bias"), r"missing norm\.bias"),
        (lambda s: s.update(extra=torch.zeros(1)), "surplus extra"),
        (lambda s: s.update({"norm.weight": torch.zeros(7)}), r"norm\.weight is \[7\], needs \[24\]"),
        (lambda s: s.update({"head.weight": torch.zeros(9, 24), "head.bias": torch.zeros(9)}), r"head\.weight is \[9, 24\]"),
        (lambda s: s.update({"head.weight": torch.zeros(3, 24)}), r"missing head\.bias"),
        (lambda s: [s.update({f"student.{n}": s.pop(n)}) for n in list(s)], "missing cls_token"),
    ],
)
def test_what_does_not_fit_is_an_error_that_lists_it(small: dict[str, Tensor], tmp_path: Path, change: object, message: str) -> None:
    change(small)  # type: ignore[operator]
    torch.save(small, tmp_path / "bad.pth")
    with pytest.raises(UserError, match=message):
        create_model("dino_vits16", 3, weights=tmp_path / "bad.pth", image_size=32)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"^model\.weights: [^\n]*$"):
        create_model("tiny", 3, weights=tmp_path / name, image_size=28)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    torch.save({"w": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(UserError, match="cannot be read"):
        create_model("tiny", 3, weights=tmp_path / "evil.pth", image_size=28)
    assert not (tmp_path / "ran").exists()


def test_positions_are_resized_to_the_wanted_image_size(small: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(small, tmp_path / "dino.pth")
    model = create_model("dino_vits16", 3, weights=tmp_path / "dino.pth", image_size=48)
    assert model.pos_embed.shape == (1, 37, 24)  # type: ignore[union-attr]
    reference = create_model("dino_vits16", 3, weights=tmp_path / "dino.pth", image_size=32)
    images = torch.randn(2, 3, 48, 48)  # the model of the other size interpolates while it runs: the same function
    with torch.inference_mode():
        assert torch.allclose(model.features(images), reference.features(images), atol=1e-5)  # type: ignore[operator]


def publish(path: Path, monkeypatch: pytest.MonkeyPatch, digest: str | None = None) -> None:
    data = path.read_bytes()
    public = PublicFile(path.as_uri(), digest or hashlib.sha256(data).hexdigest(), len(data))
    monkeypatch.setitem(weights.PUBLIC, "dino_vits16", public)


def test_pretrained_fetches_checks_and_caches_the_public_file(
    small: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(small, tmp_path / "published.pth")
    publish(tmp_path / "published.pth", monkeypatch)
    assert_loaded(weights.fetch_public("dino_vits16"), small)
    (tmp_path / "published.pth").unlink()  # the second time it comes from the cache
    got = create_model("dino_vits16", 3, weights="pretrained", image_size=32).state_dict()
    assert all(torch.equal(got[n], t) for n, t in small.items())


def test_a_public_file_with_the_wrong_digest_is_refused(small: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(small, tmp_path / "published.pth")
    publish(tmp_path / "published.pth", monkeypatch, digest="0" * 64)
    with pytest.raises(UserError, match="0000"):
        create_model("dino_vits16", 3, weights="pretrained", image_size=32)
    assert not weights.public_path("dino_vits16").exists()
    weights.cache_folder().mkdir(parents=True, exist_ok=True)
    weights.public_path("dino_vits16").write_bytes(b"tampered")
    with pytest.raises(UserError, match="delete it"):
        create_model("dino_vits16", 3, weights="pretrained", image_size=32)


def test_timm_is_asked_for_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(UserError, match=r"fedlens\[timm\]"):
        create_model("timm:vit_tiny_patch16_224", 3)


# --- a ViT-S/16 from DINOv2


def test_without_its_layer_scale_a_converted_model_computes_what_it_did() -> None:
    shape = ViTShape(patch=8, dim=24, depth=2, heads=2, image_size=32, layer_scale=True)
    scaled = ViT(shape, 3, seed=1)
    with torch.no_grad():
        for name, param in scaled.named_parameters():
            if name.endswith("gamma"):
                param.uniform_(-2, 2, generator=torch.Generator().manual_seed(0))
    plain = ViT(replace(shape, layer_scale=False), 3)
    found = CONVERT["as_vit16"]({**scaled.state_dict(), "mask_token": torch.zeros(1, 24)}, patch=8, image_size=32)
    plain.load_state_dict(found)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(plain(images), scaled(images), atol=1e-5)


def test_a_resized_kernel_says_of_an_enlarged_patch_what_the_old_one_said_of_the_patch() -> None:
    rng = torch.Generator().manual_seed(0)
    kernel, x = torch.randn(5, 3, 14, 14, generator=rng, dtype=torch.float64), torch.randn(4, 3, 14, 14, generator=rng, dtype=torch.float64)
    larger = torch.nn.functional.interpolate(x, size=(16, 16), mode="bilinear", align_corners=False)
    resized = CONVERT["resized_kernel"](kernel, 16)
    assert resized.shape == (5, 3, 16, 16)
    assert torch.allclose(torch.einsum("dcij,ncij->nd", resized, larger), torch.einsum("dcij,ncij->nd", kernel, x))


def test_resampled_positions_keep_the_class_token_and_a_constant_grid() -> None:
    positions = torch.cat([torch.full((1, 1, 4), 7.0), torch.full((1, 37**2, 4), 3.0)], dim=1).double()
    found = CONVERT["resampled_positions"](positions, 14)
    assert found.shape == (1, 197, 4) and bool((found[:, 0] == 7).all()) and torch.allclose(found[:, 1:], torch.tensor(3.0).double())


def test_a_checkpoint_of_something_else_is_not_converted() -> None:
    with pytest.raises(UserError, match="convert"):
        CONVERT["as_vit16"]({"conv1.weight": torch.zeros(1)})


@pytest.mark.realdata
@pytest.mark.skipif(not (SHARED / "prepare.py").exists(), reason="the shared data is not here")
def test_the_script_makes_the_backbone_of_the_study_to_the_bit(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SHARED / "prepare.py"), str(tmp_path)], check=True, capture_output=True)
    script, weights = Path(__file__).parents[1] / "scripts/dino_from_dinov2.py", tmp_path / "weights"
    subprocess.run([sys.executable, str(script), str(tmp_path / "made.pth"), "--weights", str(weights / "dinov2_vits14.pth")], check=True)
    made, known = (torch.load(path, weights_only=True) for path in (tmp_path / "made.pth", weights / "dino_vits16_from_dinov2.pth"))
    assert made.keys() == known.keys() and all(torch.equal(made[name], tensor) for name, tensor in known.items())
