"""Batches: the shuffled pass, augmentation against plain per-image code, resizing against Pillow."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import FAST, SMALL_DATA
from PIL import Image

from fedlens.config import OptimConfig
from fedlens.data.dataset import Split, load_dataset
from fedlens.engine.sampling import batch_indices
from fedlens.errors import UserError
from fedlens.optim.schedules import SCHEDULES, learning_rate
from fedlens.overrides import compose
from fedlens.runs.identity import identity
from fedlens.seeding import torch_rng
from fedlens.tasks import Samples, select
from fedlens.tasks.image import Augment, ImageTask, Pipeline, randaugment, resize_matrix, shift_and_flip


def test_a_pass_visits_every_sample_once_before_it_wraps_round() -> None:
    index = batch_indices(10, 5, 4, torch_rng(0, "t")).flatten()
    assert sorted(index[:10].tolist()) == list(range(10))
    assert torch.equal(index[10:], index[:10])


def test_a_client_with_fewer_samples_than_a_batch_repeats_them() -> None:
    index = batch_indices(3, 2, 4, torch_rng(0, "t"))
    assert index.shape == (2, 4)
    assert set(index.flatten().tolist()) == {0, 1, 2}


def test_crop_and_flip_equal_plain_padding_cropping_and_mirroring() -> None:
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    draws = Augment(crop=3, flip=True).draw((6,), torch_rng(1, "t"))
    assert draws["flip"].any()
    assert not draws["flip"].all()
    out = shift_and_flip(images, draws)
    assert out.dtype == torch.uint8
    for i in range(6):
        padded = torch.nn.functional.pad(images[i], (3, 3, 3, 3))
        dy, dx = (int(v) + 3 for v in draws["shift"][i])
        crop = padded[:, dy : dy + 8, dx : dx + 8]
        assert torch.equal(out[i], crop.flip(-1) if draws["flip"][i] else crop)


def test_augmentation_acts_alike_with_any_leading_axes() -> None:
    images = torch.randint(0, 256, (4, 5, 3, 8, 8), dtype=torch.uint8)
    augment = Augment(crop=2, flip=True, randaugment=2)
    draws = augment.draw((4, 5), torch_rng(0, "t"))
    pipeline = Pipeline(12, (0.5,) * 3, (0.25,) * 3)
    whole = pipeline(images, draws)
    assert torch.allclose(whole[2], pipeline(images[2], select(draws, 2)), atol=1e-5)


@pytest.mark.parametrize(("size", "out"), [(32, 224), (28, 28), (28, 14), (64, 48)])
def test_resizing_is_pillows_bicubic(size: int, out: int) -> None:
    image = np.random.default_rng(0).integers(80, 176, (size, size, 3), dtype=np.uint8)  # no overshoot, which Pillow clips twice
    want = np.asarray(Image.fromarray(image).resize((out, out), Image.Resampling.BICUBIC)).astype(np.float32)
    got = Pipeline(out, (0.0,) * 3, (1 / 255,) * 3)(torch.from_numpy(image).permute(2, 0, 1)[None])[0].permute(1, 2, 0).numpy()
    assert np.abs(got - want).max() <= 1.2  # Pillow rounds to whole levels after each axis


@pytest.mark.parametrize(("size", "out"), [(32, 224), (28, 28), (28, 14), (64, 48)])
def test_resizing_like_pillow_clips_and_rounds_between_the_passes(size: int, out: int) -> None:
    image = np.random.default_rng(0).integers(0, 2, (size, size, 3), dtype=np.uint8) * 255  # as much overshoot as there can be
    want = np.asarray(Image.fromarray(image).resize((out, out), Image.Resampling.BICUBIC)).astype(np.float32)
    levels = {}
    for pillow in (True, False):
        pipeline = Pipeline(out, (0.0,) * 3, (1 / 255,) * 3, pillow=pillow)
        levels[pillow] = pipeline(torch.from_numpy(image).permute(2, 0, 1)[None])[0].permute(1, 2, 0).numpy()
    assert np.abs(levels[True] - want).max() <= 1.01
    assert size == out or np.abs(levels[False] - want).max() > 5


def test_data_resize_reaches_the_images_and_leaves_the_names_of_runs_and_caches_without_it_alone() -> None:
    plain, pillow = compose([*FAST, "model.image_size=14"]), compose([*FAST, "model.image_size=14", "data.resize=pillow"])
    assert identity(plain) != identity(pillow)
    data = load_dataset("folder", SMALL_DATA)
    one, other = (ImageTask.of(config, data, torch.device("cpu"), torch.float32) for config in (plain, pillow))
    assert "pillow" not in one.key and "once" not in one.key and one.key != other.key
    (a, labels), (b, _) = (task.batch(task.samples(data.val), torch.arange(8)) for task in (one, other))
    assert len(labels) == 8 and not torch.equal(a, b) and torch.allclose(a, b, atol=0.2)


def test_a_resize_matrix_keeps_constants() -> None:
    assert torch.allclose(resize_matrix(32, 224, torch.device("cpu")).sum(1), torch.ones(224), atol=1e-5)


def test_normalisation_uses_the_given_mean_and_std() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 4, 4)
    out = Pipeline(4, (0.25,), (0.5,))(images)
    assert torch.allclose(out[:, 0, 0, 0], torch.tensor([-0.5, 1.5]))


def test_randaugment_of_magnitude_zero_changes_nothing_and_of_one_does() -> None:
    x = torch.rand(8, 3, 10, 10) * 255
    rng = torch_rng(0, "t")
    for magnitude, same in ((0.0, True), (1.0, False)):
        draws = Augment(randaugment=2, magnitude=magnitude).draw((8,), rng)
        out = randaugment(x, draws["affine"], draws["color"])
        assert torch.allclose(out, x, atol=1e-2) == same
        assert out.min() >= 0
        assert out.max() <= 255


def test_draws_are_a_function_of_their_key() -> None:
    a, b, c = (Augment(4, True, 2).draw((3, 5), torch_rng(0, "augment", e)) for e in (1, 1, 2))
    assert torch.equal(a["shift"], b["shift"])
    assert not torch.equal(a["shift"], c["shift"])


def test_samples_index_inputs_and_labels_together() -> None:
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 1, 2, 2).contiguous()
    samples = Samples(Split(images, torch.arange(10)), torch.device("cpu"))
    index = torch.tensor([[3, 1], [9, 0]])
    batch, labels = samples.batch(index)
    assert batch.shape == (2, 2, 1, 2, 2)
    assert torch.equal(batch[..., 0, 0, 0].long(), labels)


def test_no_augmentation_is_the_identity() -> None:
    images = torch.randint(0, 256, (3, 1, 4, 4), dtype=torch.uint8)
    none = {"shift": torch.zeros(3, 2, dtype=torch.long), "flip": torch.zeros(3, dtype=torch.bool)}
    assert torch.equal(shift_and_flip(images, none), images)


def factor(name: str, progress: float, tick: float = 0.0, **options: Any) -> float:
    """The factor on the learning rate."""
    return learning_rate(OptimConfig(lr=1.0, schedule=name, **options), progress, tick)


def test_schedules_start_at_one_and_end_where_they_say() -> None:
    ends = {"constant": 1.0, "cosine": 0.0, "linear": 0.0, "step": 0.01, "exponential": 0.1}
    for name in SCHEDULES:
        assert factor(name, 0.0) == 1.0
        assert factor(name, 1.0) == pytest.approx(ends[name], abs=1e-12)


@patch.dict(SCHEDULES)
def test_a_registered_schedule_gets_the_options_that_it_names() -> None:
    SCHEDULES["flat"] = lambda progress: 0.5
    SCHEDULES["steps"] = lambda progress, *, milestones: float(len(milestones))
    SCHEDULES["all"] = lambda progress, **options: float(sorted(options) == ["decay", "final", "milestones"])
    assert [factor(name, 0.5, milestones=[0.1, 0.2, 0.3]) for name in ("flat", "steps", "all")] == [0.5, 3.0, 1.0]
    with pytest.raises(UserError, match=r"optim\.schedule must be one of .* Did you mean 'cosine'"):
        factor("cosin", 0.5)


def test_a_cosine_schedule_equals_torch_s() -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
    for step in range(20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(factor("cosine", step / 20, final=0.1))
        optimizer.step()
        scheduler.step()


def test_warm_up_rises_to_the_base_rate_and_never_starts_at_zero() -> None:
    factors = [factor("cosine", s / 100, tick=1 / 100, warmup=0.1) for s in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(1.0)
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
