"""The closed-form head: additive over clients, equal to a least-squares solver, chosen on validation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlens.data.dataset import load_dataset
from fedlens.data.partition import partition
from fedlens.errors import UserError
from fedlens.models import create_model
from fedlens.models.heads import choose_ridge, ridge_head, ridge_statistics
from fedlens.tasks.image import Pipeline


def task(samples: int = 300, dim: int = 12, classes: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(samples) % classes
    return centres[labels] + 0.7 * torch.randn(samples, dim, generator=g), labels


def test_the_solution_is_that_of_penalised_least_squares() -> None:
    z, y = task()
    weight, bias = ridge_head(*ridge_statistics(z, y, 5), lam=0.7)
    design = np.hstack([z.double().numpy(), np.ones((len(z), 1))])
    stacked = np.vstack([design, np.sqrt(0.7) * np.eye(13)])
    target = np.vstack([np.eye(5)[y.numpy()], np.zeros((13, 5))])
    want = np.linalg.lstsq(stacked, target, rcond=None)[0]
    assert np.allclose(weight.numpy(), want[:-1].T, atol=1e-10)
    assert np.allclose(bias.numpy(), want[-1], atol=1e-10)


@pytest.mark.parametrize("scheme", [{"scheme": "iid"}, {"scheme": "classes", "classes_per_client": 1}])
def test_the_federated_head_is_the_centralised_one(scheme: dict[str, object]) -> None:
    z, y = task()
    shards = partition(y, 10, **scheme)  # type: ignore[arg-type]
    parts = [ridge_statistics(z[s], y[s], 5) for s in shards]
    federated = ridge_head(sum(p[0] for p in parts), sum(p[1] for p in parts), 1.0)  # type: ignore[arg-type]
    central = ridge_head(*ridge_statistics(z, y, 5), 1.0)
    assert all(torch.allclose(a, b, atol=1e-9, rtol=0) for a, b in zip(federated, central, strict=True))


def test_temperature_lowers_the_cross_entropy_and_keeps_the_decisions() -> None:
    z, y = task()
    val_z, val_y = task(seed=1)
    A, b = ridge_statistics(z, y, 5)
    choice = choose_ridge(A, b, val_z, val_y)
    weight, bias = ridge_head(A, b, choice.lam)
    raw, scaled = F.linear(val_z.double(), weight, bias), F.linear(val_z.double(), choice.weight, choice.bias)
    assert torch.equal(raw.argmax(1), scaled.argmax(1))
    assert F.cross_entropy(scaled, val_y) < F.cross_entropy(raw, val_y) - 0.3
    for factor in (0.9, 1.1):  # the minimum, from both sides
        assert F.cross_entropy(scaled * factor, val_y) > F.cross_entropy(scaled, val_y)


def test_bad_input_is_refused() -> None:
    z, y = task()
    with pytest.raises(UserError, match="> 0"):
        ridge_head(*ridge_statistics(z, y, 5), lam=0.0)
    with pytest.raises(UserError, match="300 labels"):
        ridge_statistics(z[:10], y, 5)
    with pytest.raises(UserError, match="labels must be 0 to 3, got '0 to 4'"):
        ridge_statistics(z, y, 4)
    A, b = ridge_statistics(z, y, 5)
    with pytest.raises(UserError, match="positive definite"):
        ridge_head(-A, b, lam=1.0)
    with pytest.raises(UserError, match="there are none"):
        choose_ridge(A, b, z[:0], y[:0])


def test_the_packaged_backbone_probes_ten_points_above_random_initialisation() -> None:
    data = load_dataset("fashion_mini")
    splits = [split.subset(range(count)) for split, count in ((data.train, 1000), (data.val, 300), (data.test, 1000))]
    pipeline = Pipeline(28, data.mean, data.std)

    def probe(weights: str | None) -> float:
        model = create_model("tiny", 10, weights=weights, image_size=28).eval()
        with torch.inference_mode():
            train, val, test = (
                torch.cat([model.features(pipeline(part)) for part in torch.split(split.images, 500)])  # type: ignore[operator]
                for split in splits
            )
        choice = choose_ridge(*ridge_statistics(train, splits[0].labels, 10), val, splits[1].labels)
        return float((F.linear(test.double(), choice.weight, choice.bias).argmax(1) == splits[2].labels).double().mean())

    assert probe("pretrained") >= probe(None) + 0.10
