"""Sparse fine-tuning end to end: step 0 head, step 1 mask, step 2 masked training; in one place and federated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAST

import fedlens as fl
from fedlens.data.partition import partition
from fedlens.errors import UserError
from fedlens.lens.mask import KINDS
from fedlens.lens.mask_rules import STRATEGIES
from fedlens.lens.merging import RULES
from fedlens.overrides import compose
from fedlens.runs import cache as shared
from fedlens.runs.identity import identity
from fedlens.training import head_and_mask as sparse
from fedlens.training.bench import Bench, set_up
from fedlens.training.head_and_mask import Scorer

CENTRAL = [*FAST, "experiment=centralized_sparse", "mask.samples=12", "mask.rounds=2", "optim.lr=0.05"]
FEDERATED = [
    *FAST,
    "experiment=fedavg_noniid_sparse",
    "data.classes_per_client=2",
    "federated.clients=15",
    "federated.participation=0.2",
    "federated.local_steps=2",
    "federated.rounds=3",
    "federated.eval_every=2",
    "optim.batch_size=8",
    "optim.lr=0.05",
    "optim.weight_decay=0.01",
    "mask.samples=12",
    "mask.rounds=2",
]


@pytest.fixture
def sparse_run(tmp_path: Path) -> Callable[..., Any]:
    return lambda name, *overrides: fl.run([*FEDERATED, f"run.dir={tmp_path / name}", *overrides])


def moved_only_where_allowed(run: Any) -> None:
    mask = run.mask.as_dict()
    moved = 0
    for name, before in run.start.items():
        after = run.state[name]
        assert torch.equal(before[~mask[name]], after[~mask[name]]), name
        moved += int((before != after).sum())
    assert 0.5 * run.mask.active < moved <= run.mask.active


@pytest.mark.parametrize("engine", ["sequential", "threaded", "cohort"])
@pytest.mark.parametrize("options", [[], ["federated.algorithm=scaffold"], ["federated.algorithm=fedprox", "optim.nesterov=true"]])
def test_what_the_mask_leaves_out_keeps_its_bits_through_a_federation(
    sparse_run: Callable[..., Any], engine: str, options: list[str]
) -> None:
    run = sparse_run("r", f"federated.engine={engine}", *options)
    moved_only_where_allowed(run)
    assert run.summary["mask"]["active"] == run.mask.active == round(0.1 * run.mask.eligible_count)
    assert run.summary["trainable_parameters"] == run.mask.active


def test_what_the_mask_leaves_out_keeps_its_bits_in_one_place(tmp_path: Path) -> None:
    run = fl.run([*CENTRAL, f"run.dir={tmp_path / 'r'}", "optim.weight_decay=0.1", "optim.nesterov=true", "optim.clip_norm=0.5"])
    moved_only_where_allowed(run)


@pytest.mark.parametrize("uneven", [[], ["federated.dropout_rate=0.3", "federated.straggler_rate=0.6"]])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold"])
def test_all_engines_agree_under_a_mask(sparse_run: Callable[..., Any], algorithm: str, uneven: list[str]) -> None:
    options = [f"federated.algorithm={algorithm}", "optim.clip_norm=0.5", "mask.strategy=random", *uneven]
    one = sparse_run("one", "federated.engine=sequential", *options)
    threads = sparse_run("threads", "federated.engine=threaded", *options)
    assert all(torch.equal(threads.state[n], t) for n, t in one.state.items())
    many = sparse_run("many", "federated.engine=cohort", *options)
    a, b = one.task_vector(), many.task_vector()
    assert (a - b).norm() <= 1e-4 * a.norm() > 0
    assert all(float((one.state[n] - t).norm()) <= 1e-5 * float(t.norm()) for n, t in many.state.items())


@pytest.mark.parametrize("experiment", ["centralized_sparse", "fedavg_noniid_sparse"])
def test_an_interrupted_sparse_run_ends_with_the_same_bits(tmp_path: Path, experiment: str) -> None:
    base = CENTRAL if experiment.startswith("central") else FEDERATED
    options = [*base, "run.keep_last=9", "federated.eval_every=1", "federated.client_vectors=true"]
    whole = fl.run([*options, f"run.dir={tmp_path / 'whole'}"])
    torn = fl.run([*options, f"run.dir={tmp_path / 'torn'}"])
    for name in ("summary.json", "model.safetensors"):
        (torn.path / name).unlink()
    *_, middle, newest = sorted((torn.path / "checkpoints").iterdir())
    (newest / "tensors.safetensors").write_bytes(b"")
    state = json.loads((middle / "state.json").read_text())
    assert state["session"]["facts"]["mask"]["active"] == whole.mask.active
    resumed = fl.load_run(torn.path).resume()
    assert all(torch.equal(resumed.state[n], t) for n, t in whole.state.items())
    assert resumed.mask == whole.mask


def test_only_active_coordinates_travel(sparse_run: Callable[..., Any]) -> None:
    sparse, dense = sparse_run("s"), sparse_run("d", "mask.strategy=null")
    s, d, mask = sparse.summary, dense.summary, sparse.mask
    head, down = s["ridge"]["bytes_up"], s["ridge"]["bytes_down"]
    assert d["bytes_up"] - d["ridge"]["bytes_up"] == 3 * 3 * 4 * d["trainable_parameters"]
    assert s["bytes_up"] - head == 3 * 3 * 4 * mask.active
    assert s["bytes_down"] - down == 3 * 3 * 4 * mask.active + 15 * mask.bitmap_bytes
    assert down == d["ridge"]["bytes_down"] > 0
    assert (s["bytes_up"] - head) / (d["bytes_up"] - head) < 0.11


def test_sensitivities_summed_over_clients_are_the_centralised_ones() -> None:
    bench = set_up(compose(FEDERATED))
    score, names = Scorer(bench, bench.train), ["blocks.0.attn.qkv.weight", "norm.bias"]
    some = torch.arange(0, len(bench.train), 9)  # the images lie in order of their classes
    whole = score(some, names)
    for scheme, options in (("iid", {}), ("classes", {"classes_per_client": 2})):
        shards = partition(bench.dataset.train.labels[some], 7, scheme, **options)
        parts = [score(some[torch.from_numpy(shard)], names) for shard in shards]
        for name in names:
            together = torch.stack([part[name] for part in parts]).sum(0)
            assert torch.allclose(together, whole[name], rtol=1e-5, atol=1e-5 * float(whole[name].max()))


def test_a_federated_mask_is_the_central_one_on_the_same_images(sparse_run: Callable[..., Any]) -> None:
    """Calibrated over clients, with every byte counted; a little rounding may swap coordinates at the threshold."""
    everything = ["mask.scope=federated", "mask.samples=null", "data.val_fraction=0.9", "federated.rounds=1"]
    a = sparse_run("a", *everything)
    b = sparse_run("b", *everything, "data.partition=iid", "data.classes_per_client=null", "federated.clients=3")
    assert a.mask.iou(b.mask) > 0.999
    m, facts = a.mask.eligible_count, a.summary["mask"]
    assert facts["scorings"] == 2
    assert facts["bytes_up"] == 15 * 4 * (m + round(0.1**0.5 * m))
    assert facts["bytes_down"] == 15 * 2 * a.mask.bitmap_bytes


def test_a_mask_is_reused_across_runs(sparse_run: Callable[..., Any]) -> None:
    first = sparse_run("first")
    path = first.path / "mask.safetensors"
    again = sparse_run("again", f"mask.path={path}", "seed=1")
    assert again.mask == first.mask and again.summary["mask"]["scorings"] == 0
    like = sparse_run("like", "mask.strategy=random_layerwise", f"mask.like={path}")
    assert like.mask.per_tensor() == first.mask.per_tensor() and like.mask != first.mask


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_runs_and_sparsity_is_one_minus_density(tmp_path: Path, strategy: str) -> None:
    options = [*CENTRAL, "train.epochs=1", f"mask.strategy={strategy}"]
    a = fl.run([*options, "density=0.1", f"run.dir={tmp_path / 'a'}"])
    assert identity(a.config) == identity(compose([*options, "sparsity=0.9"])) == identity(compose([*options, "mask.sparsity=0.9"]))
    assert a.mask.active == round(0.1 * a.mask.eligible_count)


def test_within_some_kinds_is_without_the_others(tmp_path: Path) -> None:
    run = fl.run([*CENTRAL, "train.epochs=1", "mask.strategy=random", "mask.within=[value,mlp in]", f"run.dir={tmp_path / 'a'}"])
    assert {kind for kind, row in run.mask.composition().items() if row["active"]} == {"value", "mlp in"}
    assert set(run.config.mask.without) == set(KINDS) - {"value", "mlp in"}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_merge_rule_serves_the_server(sparse_run: Callable[..., Any], rule: str) -> None:
    run = sparse_run("r", f"server.merge={rule}", "server.fisher_samples=3", "server.lr=0.3", "mask.strategy=highest_magnitude")
    assert run.summary["rounds"] == 3 and 0 < run.task_vector().norm() < float("inf")
    moved_only_where_allowed(run) if rule not in ("ties", "breadcrumbs", "dare") else None
    assert 0 <= run.metrics[0]["sign_conflict"] <= 0.5


def test_what_clients_added_adds_up_to_what_was_learned(sparse_run: Callable[..., Any]) -> None:
    for options in (["mask.strategy=null"], []):
        run = sparse_run(f"r{len(options)}", "federated.client_vectors=true", "server.lr=0.7", "federated.algorithm=fednova", *options)
        learned = run.task_vector().state()
        for name in next(iter(run.client_vectors().values())).space.shapes:
            together = torch.stack([v.state()[name] for v in run.client_vectors().values()]).sum(0)
            assert torch.allclose(together, learned[name], atol=1e-5)


def test_a_client_that_is_excluded_leaves_no_trace(sparse_run: Callable[..., Any]) -> None:
    run = sparse_run("r", "federated.exclude=[0,3]", "federated.participation=1", "federated.client_vectors=true", "federated.rounds=1")
    assert set(run.client_vectors()) == set(range(15)) - {0, 3}
    assert run.metrics[0]["clients"] == 13


def test_a_client_that_is_idle_helps_with_the_head_and_never_trains(sparse_run: Callable[..., Any]) -> None:
    options = ["federated.participation=1", "federated.client_vectors=true", "federated.rounds=1", "mask.scope=federated"]
    run, whole = sparse_run("r", "federated.idle=[0,3]", *options), sparse_run("w", *options)
    assert set(run.client_vectors()) == set(range(15)) - {0, 3} and run.metrics[0]["clients"] == 13
    assert all(torch.equal(tensor, whole.start[name]) for name, tensor in run.start.items()) and run.mask == whole.mask


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mask.strategy=smallest"], "least_sensitive"),
        (["mask.density=0"], "must be in (0, 1]"),
        (["sparsity=1"], "must be in (0, 1]"),
        (["sparsity=most"], "a number below 1"),
        (["mask.within=[values]"], "Did you mean 'value'"),
        (["mask.scope=both"], "one of central, federated"),
        (["mask.rounds=0"], ">= 1"),
        (["mask.strategy=null", "mask.path=x"], "mask.path needs mask.strategy"),
        (["mask.path=no-such-file"], "no-such-file"),
        (["experiment=centralized_sparse", "mask.scope=federated"], "no clients"),
        (["data.val_fraction=0", "head=linear"], "head must be ridge under a mask"),
        (["head=linear"], "head must be ridge under a mask"),
        (["mask.like=no-such-file", "mask.strategy=random_layerwise"], "no-such-file"),
        (["model.freeze_backbone=true"], "nothing is eligible"),
        (["federated.exclude=[0,1,2,3,4,5,6,7]", "federated.idle=[8,9,10,11,12,13,14]"], "at least one of 15 clients must train"),
        (["federated.client_vectors=true", "server.merge=ties"], "needs server.optimizer=sgd and server.merge=mean"),
        (["federated.exclude=[99]"], "below federated.clients"),
        (["federated.idle=[99]"], "federated.idle must be below federated.clients, 15, got 99"),
        (["server.merge=breadcrumbs", "server.merge_options.bottom=0.995"], "server.merge_options.bottom"),
        (["mask.strategy=qk_only", "mask.density=0.5"], "density"),
    ],
)
def test_a_mask_that_cannot_be_is_one_line_and_leaves_no_folder(
    sparse_run: Callable[..., Any], tmp_path: Path, overrides: list[str], message: str
) -> None:
    """So that the corrected command may have the same one."""
    with pytest.raises(UserError) as error:
        sparse_run("r", *overrides)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_configuration_freezes_is_not_in_the_mask_and_does_not_move(tmp_path: Path, compiled: bool) -> None:
    overrides = [*FAST, "experiment=centralized_sparse", "mask.strategy=random", "model.freeze_blocks=3", f"train.compile={compiled}"]
    bench = set_up(compose(overrides))
    frozen = {name for name, param in bench.model.named_parameters() if not param.requires_grad}
    mask, facts = sparse.make_mask(bench)
    space = sparse.masked_space(bench, mask)
    assert "blocks.2.attn.qkv.weight" in frozen and not frozen & set(space.shapes)
    assert space.size == mask.active == facts["active"] == round(0.1 * facts["eligible"])


def test_runs_of_one_process_share_features_and_masks_and_nothing_else(
    sparse_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared._memory.clear()
    made: list[str] = []
    for home, name in ((Bench, "outputs"), (sparse, "calibrated_mask")):
        real = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *args, real=real, name=name: (made.append(name), real(*args))[1])
    first = sparse_run("first", "federated.rounds=1")
    assert sorted(made) == ["calibrated_mask", "outputs", "outputs"]
    again = sparse_run("again", "federated.rounds=1", "optim.lr=0.01")
    assert len(made) == 3 and again.mask == first.mask
    assert all(torch.equal(t, again.start[n]) for n, t in first.start.items())
    other = sparse_run("other", "federated.rounds=1", "seed=1")  # another validation set
    assert len(made) == 6 and other.mask != first.mask


def test_processes_share_features_and_masks_on_disk(
    sparse_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(shared.CACHE, str(tmp_path / "cache"))

    def run(name: str) -> Any:
        monkeypatch.setattr(shared, "_memory", type(shared._memory)())  # as a new process would begin
        return sparse_run(name, "federated.rounds=1")

    first = run("first")
    folders = sorted((tmp_path / "cache").iterdir())
    assert len(folders) == 3
    for home, name in ((Bench, "outputs"), (sparse, "calibrated_mask")):
        monkeypatch.setattr(home, name, lambda *args: pytest.fail("made again"))
    again = run("again")
    assert again.mask == first.mask and all(torch.equal(t, again.state[n]) for n, t in first.state.items())
    monkeypatch.undo()
    monkeypatch.setenv(shared.CACHE, str(tmp_path / "cache"))
    for folder in folders:
        for file in folder.iterdir():
            file.write_bytes(file.read_bytes()[:20])
    assert run("damaged").mask == first.mask and sorted((tmp_path / "cache").iterdir()) == folders
    (tmp_path / "file").touch()
    monkeypatch.setenv(shared.CACHE, str(tmp_path / "file" / "below"))  # no place to keep anything
    assert run("nowhere").mask == first.mask
