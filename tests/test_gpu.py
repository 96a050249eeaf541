"""What only a GPU can show. Run by `make test-gpu`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EMBEDDED

from fedlens.data.dataset import load_dataset
from fedlens.lens.mask_rules import STRATEGIES, calibrate_mask, select
from fedlens.lens.merging import RULES
from fedlens.lens.sensitivity import sensitivity
from fedlens.models import create_model
from fedlens.seeding import torch_rng
from fedlens.tasks.image import Augment, ImageTask, Pipeline

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler warns about itself
CUDA = torch.device("cuda")


def test_features_equal_timm_s_to_1e_4(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    theirs = timm.create_model("vit_small_patch16_224", num_classes=0).eval().to(CUDA)
    torch.save(theirs.state_dict(), tmp_path / "dino.pth")
    ours = create_model("dino_vits16", 100, weights=tmp_path / "dino.pth").eval().to(CUDA)
    images = torch.randn(4, 3, 224, 224, device=CUDA)
    with torch.inference_mode():
        assert torch.allclose(ours.features(images), theirs(images), atol=1e-4)  # type: ignore[operator]


def test_a_timm_backbone_is_adapted() -> None:
    pytest.importorskip("timm")
    model = create_model("timm:vit_tiny_patch16_224", 7, image_size=64).to(CUDA)
    assert model(torch.randn(2, 1, 64, 64, device=CUDA)).shape == (2, 7)


def test_batches_are_the_same_on_cpu_and_gpu() -> None:
    data = load_dataset("fashion_mini")
    pipeline, augment, index = Pipeline(56, data.mean, data.std), Augment(2, True, 2), torch.randperm(len(data.train))[:32]
    draws = augment.draw((32,), torch_rng(0, "t"))
    tasks = [ImageTask(pipeline, augment, d) for d in (torch.device("cpu"), CUDA)]
    assert tasks[1].samples(data.train).resident is not None
    a, b = (task.batch(task.samples(data.train), index, draws)[0].cpu() for task in tasks)
    assert torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("options", [["train.precision=fp16"], ["train.precision=bf16"], ["train.compile=true"], ["optim.clip_norm=1.0"]])
def test_every_precision_trains(fast_run: Callable[..., Any], options: list[str]) -> None:
    run = fast_run("r", *EMBEDDED, "device=cuda", *options)
    assert run.summary["device"] == "cuda"
    assert run.summary["test_accuracy"] > 0.8


def test_a_gpu_run_resumes_with_its_loss_scale(fast_run: Callable[..., Any]) -> None:
    from fedlens.training.run import load_run

    options = ["device=cuda", "train.precision=fp16", "train.epochs=3", "run.keep_last=3"]
    whole, torn = fast_run("whole", *options), fast_run("torn", *options)
    (torn.path / "summary.json").unlink()
    newest = sorted((torn.path / "checkpoints").iterdir())[-1]
    (newest / "tensors.safetensors").write_bytes(b"")
    resumed = load_run(torn.path).resume()
    worst = max(float((resumed.state[n] - whole.state[n]).abs().max()) for n in whole.state)
    assert worst < 1e-3  # atomics on the GPU sum in any order


@pytest.mark.parametrize("compiled", [False, True])
def test_cohort_equals_sequential_on_the_gpu(fast_run: Callable[..., Any], compiled: bool) -> None:
    options = ["experiment=fedavg_noniid", "data.classes_per_client=2", "federated.clients=20", "federated.rounds=3", "device=cuda"]
    options += ["train.precision=fp32", "federated.dropout_rate=0.3", "federated.straggler_rate=0.5", "optim.batch_size=8"]
    one = fast_run("one", *options, "federated.engine=sequential")
    many = fast_run("many", *options, "federated.engine=cohort", f"train.compile={str(compiled).lower()}")
    for name, tensor in one.state.items():
        assert float((tensor - many.state[name]).norm()) <= 1e-3 * float(tensor.norm()) + 1e-6, name


@pytest.mark.parametrize("strategy", ["random", "qk_only", "least_sensitive"])
def test_masked_cohort_equals_masked_sequential_on_the_gpu(fast_run: Callable[..., Any], strategy: str) -> None:
    options = ["experiment=fedavg_noniid_sparse", "data.classes_per_client=2", "federated.clients=20", "federated.rounds=2", "device=cuda"]
    options += ["train.precision=fp32", "optim.batch_size=8", f"mask.strategy={strategy}", "mask.samples=20", "optim.weight_decay=0.01"]
    one = fast_run("one", *options, "federated.engine=sequential")
    many = fast_run("many", *options, f"mask.path={one.path / 'mask.safetensors'}", "train.compile=true")
    mask = one.mask.as_dict()
    for name, tensor in one.state.items():
        assert float((tensor - many.state[name]).norm()) <= 1e-3 * float(tensor.norm()) + 1e-6, name
        assert torch.equal(many.state[name][~mask[name]], many.start[name][~mask[name]]), name


def test_a_gpu_selects_and_calibrates_the_masks_of_a_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    for scores in (torch.rand(100_000, generator=g), torch.randint(3, (100_000,), generator=g).float()):
        among = torch.rand(100_000, generator=g) < 0.7
        for lowest in (True, False):
            assert torch.equal(select(scores.to(CUDA), among.to(CUDA), 20_000, lowest).cpu(), select(scores, among, 20_000, lowest))
    images = torch.rand(2, 3, 28, 28, generator=g).double()
    for strategy in STRATEGIES:
        model = create_model("tiny", 10, weights="pretrained", image_size=28).double()
        on_cpu = calibrate_mask(model, images, strategy=strategy)
        on_gpu = calibrate_mask(model.to(CUDA), images.to(CUDA), strategy=strategy)
        assert on_gpu.iou(on_cpu) > 0.9999 and on_gpu.active == on_cpu.active


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_gpu_merges_as_a_cpu(rule: str) -> None:
    g = torch.Generator().manual_seed(0)
    deltas, weights = torch.randn(7, 50_000, generator=g), torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    deltas[:, ::5] = deltas[:, ::5].round()  # equal magnitudes: those of lower index stay, here as there
    options = {"fishers": torch.rand(7, 50_000, generator=g)} if rule == "fisher" else {}
    on_gpu = RULES[rule](deltas.to(CUDA), weights.to(CUDA), **options)
    assert torch.allclose(on_gpu.cpu(), RULES[rule](deltas, weights, **options), rtol=1e-5, atol=1e-6)


def test_a_gpu_draws_the_labels_of_a_cpu_and_gives_its_sensitivities() -> None:
    model = create_model("tiny", 10, weights="pretrained", image_size=28).double()
    images = torch.rand(24, 3, 28, 28, generator=torch.Generator().manual_seed(0)).double()
    on_cpu = sensitivity(model, images)
    on_gpu = sensitivity(model.to(CUDA), images.to(CUDA), chunk=7)
    for name, scores in on_gpu.items():
        assert torch.allclose(scores.cpu(), on_cpu[name], rtol=1e-5, atol=1e-5 * float(on_cpu[name].max())), name
    with torch.autocast("cuda", torch.bfloat16):
        assert all(bool(f.isfinite().all()) for f in sensitivity(model.float(), images.float().to(CUDA)).values())
