"""What only a GPU can show. Run by `make test-gpu`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EMBEDDED

from fedlens.data.batches import Augment, ImageBank, Pipeline
from fedlens.data.dataset import load_dataset
from fedlens.models import create_model
from fedlens.seeding import torch_rng

pytestmark = pytest.mark.gpu
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
    draws = Augment(2, True, 2).draw((32,), torch_rng(0, "t"))
    banks = [ImageBank(data.train, d) for d in (torch.device("cpu"), CUDA)]
    assert banks[1].resident is not None
    index, pipeline = torch.randperm(len(data.train))[:32], Pipeline(56, data.mean, data.std)
    a, b = (pipeline(bank.images(index), draws.to(bank.device)).cpu() for bank in banks)
    assert torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("options", [["train.precision=fp16"], ["train.precision=bf16"], ["train.compile=true"], ["optim.clip_norm=1.0"]])
def test_every_precision_trains(fast_run: Callable[..., Any], options: list[str]) -> None:
    run = fast_run("r", *EMBEDDED, "device=cuda", *options)
    assert run.summary["device"] == "cuda"
    assert run.summary["test_accuracy"] > 0.8


def test_a_gpu_run_resumes_with_its_loss_scale(fast_run: Callable[..., Any]) -> None:
    from fedlens.training.execute import load_run

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
