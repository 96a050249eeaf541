"""Federated training: engines against each other, identities with centralised SGD, exact resume, honest counts."""

import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import FAST, SIDE, few_images
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import by_two_ranks, finished, killed_and_resumed
from test_runs import same, without_time

import fedlens as fl
from fedlens.config import ServerConfig
from fedlens.data.partition import partition
from fedlens.engine import threaded
from fedlens.engine.choice import choose_engine
from fedlens.engine.cohort import Cohort
from fedlens.engine.local_work import Update, Work, plan_round
from fedlens.engine.ranks import Ranks
from fedlens.engine.sampling import local_steps, sample_cohort, survives
from fedlens.engine.sequential import Sequential
from fedlens.engine.threaded import Threaded
from fedlens.errors import UserError
from fedlens.lens.diagnostics import RoundSums
from fedlens.lens.geometry import cosines, sign_conflict
from fedlens.lens.merging import RULES
from fedlens.lens.norms import l1, l2
from fedlens.lens.space import ParamSpace
from fedlens.models import create_model
from fedlens.optim.server import SERVER, server_step
from fedlens.optim.sgd import LocalRule, effective_steps, sgd_step
from fedlens.overrides import compose
from fedlens.precision import Precision
from fedlens.registry import accepted
from fedlens.training import federated
from fedlens.training.bench import Bench, set_up
from fedlens.training.clients import Site

SMALL = [
    *FAST,
    "experiment=fedavg_noniid",
    "data.classes_per_client=2",
    "federated.clients=37",  # does not divide the data: clients are uneven
    "federated.participation=0.15",
    "federated.local_steps=2",
    "federated.rounds=3",
    "federated.eval_every=2",
    "optim.batch_size=8",
    "data.val_fraction=0.1",
]
GEOMETRY = ("client_norm", "drift_ratio", "cosine", "sign_conflict", "update_norm")
UNEVEN = ["federated.dropout_rate=0.3", "federated.straggler_rate=0.6"]


@pytest.fixture
def fed_run(tmp_path: Path) -> Callable[..., Any]:
    return lambda name, *overrides: fl.run([*SMALL, f"run.dir={tmp_path / name}", *overrides])


@pytest.fixture(scope="module")
def bench() -> Bench:
    return set_up(compose(SMALL))


def engines(bench: Bench, **kw: Any) -> tuple[Sequential, Threaded, Cohort]:
    parts = (bench.model, ParamSpace.of(bench.model), bench.task, bench.train, bench.precision)
    return Sequential(*parts), Threaded(*parts), Cohort(*parts, **kw)


def some_work(bench: Bench, clients: int = 5, steps: int = 3, **kw: Any) -> Work:
    shards = federated.make_shards(bench)
    return plan_round(0, 7, list(range(3, 3 + clients)), shards, steps=steps, batch=6, draw=bench.task.draw, **kw)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """The largest difference of a parameter, relative to how far it moved."""
    moved = {n: (a[n] - start[n]).norm() for n in a}
    return max(float((a[n] - b[n]).norm() / a[n].norm().clamp(min=float(moved[n]), max=float(a[n].norm()))) for n in a if a[n].norm() > 0)


# --- engines -------------------------------------------------------------------------------------------------------


def test_clients_in_two_threads_end_with_the_bits_of_one_thread(fed_run: Callable[..., Any]) -> None:
    options = [
        *UNEVEN,
        "federated.algorithm=scaffold",
        "head=linear",
    ]  # the bits of features, and so of a ridge head, may depend on the threads
    one = fed_run("one", *options)
    torch.set_num_threads(2)
    try:
        two = fed_run("two", *options)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert two.metrics[0]["clients"] % 2 or two.metrics[1]["clients"] % 2  # a last client alone, too
    assert all(torch.equal(t, two.state[n]) for n, t in one.state.items())
    for a, b in zip(one.metrics, two.metrics, strict=True):
        assert {k: a[k] for k in GEOMETRY} == pytest.approx({k: b[k] for k in GEOMETRY}, rel=1e-6, abs=1e-7)


def test_norms_of_as_many_weights_as_a_vit_has_are_exact() -> None:
    vector = 1e-4 * torch.randn(21_665_664 + 5, generator=torch.Generator().manual_seed(0))
    exact = float(vector.double().abs().sum()), float(vector.double().square().sum().sqrt())
    assert (l1(vector), l2(vector)) == pytest.approx(exact, rel=1e-6)
    assert l2(torch.full((5000,), 2.0)) == pytest.approx(20000**0.5)
    assert l1(torch.zeros(0)) == 0 and math.isnan(l2(torch.tensor([math.nan])))
    sums, apart = RoundSums(), [vector, -0.5 * vector.roll(1)]
    for delta in apart:
        sums.add(delta, l2(delta), 1.0, 0.0)
    assert sums.metrics()["sign_conflict"] == pytest.approx(sign_conflict(torch.stack(apart)), abs=1e-6)
    assert sums.metrics()["cosine"] == pytest.approx(float(cosines(torch.stack(apart))[0, 1]), abs=1e-6)


def test_gradients_as_long_as_a_vits_are_clipped_to_the_configured_norm() -> None:
    grad = torch.randn(2, 5_000_003, generator=torch.Generator().manual_seed(0))
    theta = torch.zeros_like(grad)
    moved, _ = sgd_step(theta, grad, torch.zeros_like(grad), 1.0, LocalRule(1.0, clip_norm=3.0), True)
    assert moved.double().norm(dim=1).tolist() == pytest.approx([3.0, 3.0], rel=1e-6)


def test_an_abandoned_round_leaves_no_thread_running(bench: Bench) -> None:
    torch.set_num_threads(2)
    try:
        engine = engines(bench)[1]
        updates = engine.updates(engine.space.read(bench.model), some_work(bench), LocalRule(lr=0.01))
        next(updates)
        updates.close()  # type: ignore[attr-defined]
        assert torch.get_num_threads() == 2
        assert engine._pool is not None and engine._pool._work_queue.empty()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold", "fednova"])
@pytest.mark.parametrize("uneven", [False, True])
def test_all_engines_agree(fed_run: Callable[..., Any], algorithm: str, uneven: bool) -> None:
    options = [
        f"federated.algorithm={algorithm}",
        *(["federated.algorithm_options.mu=0.5"] if algorithm == "fedprox" else []),
        "optim.weight_decay=0.01",
        *(UNEVEN if uneven else []),
    ]
    a, threads, b = (fed_run(engine, f"federated.engine={engine}", *options) for engine in ("sequential", "threaded", "cohort"))
    assert same(a.state, threads.state)
    begin = create_model("tiny", 10, weights="pretrained", image_size=SIDE).state_dict()
    begin = {n: t for n, t in begin.items() if not n.startswith("head.")}
    assert max(float((a.state[n] - t).norm()) for n, t in begin.items()) > 1e-4  # it trained
    assert distance({n: a.state[n] for n in begin}, {n: b.state[n] for n in begin}, begin) < 1e-5
    assert a.summary["bytes_up"] == b.summary["bytes_up"]
    assert (a.summary["dropped"] > 0) == uneven


def test_a_straggler_that_stopped_before_its_weights_overflowed_is_kept_by_both_engines(fed_run: Callable[..., Any]) -> None:
    options = ["federated.clients=6", "federated.participation=1", "federated.straggler_rate=0.7", "federated.rounds=1"]
    options += ["federated.local_steps=3"]
    options += ["optim.lr=1e15", "optim.clip_norm=null", "server.lr=1e-17", "federated.client_metrics=true"]
    a, b = (fed_run(e, f"federated.engine={e}", *options).metrics[0]["client_metrics"] for e in ("sequential", "cohort"))
    assert 0 < len(a) < 6 and [(d["client"], d["steps"]) for d in a] == [(d["client"], d["steps"]) for d in b]
    assert [d["loss"] for d in b] == pytest.approx([d["loss"] for d in a], rel=1e-4)


@pytest.mark.parametrize(
    "rule", [LocalRule(0.01), LocalRule(0.01, 0.9, 0.1, False, 0.1, 0.5, 0.3, 0.1), LocalRule(0.01, 0.9, nesterov=True)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_updates_of_all_engines_agree_client_by_client(bench: Bench, rule: LocalRule, dropout: float) -> None:
    one, threads, many = engines(bench)
    theta, work = one.space.read(bench.model), some_work(bench, straggler_rate=0.7, dropout=dropout, features=128)
    offset = torch.randn(5 + 3, one.space.size, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert len(set(work.steps.tolist())) > 1
    updates = ([u.owned() for u in e.updates(theta, work, rule, lambda c: offset[c])] for e in (one, threads, many))
    for a, exact, b in zip(*updates, strict=True):
        assert (a.client, a.samples, a.steps) == (exact.client, exact.samples, exact.steps) == (b.client, b.samples, b.steps)
        assert torch.equal(a.delta, exact.delta) and torch.equal(a.loss, exact.loss)
        assert float((a.delta - b.delta).norm() / a.delta.norm()) < 1e-4
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-5)


@pytest.mark.parametrize(
    "rule", [LocalRule(0.01), LocalRule(0.01, 0.9, 0.1, False, 0.1, None, 0.3, 0.1), LocalRule(0.01, 0.9, nesterov=True, weight_decay=0.01)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_steps_in_the_backward_pass_end_with_the_same_bits(
    bench: Bench, rule: LocalRule, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, work = engines(bench)[1], some_work(bench, straggler_rate=0.7, features=128)
    theta, runs = one.space.read(bench.model), []
    offset = torch.randn(5 + 3, one.space.size, generator=torch.Generator().manual_seed(0)) * 1e-3
    torch.set_num_threads(threads)
    try:
        for bound in (1 << 40, 0):
            monkeypatch.setattr(threaded, "EARLY", bound)
            runs.append([u.owned() for u in one.updates(theta, work, rule, lambda c: offset[c])])
            assert all(p.grad is None and not p._post_accumulate_grad_hooks for w in one._workers for p in w.trained)
    finally:
        torch.set_num_threads(1)
    for late, early in zip(*runs, strict=True):
        assert torch.equal(late.delta, early.delta) and torch.equal(late.loss, early.loss) and float(early.delta.norm()) > 0


@pytest.mark.parametrize("engine", ["sequential", "threaded"])
def test_an_owned_update_keeps_all_fields_and_survives_the_next_one(bench: Bench, engine: str) -> None:
    kind = engines(bench)[["sequential", "threaded"].index(engine)]
    updates = kind.updates(kind.space.read(bench.model), some_work(bench), LocalRule(0.01))
    first = replace(next(updates), clients=4)
    own, before = first.owned(), first.delta.clone()
    list(updates)
    assert torch.equal(own.delta, before) and own.delta.data_ptr() != first.delta.data_ptr()
    assert (own.client, own.samples, own.steps, own.clients) == (first.client, first.samples, first.steps, 4)


def test_threads_train_on_a_cpu_only(bench: Bench) -> None:
    config = compose([*SMALL, "federated.engine=threaded"])
    gpu = Precision(torch.device("cuda"), torch.float32)
    with pytest.raises(UserError, match=r"federated\.engine must be auto, sequential or cohort on cuda"):
        choose_engine(config, bench.model, ParamSpace.of(bench.model), bench.task, bench.train, gpu)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_cohort_in_chunks_is_the_same_cohort(bench: Bench, chunk: int) -> None:
    whole, parts = engines(bench)[2], engines(bench, chunk=chunk)[2]
    theta, work, rule = whole.space.read(bench.model), some_work(bench), LocalRule(0.01, 0.9)
    for a, b in zip(whole.updates(theta, work, rule), parts.updates(theta, work, rule), strict=True):
        assert a.client == b.client
        assert float((a.delta - b.delta).norm() / a.delta.norm()) < 1e-5


def test_running_out_of_memory_halves_the_chunk_and_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, real = engines(bench)[2], Cohort._train
    theta, work, rule = engine.space.read(bench.model), some_work(bench), LocalRule(0.01)
    want = [u.delta.clone() for u in engine.updates(theta, work, rule)]

    def small_memory(self: Cohort, theta: torch.Tensor, work: Work, *rest: Any) -> Any:
        if len(work) > 2:
            raise torch.OutOfMemoryError
        return real(self, theta, work, *rest)

    monkeypatch.setattr(Cohort, "_train", small_memory)
    got = [u.delta.clone() for u in engine.updates(theta, work, rule)]
    assert engine.chunk == 2
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(want, got, strict=True))


def test_a_compiled_cohort_has_one_width_and_halves_it_when_memory_runs_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, engine, real, widths = engines(bench)[2], engines(bench, width=6)[2], Cohort._train, list[int]()
    engine.compile = True  # only the widths matter here: nothing was compiled

    def small_memory(self: Cohort, theta: torch.Tensor, work: Work, *rest: Any) -> Any:
        widths.append(len(work))
        if len(work) > 3 and sum(w == 6 for w in widths) == 3:
            raise torch.OutOfMemoryError
        return real(self, theta, work, *rest)

    theta, rule = engine.space.read(bench.model), LocalRule(0.01)
    for clients in (2, 5, 4, 1):
        work = some_work(bench, clients)
        want = [(u.client, u.delta.clone()) for u in plain.updates(theta, work, rule)]
        with monkeypatch.context() as patched:
            patched.setattr(Cohort, "_train", small_memory)
            got = [(u.client, u.delta.clone()) for u in engine.updates(theta, work, rule)]
        assert [k for k, _ in got] == [k for k, _ in want]
        assert all(torch.allclose(a, b, atol=1e-7) for (_, a), (_, b) in zip(want, got, strict=True))
    assert widths == [6, 6, 6, 3, 3, 3]


@pytest.mark.parametrize(
    ("options", "shards_here", "ranks", "width"),
    [([], range(10), 1, 4), ([], range(10), 3, 2), (["federated.idle=[0,1,2,3,4,5]"], range(10), 1, 4), ([], [7], 1, 1)],
)
def test_the_width_is_known_before_the_first_round(options: list[str], shards_here: Sequence[int], ranks: int, width: int) -> None:
    bench = set_up(compose([*SMALL, "federated.clients=10", "federated.participation=0.4", "federated.engine=cohort", *options]))
    shards = federated.make_shards(bench)
    site = Site(bench, {k: shards[k] for k in shards_here}, Ranks(0, ranks))
    site.begin(ParamSpace.of(bench.model), None)
    assert isinstance(site.engine, Cohort)
    assert site.engine.width == width


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_order_of_clients_does_not_matter(bench: Bench, which: int) -> None:
    engine = engines(bench)[which]
    theta, rule, shards = engine.space.read(bench.model), LocalRule(0.01, 0.9), federated.make_shards(bench)
    plans = [plan_round(0, 7, order, shards, steps=2, batch=6, draw=bench.task.draw) for order in ([1, 5, 9], [9, 1, 5])]
    a, b = ({u.client: u.delta.clone() for u in engine.updates(theta, p, rule)} for p in plans)
    assert all(float((a[c] - b[c]).norm() / a[c].norm()) < 1e-5 for c in a)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, while it traces
def test_compiled_and_eager_cohorts_agree(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: real(f, backend="aot_eager", fullgraph=True, **kw))
    eager, compiled = engines(bench)[2], engines(bench, compile=True)[2]
    theta, work, rule = eager.space.read(bench.model), some_work(bench, straggler_rate=0.5), LocalRule(0.01, 0.9, clip_norm=1.0)
    for a, b in zip(eager.updates(theta, work, rule), compiled.updates(theta, work, rule), strict=True):
        assert float((a.delta - b.delta).norm() / a.delta.norm()) < 1e-5


@pytest.mark.parametrize("engine", ["sequential", "threaded"])
def test_an_engine_without_client_axis_compiles_once_for_all_rounds(
    fed_run: Callable[..., Any], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled:
        made = 0

        def __init__(self, model: torch.nn.Module) -> None:
            self.model, Compiled.made = model, Compiled.made + 1

        def __call__(self, *args: Any, **kw: Any) -> Any:
            return self.model(*args, **kw)

        def __len__(self) -> int:
            raise TypeError("as torch's compiled modules do where the model has no length")

    plain = fed_run("plain", f"federated.engine={engine}")
    monkeypatch.setattr(torch, "compile", Compiled)
    compiled = fed_run("compiled", f"federated.engine={engine}", "train.compile=true")
    assert Compiled.made == 1
    assert same(plain.state, compiled.state)


def test_a_model_without_a_client_axis_trains_without_the_cohort_engine(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=28, patch_size=14
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    options = [*SMALL, f"model=hf:{tmp_path / 'vit'}", "model.image_size=28", "federated.rounds=1", f"run.dir={tmp_path / 'r'}"]
    threads = fl.run(options)
    assert threads.summary["engine"] == "threaded"
    assert same(fl.run([*options, "federated.engine=sequential", f"run.dir={tmp_path / 'q'}"]).state, threads.state)
    with pytest.raises(UserError, match="client axis"):
        fl.run([*options, "federated.engine=cohort", f"run.dir={tmp_path / 's'}"])


# --- several processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [["federated.algorithm=fedavg"], ["federated.algorithm=scaffold"], ["server.merge=median", "federated.client_metrics=true"]],
    ids=["mean", "scaffold", "median"],
)
def test_two_gloo_ranks_equal_one_process(fed_run: Callable[..., Any], tmp_path: Path, options: list[str]) -> None:
    options = [*options, *UNEVEN, "server.optimizer=momentum"]
    one = fed_run("one", *options)
    by_two_ranks(["run", *SMALL, *options, f"run.dir={tmp_path / 'two'}"])
    two = fl.load_run(tmp_path / "two")
    assert two.summary["ranks"] == 2
    for name, tensor in one.state.items():
        assert float((tensor - two.state[name]).norm()) <= 1e-5 * float(tensor.norm()) + 1e-9, name
    for a, b in zip(one.metrics, two.metrics, strict=True):
        assert a["bytes_up"] == b["bytes_up"]
        assert a["clients"] == b["clients"]
        assert a["cosine"] == pytest.approx(b["cosine"], abs=1e-4)


def test_ranks_that_come_late_share_the_folder_of_the_first_and_a_finished_run_is_left_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's name has the time in it, and only the first rank looks whether it is finished."""
    code = "import os, sys, time, torch; torch.set_num_threads(1); time.sleep(1.2 * int(os.environ['RANK']))\n"
    (tmp_path / "entry.py").write_text(code + "from fedlens.cli import main; sys.exit(main(sys.argv[1:]))")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "localhost:0", str(tmp_path / "entry.py"), "run", *SMALL, "federated.rounds=1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = (tmp_path / "runs").iterdir()
    before = (folder / "summary.json").read_bytes()
    monkeypatch.chdir(tmp_path)
    by_two_ranks(["run", *SMALL, "federated.rounds=1", f"run.dir={folder}", "run.if_exists=resume"])
    assert (folder / "summary.json").read_bytes() == before


# --- identities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "threaded", "cohort"])
def test_full_participation_one_full_batch_step_is_one_centralised_step(tmp_path: Path, engine: str) -> None:
    plain = [
        f"data.root={few_images()}",
        "data.crop=0",
        "data.flip=false",
        "optim.clip_norm=null",
        "optim.lr=0.002",
        "head=linear",
        "data.val_fraction=0",
        "optim.schedule=constant",
    ]
    alone = ["federated.clients=6", "federated.participation=1", "federated.local_steps=1", "federated.rounds=1", "optim.batch_size=100"]
    run = fl.run([*FAST, "experiment=fedavg_iid", *plain, *alone, f"federated.engine={engine}", f"run.dir={tmp_path / 'r'}"])
    data = fl.load_dataset("folder", few_images(), val_fraction=0.0)
    assert len(data.train) == 120
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))
    model = create_model("tiny", 10, weights="pretrained", image_size=SIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    F.cross_entropy(model((data.train.images.float() / 255 - mean) / std), data.train.labels).backward()
    optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(run.state[name], tensor, atol=2e-6), name


@pytest.mark.parametrize("engine", ["sequential", "threaded", "cohort"])
def test_one_client_with_all_data_is_centralised_sgd(tmp_path: Path, run_once: Callable[..., Any], engine: str) -> None:
    common = [
        "data.val_fraction=0.1",
        "optim.batch_size=60",
        "optim.lr=0.005",
        "optim.schedule=constant",
        "optim.weight_decay=0.01",
        "seed=2",
    ]
    central = run_once(*common, "experiment=centralized", "train.epochs=1")
    one = [
        "federated.clients=1",
        "federated.participation=1",
        "federated.local_steps=9",
        "federated.rounds=1",
        f"federated.engine={engine}",
    ]
    alone = fl.run([*FAST, *common, "experiment=fedavg_iid", *one, f"run.dir={tmp_path / 'f'}"])
    for name, tensor in central.state.items():
        assert torch.allclose(alone.state[name], tensor, atol=2e-5), name


def test_a_server_rate_of_zero_leaves_the_model(fed_run: Callable[..., Any]) -> None:
    run = fed_run("r", "server.lr=0", "head=linear", "federated.rounds=2")
    begin = create_model("tiny", 10, weights="pretrained", image_size=SIDE).state_dict()
    assert all(torch.equal(run.state[n], t) for n, t in begin.items())


def test_a_merge_rule_of_one_s_own_that_gives_no_number_ends_the_run(fed_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "own", lambda rows, weights, **_: rows.mean(0) * float("nan"))
    with pytest.raises(UserError, match="'own' returned values that are not finite"):
        fed_run("own", "server.merge=own")


def test_clients_vectors_add_up_to_the_run_s_own(fed_run: Callable[..., Any]) -> None:
    run = fed_run("parts", "federated.client_vectors=true", "federated.rounds=1")
    parts = run.client_vectors().values()
    assert (run.task_vector() - sum(parts)).norm() < 1e-5 < run.task_vector().norm()


def test_one_alpha_to_choose_from_is_the_server_s_rate(fed_run: Callable[..., Any]) -> None:
    fixed, chosen = fed_run("fixed", "server.lr=0.5"), fed_run("chosen", "server.alphas=[0.5]")
    assert same(fixed.state, chosen.state)
    assert [line["alpha"] for line in chosen.metrics] == [0.5] * 3 and "alpha" not in fixed.metrics[0]


def test_alpha_is_chosen_by_the_loss_on_validation(fed_run: Callable[..., Any]) -> None:
    options = ["federated.rounds=1", "server.alpha_samples=1000000", "optim.lr=0.05"]  # more than there are: all of them
    losses = {a: fed_run(f"a{a}", *options, f"server.lr={a}").metrics[0]["val_loss"] for a in (0.0, 0.5, 1.0, 8.0)}
    for few in ([8.0, 0.0], [0.0, 0.5, 1.0, 8.0], [8.0]):
        run = fed_run(f"few{len(few)}", *options, f"server.alphas={few}", "federated.client_vectors=true")
        alpha = run.metrics[0]["alpha"]
        assert alpha == min(few, key=lambda a: losses[a])
        assert run.metrics[0]["val_loss"] == losses[alpha]
        if alpha:  # and clients' parts are as large as what was added
            together = sum(v.vector for v in run.client_vectors().values())
            moved = torch.cat([(run.state[n] - run.start[n]).flatten() for n in next(iter(run.client_vectors().values())).space.shapes])
            assert torch.allclose(together, moved, atol=1e-6)


def test_a_run_that_chooses_alpha_resumes_to_the_same_bits(fed_run: Callable[..., Any]) -> None:
    options = ["server.alphas=[0.5,1,2]", "server.alpha_samples=20", "federated.eval_every=1", "run.keep_last=9", "optim.lr=0.05"]
    whole, torn = fed_run("whole", *options), fed_run("torn", *options)
    (torn.path / "summary.json").unlink()
    for late in sorted((torn.path / "checkpoints").iterdir())[1:]:
        shutil.rmtree(late)
    again = fl.load_run(torn.path).resume()
    assert same(whole.state, again.state) and [m["alpha"] for m in again.metrics] == [m["alpha"] for m in whole.metrics]


def test_no_alpha_is_told_of_a_round_that_nobody_answered(fed_run: Callable[..., Any]) -> None:
    lines = fed_run("r", "server.alphas=[0.25,0.5]", "federated.dropout_rate=0.8", "head=linear").metrics
    assert len({line["clients"] == 0 for line in lines}) == 2  # some of both
    assert all(("alpha" in line) == (line["clients"] > 0) for line in lines)


def test_under_fednova_the_norm_of_clients_is_that_of_what_they_sent(fed_run: Callable[..., Any]) -> None:
    options = ["federated.algorithm=fednova", "federated.straggler_rate=0.6", "federated.client_metrics=true", "federated.rounds=1"]
    options += ["federated.local_steps=3"]
    line = fed_run("r", *options).metrics[0]
    assert len({d["steps"] for d in line["client_metrics"]}) > 1
    assert line["client_norm"] == pytest.approx(np.mean([d["norm"] for d in line["client_metrics"]]))


def test_a_trimmed_mean_that_cuts_nobody_is_warned_of(fed_run: Callable[..., Any]) -> None:
    for name, trim, said in (("nobody", 0.1, 1), ("one", 0.2, 0)):  # of 6 clients
        run = fed_run(name, "server.merge=trimmed_mean", f"server.merge_options.trim={trim}", "federated.rounds=1", "head=linear")
        assert (run.path / "log.txt").read_text().count("server.merge_options.trim: 0.1 of 6 clients cuts no client") == said


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 9), seed=st.integers(0, 2**31), rule=st.sampled_from(sorted(RULES)))
def test_equal_updates_merge_to_themselves_under_every_rule(clients: int, seed: int, rule: str) -> None:
    g = torch.Generator().manual_seed(seed)
    delta, weights = torch.randn(17, generator=g), torch.rand(clients, generator=g) + 0.1
    options = {"trim": 0.2, "density": 1.0, "drop": 0.0, "top": 0.0, "bottom": 0.0, "fishers": torch.rand(clients, 17, generator=g)}
    merged = RULES[rule](delta.expand(clients, -1).clone(), weights, **accepted(RULES[rule], options))
    assert torch.allclose(merged, clients * delta if rule == "sum" else delta, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_merge_rules_equal_numpy(clients: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    deltas, weights = torch.randn(clients, 11, generator=g), torch.rand(clients, generator=g) + 0.1
    d, w = deltas.double().numpy(), weights.double().numpy()
    assert np.allclose(RULES["mean"](deltas, weights), np.average(d, axis=0, weights=w), atol=1e-5)
    assert np.allclose(RULES["median"](deltas, weights), np.median(d, axis=0), atol=1e-6)
    cut = int(0.3 * clients)
    trimmed = np.sort(d, axis=0)[cut : clients - cut].mean(0)
    assert np.allclose(RULES["trimmed_mean"](deltas, weights, trim=0.3), trimmed, atol=1e-5)
    scaled = d * np.minimum(1, 0.5 / np.linalg.norm(d, axis=1))[:, None]
    assert np.allclose(RULES["clipped_mean"](deltas, weights, clip_norm=0.5), np.average(scaled, axis=0, weights=w), atol=1e-5)


def test_the_round_sums_are_the_mean_and_the_brute_force_geometry() -> None:
    deltas, weights = torch.randn(6, 40, dtype=torch.float64), [1.0, 2.0, 3.0, 1.0, 1.0, 5.0]
    sums = RoundSums()
    for d, w in zip(deltas, weights, strict=True):
        sums.add(d, float(d.norm()), w, 0.5)
    w = torch.tensor(weights, dtype=torch.float64)
    mean = (w[:, None] * deltas).sum(0) / w.sum()
    assert torch.allclose(sums.mean(), mean)
    pairs = [float(F.cosine_similarity(a, b, dim=0)) for a, b in itertools.combinations(deltas, 2)]
    metrics = sums.metrics()
    assert metrics["cosine"] == pytest.approx(sum(pairs) / len(pairs))
    assert metrics["drift_ratio"] == pytest.approx(float(mean.norm() / ((w * deltas.norm(dim=1)).sum() / w.sum())))
    assert metrics["client_norm"] == pytest.approx(float(deltas.norm(dim=1).mean()))


# --- optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_flat_step_is_torch_s_sgd(momentum: float, dampening: float, nesterov: bool, decay: float) -> None:
    if nesterov and (dampening or not momentum):
        return  # torch refuses these
    rule = LocalRule(0.1, momentum, dampening, nesterov, decay, clip_norm=2.0)
    theta = torch.randn(3, 20)
    params = [torch.nn.Parameter(row.clone()) for row in theta]
    optimizers = [torch.optim.SGD([p], 0.1, momentum, dampening, decay, nesterov) for p in params]
    velocity = torch.zeros_like(theta)
    for step in range(10):
        grad = torch.randn(3, 20)
        for p, optimizer, g in zip(params, optimizers, grad, strict=True):
            p.grad = g.clone()
            torch.nn.utils.clip_grad_norm_([p], 2.0)
            optimizer.step()
        theta, velocity = sgd_step(theta, grad, velocity, rule.lr, rule, step == 0)
    assert torch.allclose(theta, torch.stack([p.detach() for p in params]), atol=1e-5)


def test_a_stopped_client_does_not_move() -> None:
    rule, theta = LocalRule(0.1, 0.9, weight_decay=0.1), torch.randn(2, 5)
    moved, _ = sgd_step(theta, torch.randn(2, 5), torch.randn(2, 5), 0.1, rule, False, active=torch.tensor([[1.0], [0.0]]))
    assert torch.equal(moved[1], theta[1])
    assert not torch.equal(moved[0], theta[0])
    moved, _ = sgd_step(theta, torch.full((2, 5), float("inf")), torch.zeros(2, 5), 0.1, rule, False, active=torch.tensor([[1.0], [0.0]]))
    assert torch.equal(moved[1], theta[1])  # whatever the gradient that it does not follow


@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.5, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)])
def test_effective_steps_are_the_distance_under_a_constant_gradient(momentum: float, dampening: float, nesterov: bool) -> None:
    rule, x, v = LocalRule(1.0, momentum, dampening, nesterov), torch.zeros(1), torch.zeros(1)
    for step in range(7):
        x, v = sgd_step(x, torch.ones(1), v, 1.0, rule, step == 0)
    assert float(-x) == pytest.approx(effective_steps(7, momentum, dampening, nesterov), rel=1e-5)


def test_server_optimizers_follow_their_papers() -> None:
    c = ServerConfig(lr=0.5, momentum=0.9, beta1=0.8, beta2=0.95, tau=0.01)
    directions = torch.randn(6, 4, dtype=torch.float64)
    for name in SERVER:
        state: dict[str, torch.Tensor] = {}
        theta = torch.zeros(4, dtype=torch.float64)
        m, v, want = np.zeros(4), np.full(4, c.tau**2), np.zeros(4)
        for d in directions:
            theta = server_step(theta, d, state, replace(c, optimizer=name))
            x = d.numpy()
            if name in ("sgd", "momentum"):
                m = x + (c.momentum * m if name == "momentum" else 0)
                want = want + c.lr * m
                continue
            beta1 = 0.0 if name == "adagrad" else c.beta1
            m = beta1 * m + (1 - beta1) * x
            v = {
                "adam": c.beta2 * v + (1 - c.beta2) * x**2,
                "yogi": v - (1 - c.beta2) * x**2 * np.sign(v - x**2),
                "adagrad": v + x**2,
            }[name]
            want = want + c.lr * m / (np.sqrt(v) + c.tau)
        assert np.allclose(theta.numpy(), want), name


@pytest.mark.parametrize("option", [f"server.optimizer={n}" for n in ("momentum", "adam", "yogi", "adagrad")] + [f"server.merge={m}" for m in ("median", "clipped_mean")] + ["server.lr=0.5", "federated.algorithm=fednova", "federated.algorithm=fedprox federated.algorithm_options.mu=5", "server.merge=trimmed_mean server.merge_options.trim=0.3", "federated.straggler_rate=0.9", "model.dropout=0.3"])  # fmt: skip
def test_every_option_reaches_the_training(fed_run: Callable[..., Any], option: str) -> None:
    plain, changed = (fed_run(n, "federated.rounds=2", "federated.straggler_rate=0.5", *o) for n, o in (("a", []), ("b", option.split())))  # fmt: skip
    assert not torch.equal(plain.state["norm.weight"], changed.state["norm.weight"])


def test_scaffold_s_controls_follow_option_two() -> None:
    from fedlens.training.algorithms import Scaffold

    config = compose([*SMALL, "federated.clients=4", "optim.momentum=0"])
    algorithm, theta = Scaffold(config), torch.zeros(3)
    assert algorithm.offsets(theta) is not None
    for client, delta in ((1, torch.tensor([1.0, 2.0, 3.0])), (2, torch.tensor([-1.0, 0.0, 1.0]))):
        algorithm.receive(Update(client, 10, 5, delta, torch.tensor(0.0)), lr=0.1)
    algorithm.end_round()
    assert torch.allclose(algorithm.clients[1], -torch.tensor([1.0, 2.0, 3.0]) / 0.5)
    assert algorithm.server is not None
    assert torch.allclose(algorithm.server, -torch.tensor([0.0, 2.0, 4.0]) / 0.5 / 4)
    offset = algorithm.offsets(theta)
    assert offset is not None
    assert torch.allclose(offset(1), algorithm.server - algorithm.clients[1])
    assert torch.allclose(offset(3), algorithm.server)


def test_scaffold_s_server_control_is_the_mean_of_those_that_train() -> None:
    from fedlens.training.algorithms import Scaffold

    config = compose([*SMALL, "federated.clients=5", "federated.exclude=[0]", "federated.idle=[4]", "optim.momentum=0"])
    algorithm, deltas = Scaffold(config), torch.randn(2, 5, 3)
    for round_ in deltas:
        algorithm.offsets(torch.zeros(3))
        for client in (1, 2, 3):
            algorithm.receive(Update(client, 10, 5, round_[client], torch.tensor(0.0)), lr=0.1)
        algorithm.end_round()
        assert algorithm.server is not None
        assert torch.allclose(algorithm.server, torch.stack(list(algorithm.clients.values())).mean(0), atol=1e-5)


# --- randomness, resume, counts ------------------------------------------------------------------------------------


def test_two_seeds_give_different_cohorts_and_equal_seeds_the_same() -> None:
    rounds = range(20)
    a, b, c = ([sample_cohort(s, r, 100, 0.1) for r in rounds] for s in (0, 0, 1))
    assert a == b
    assert a != c
    assert all(len(set(x)) == 10 and x == sorted(x) for x in a)
    assert len({tuple(x) for x in a}) == 20


@pytest.mark.parametrize("engine", ["sequential", "threaded", "cohort"])
def test_in_every_engine_seeds_decide_the_clients(fed_run: Callable[..., Any], engine: str) -> None:
    seen = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = fed_run(name, f"federated.engine={engine}", f"seed={seed}", "federated.client_metrics=true", "federated.rounds=2")
        seen.append([[d["client"] for d in m["client_metrics"]] for m in run.metrics])
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


def test_dropouts_and_stragglers_are_keyed_and_as_frequent_as_asked() -> None:
    gone = [not survives(0, r, c, 0.3) for r in range(40) for c in range(25)]
    assert 0.25 < sum(gone) / len(gone) < 0.35
    steps = [local_steps(0, r, c, 8, 0.5) for r in range(40) for c in range(25)]
    assert 0.45 < sum(s < 8 for s in steps) / len(steps) < 0.55
    assert set(steps) == set(range(1, 9))


def test_killed_twenty_times_scaffold_with_server_momentum_ends_with_the_same_bits(tmp_path: Path) -> None:
    overrides = [
        *SMALL,
        *UNEVEN,
        f"data.root={few_images()}",
        "data.val_fraction=0.25",
        "federated.clients=12",
        "federated.algorithm=scaffold",
        "server.optimizer=momentum",
        "server.momentum=0.5",
        "model.freeze_backbone=true",  # only the head trains, so a round is short
        "run.checkpoint_minutes=0",
    ]
    overrides += ["federated.rounds=80", "federated.participation=0.25", "federated.local_steps=2"]
    whole = finished(tmp_path / "whole", overrides)
    torn = killed_and_resumed(tmp_path / "torn", overrides, kills=20, seed=3, step=whole.summary["seconds"] / whole.summary["rounds"])
    assert same(whole.state, torn.state)
    clean = [[{k: v for k, v in m.items() if k != "round_seconds"} for m in without_time(r.metrics)] for r in (whole, torn)]
    assert clean[0] == clean[1]
    assert {**whole.summary, "seconds": 0} == {**torn.summary, "seconds": 0}


def test_nothing_but_the_test_figures_depends_on_the_test_labels(
    fed_run: Callable[..., Any], shuffle_test_labels: Callable[[], None]
) -> None:
    honest = fed_run("honest")
    shuffle_test_labels()
    blind = fed_run("blind")
    assert blind.summary["test_accuracy"] != honest.summary["test_accuracy"]
    assert same(honest.state, blind.state)
    assert all(blind.summary[k] == honest.summary[k] for k in ("val_accuracy", "best_round", "ridge", "bytes_up"))


def test_bytes_are_those_of_what_would_be_sent(fed_run: Callable[..., Any]) -> None:
    for algorithm, vectors in (("fedavg", 1), ("scaffold", 2)):
        run = fed_run(algorithm, f"federated.algorithm={algorithm}", "federated.dropout_rate=0.4")
        s = run.summary
        sampled = 3 * round(0.15 * 37)
        assert s["ridge"]["bytes_down"] == 37 * 4 * 129 * 10  # the head, to every client that sent sums for it
        assert s["bytes_down"] == s["ridge"]["bytes_down"] + sampled * vectors * 4 * s["trainable_parameters"]
        head = 37 * 8 * (129 * 130 // 2 + 129 * 10)
        assert s["ridge"]["bytes_up"] == head
        assert s["bytes_up"] == head + (sampled - s["dropped"]) * vectors * 4 * s["trainable_parameters"]


@pytest.mark.parametrize("engine", ["sequential", "threaded", "cohort"])
def test_an_update_that_is_not_finite_is_dropped_counted_and_logged(fed_run: Callable[..., Any], engine: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    kind = {"sequential": Sequential, "threaded": Threaded, "cohort": Cohort}[engine]
    real = kind.updates

    def broken(self: Any, *args: Any) -> Iterator[Update]:
        for i, u in enumerate(real(self, *args)):
            yield replace(u, delta=u.delta * float("nan")) if i == 1 else u

    monkeypatch.setattr(kind, "updates", broken)
    run = fed_run("r", f"federated.engine={engine}")
    assert run.summary["nonfinite"] == 3
    assert all(torch.isfinite(t).all() for t in run.state.values())
    assert "is not finite and was dropped" in (run.path / "log.txt").read_text()


def test_a_cohort_of_which_nothing_is_finite_is_one_line(fed_run: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="no client's update is finite"):
        fed_run("r", "optim.lr=1e30", "optim.clip_norm=null")


def test_a_step_of_the_server_that_is_not_finite_is_one_line_and_no_such_model_is_kept(fed_run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="round 1: the server's step is not finite"):
        fed_run("r", "server.lr=1e38", "federated.rounds=1", "federated.clients=10")
    assert not (tmp_path / "r").exists()


def test_a_round_that_everyone_misses_changes_nothing(fed_run: Callable[..., Any]) -> None:
    run = fed_run("r", "federated.dropout_rate=0.9999999", "head=linear")
    begin = create_model("tiny", 10, weights="pretrained", image_size=SIDE).state_dict()
    assert all(torch.equal(run.state[n], t) for n, t in begin.items())
    assert run.metrics[0]["clients"] == 0


def test_a_target_accuracy_stops_the_run(fed_run: Callable[..., Any]) -> None:
    run = fed_run("r", "federated.target_accuracy=0.2", "federated.rounds=10", "federated.eval_every=1")
    assert run.summary["rounds"] == 1


def torn(run: Any) -> Any:
    """A run as a kill leaves it: no summary, the newest checkpoint cut short."""
    (run.path / "summary.json").unlink()
    newest = sorted((run.path / "checkpoints").iterdir())[-1] / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    return run


@pytest.mark.parametrize(
    "options",
    [
        ["experiment=fedavg_noniid", "data.val_fraction=0", "head=linear"],
        ["experiment=centralized", "data.val_fraction=0", "head=linear", "optim.batch_size=60"],
        ["experiment=fedavg_noniid", "federated.target_accuracy=0.2", "federated.rounds=9"],
        ["experiment=fedavg_noniid", "train.patience=1", "federated.eval_every=1", "federated.rounds=9"],
    ],
    ids=["federated without validation", "centralised without validation", "target", "patience"],
)
def test_a_torn_end_is_made_again_from_the_checkpoint_before(fed_run: Callable[..., Any], options: list[str]) -> None:
    run = fed_run("r", *options, "run.checkpoint_minutes=0", "run.keep_last=3")
    summary, state = run.summary, run.state
    again = torn(run).resume()
    assert same(again.state, state)
    assert {k: again.summary.get(k) for k in ("rounds", "epochs", "test_accuracy")} == {
        k: summary.get(k) for k in ("rounds", "epochs", "test_accuracy")
    }
    log = (run.path / "log.txt").read_text()
    assert log.count("is damaged") == 1
    assert "resuming at" in log


def test_the_federated_head_is_the_centralised_one(fed_run: Callable[..., Any], fast_run: Callable[..., Any]) -> None:
    federated_, central = fed_run("f", "federated.rounds=1"), fast_run("c", "train.epochs=1")
    assert federated_.summary["ridge"]["lambda"] == central.summary["ridge"]["lambda"]
    assert torch.allclose(federated_.state["head.weight"], central.state["head.weight"], atol=1e-6)


def test_the_run_keeps_its_partition(fed_run: Callable[..., Any]) -> None:
    import json

    run = fed_run("r", "federated.rounds=1")
    record = json.loads((run.path / "partition.json").read_text())
    assert record["clients"] == 37
    assert record["classes_min"] == record["classes_max"] == 2
    assert np.asarray(record["label_counts"]).sum() == record["samples"] == 540


def test_more_clients_than_samples_is_refused_before_a_run_exists(fed_run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="so that each has data"):
        fed_run("r", "data.partition=iid", "federated.clients=6000")
    assert not (tmp_path / "r").exists()


def test_a_hundred_thousand_clients_partition_completely() -> None:
    labels = np.tile(fl.load_dataset("fashion_mini").train.labels.numpy(), 40)
    for scheme in ({"scheme": "iid"}, {"scheme": "classes", "classes_per_client": 2}):
        shards = partition(labels, 100_000, **scheme)  # type: ignore[arg-type]
        assert len(shards) == 100_000
        assert sum(map(len, shards)) == len(labels)
        assert min(map(len, shards)) >= 1
