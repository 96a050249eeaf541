"""Every sample on exactly one client, exactly Nc classes, balanced: for any K, Nc and class counts."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedlens.data.partition import SCHEMES, Index, label_counts, partition, partition_stats
from fedlens.errors import UserError

CIFAR_LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 450))


def is_a_partition(shards: list[np.ndarray], samples: int) -> bool:
    return np.array_equal(np.sort(np.concatenate(shards)), np.arange(samples))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_classes_gives_every_client_exactly_nc_classes_and_every_sample_one_client(data: st.DataObject, seed: int) -> None:
    counts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    nc = data.draw(st.integers(1, len(counts)))
    clients = data.draw(st.integers(-(-len(counts) // nc), 30))
    if np.minimum(counts, clients).sum() < clients * nc:
        return  # impossible: see the test of errors
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    shards = partition(labels, clients, "classes", classes_per_client=nc, seed=seed)
    assert len(shards) == clients
    assert is_a_partition(shards, len(labels))
    table = label_counts(labels, shards)
    assert ((table > 0).sum(1) == nc).all()
    assert (table.sum(0) == counts).all()


@settings(max_examples=60, deadline=None)
@example(classes=12, per_class=30, nc=2, factor=2, seed=0)  # one class after the other sticks at sizes 14 to 16
@given(classes=st.integers(2, 20), per_class=st.integers(30, 90), nc=st.integers(1, 20), factor=st.integers(1, 3), seed=st.integers(0, 999))
def test_classes_of_equal_size_shared_evenly_give_equal_clients(classes: int, per_class: int, nc: int, factor: int, seed: int) -> None:
    nc = min(nc, classes)
    clients = classes * factor  # then every class has nc·factor holders
    if nc * factor > per_class:
        return
    labels = np.repeat(np.arange(classes), per_class)
    sizes = [len(s) for s in partition(labels, clients, "classes", classes_per_client=nc, seed=seed)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("nc", [1, 5, 10, 50])
def test_cifar100_over_100_clients_is_450_each(nc: int) -> None:
    shards = partition(CIFAR_LABELS, 100, "classes", classes_per_client=nc, seed=3)
    assert {len(s) for s in shards} == {450}
    assert ((label_counts(CIFAR_LABELS, shards) > 0).sum(1) == nc).all()


def test_classes_that_meet_on_a_client_are_random_by_seed_and_not_neighbours() -> None:
    tables = [label_counts(CIFAR_LABELS, partition(CIFAR_LABELS, 100, "classes", classes_per_client=2, seed=s)) > 0 for s in (0, 1)]
    assert not np.array_equal(tables[0], tables[1])
    gaps = np.array([abs(np.diff(np.nonzero(row)[0])[0]) for row in tables[0]])
    assert (gaps == 1).mean() < 0.15  # by chance 2 %
    assert gaps.mean() > 20  # by chance 33


@settings(max_examples=80, deadline=None)
@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=8), clients=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_iid_sizes_and_classes_differ_by_at_most_one(counts: list[int], clients: int, seed: int) -> None:
    if not sum(counts):
        return
    labels = np.repeat(np.arange(len(counts)), counts)
    shards = partition(labels, clients, "iid", seed=seed)
    assert is_a_partition(shards, len(labels))
    table = label_counts(labels, shards)
    assert np.ptp(table.sum(1)) <= 1
    assert (np.ptp(table, axis=0) <= 1).all()


@settings(max_examples=60, deadline=None)
@given(alpha=st.sampled_from([1e-6, 1e-2, 0.3, 1.0, 100.0, 1e6]), clients=st.integers(1, 25), seed=st.integers(0, 2**31))
@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet_balanced"])
def test_dirichlet_is_complete_disjoint_and_of_equal_sizes(scheme: str, alpha: float, clients: int, seed: int) -> None:
    labels = np.repeat([0, 1, 2, 3, 5, 9], [50, 40, 30, 20, 10, 5])
    shards = partition(labels, clients, scheme, alpha=alpha, seed=seed)
    assert is_a_partition(shards, len(labels))
    sizes = [len(s) for s in shards]
    assert max(sizes) - min(sizes) <= 1


def test_in_the_balanced_scheme_no_client_gets_what_the_others_leave() -> None:
    """With a large alpha every client draws nearly the mixture of all, but in turn-taking the last ones cannot have it."""

    def worst(scheme: str, alpha: float) -> float:
        table = label_counts(CIFAR_LABELS, partition(CIFAR_LABELS, 50, scheme, alpha=alpha)) / 1000
        return float(np.abs(table - 1 / 100).sum(1).max() / 2)

    assert worst("dirichlet_balanced", 1e4) < 0.1
    assert worst("dirichlet", 1e4) > 0.4
    distances = [
        partition_stats(CIFAR_LABELS, partition(CIFAR_LABELS, 50, "dirichlet_balanced", alpha=a)).tv_distance for a in (1e3, 1.0, 0.1)
    ]
    assert distances[0] < 0.3 and distances[1] > 0.7 and distances[2] >= distances[1]


@pytest.mark.parametrize("clients", [10, 100])
def test_dirichlet_is_never_nearer_to_iid_for_a_smaller_alpha(clients: int) -> None:
    """Down to where a share underflows: a client whose classes are exhausted turns to its own next ones, not to the mixture of all."""
    stats = [partition_stats(CIFAR_LABELS, partition(CIFAR_LABELS, clients, "dirichlet", alpha=a)) for a in (1.0, 0.1, 0.01, 1e-6, 1e-320)]
    distances = [found.tv_distance for found in stats]
    assert all(later >= earlier - 0.01 for earlier, later in itertools.pairwise(distances)), distances
    assert stats[-1].classes_mean <= 1.5 * max(1, 100 / clients)


def test_dirichlet_is_nearer_to_iid_the_larger_alpha() -> None:
    far, near = (partition_stats(CIFAR_LABELS, partition(CIFAR_LABELS, 100, "dirichlet", alpha=a)).tv_distance for a in (0.5, 1000.0))
    assert far > 0.9
    assert near < 0.4


@pytest.mark.parametrize(
    "scheme", [{"scheme": "iid"}, {"scheme": "classes", "classes_per_client": 3}, {"scheme": "dirichlet", "alpha": 0.5}]
)
def test_equal_seeds_give_equal_shards_and_different_seeds_different_ones(scheme: dict[str, object]) -> None:
    labels = torch.arange(10).repeat(60)
    a, b, c = (partition(labels, 20, seed=s, **scheme) for s in (0, 0, 1))  # type: ignore[arg-type]
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


@patch.dict(SCHEMES)
def test_a_registered_scheme_gets_the_options_that_it_names() -> None:
    @SCHEMES.register
    def halves(y: Index, clients: int, rng: np.random.Generator, *, alpha: float) -> Index:
        return np.minimum(np.arange(len(y)) // int(alpha), clients - 1)

    assert [len(shard) for shard in partition(np.zeros(10, int), 2, "halves", alpha=7)] == [7, 3]
    for wrong in (lambda y, clients, rng: y[:2], lambda y, clients, rng: y + clients, lambda y, clients, rng, **options: y * 0.5):
        SCHEMES["wrong"] = wrong
        with pytest.raises(UserError, match=r"'wrong' must return a client in 0\.\.1 for each of 10 samples"):
            partition(np.zeros(10, int), 2, "wrong")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"clients": 4, "scheme": "classes", "classes_per_client": 2}, "without a client"),
        ({"clients": 10, "scheme": "classes", "classes_per_client": 11}, "at most the number of classes"),
        ({"clients": 10, "scheme": "classes"}, ">= 1"),
        ({"clients": 100, "scheme": "classes", "classes_per_client": 10}, "more samples"),
        ({"clients": 10, "scheme": "dirichlet"}, "> 0"),
        ({"clients": 10, "scheme": "dirichlet_balanced"}, "> 0 for data.partition=dirichlet"),
        ({"clients": 10, "scheme": "dirichlet", "alpha": -1.0}, "> 0"),
        ({"clients": 0}, ">= 1"),
        ({"clients": 10, "scheme": "shards"}, "iid"),
    ],
)
def test_impossible_partitions_are_errors_that_say_so(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        partition(np.repeat(np.arange(10), 50), **kwargs)  # type: ignore[arg-type]


def test_statistics_of_a_known_partition() -> None:
    labels = np.array([0, 0, 1, 1])
    s = partition_stats(labels, [np.array([0, 1]), np.array([2, 3])])
    assert (s.size_min, s.size_max, s.classes_min, s.classes_max) == (2, 2, 1, 1)
    assert s.label_entropy == 0
    assert s.tv_distance == pytest.approx(0.5)
    mixed = partition_stats(labels, [np.array([0, 2]), np.array([1, 3])])
    assert mixed.tv_distance == 0
    assert mixed.label_entropy == pytest.approx(np.log(2))
