"""Whatever is wrong with the input: one clear line that names the field, exit status 2, nothing written."""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedlens as fl
from fedlens.cli import main
from fedlens.errors import UserError, system_errors
from fedlens.overrides import from_file

RUN = ["run", "run.progress=false", "train.epochs=1", "device=cpu"]

BAD: list[tuple[list[str], str]] = [
    ([*RUN, "optim.lrr=1"], "Did you mean 'optim.lr'"),
    ([*RUN, "optm.lr=1"], "Did you mean 'optim.lr'"),
    ([*RUN, "sede=1"], "Did you mean 'seed'"),
    ([*RUN, "optim.lr=-1"], "optim.lr must be > 0, got -1.0"),
    ([*RUN, "optim.lr=0"], "optim.lr"),
    ([*RUN, "optim.lr=nan"], "optim.lr"),
    ([*RUN, "optim.lr=inf"], "optim.lr"),
    ([*RUN, "optim.lr=high"], "optim.lr"),
    ([*RUN, "optim.momentum=1"], "optim.momentum"),
    ([*RUN, "optim.weight_decay=-0.1"], "optim.weight_decay"),
    ([*RUN, "optim.batch_size=0"], "optim.batch_size"),
    ([*RUN, "optim.batch_size=1.5"], "optim.batch_size"),
    ([*RUN, "optim.schedule=cosin"], "cosine"),
    ([*RUN, "optim.warmup=1"], "optim.warmup"),
    ([*RUN, "optim.milestones=[0.5,2]"], "optim.milestones"),
    ([*RUN, "optim.clip_norm=0"], "optim.clip_norm"),
    ([*RUN, "optim.nesterov=true", "optim.momentum=0"], "optim.nesterov"),
    ([*RUN, "train.epochs=-1"], "train.epochs"),
    ([*RUN, "train.epochs=three"], "train.epochs"),
    ([*RUN, "train.label_smoothing=1"], "train.label_smoothing"),
    ([*RUN, "train.chunk=0"], "train.chunk must be >= 1 or null, got 0"),
    ([*RUN, "train.patience=0"], "train.patience"),
    ([*RUN, "train.patience=2", "head=linear", "data.val_fraction=0"], "train.patience"),
    ([*RUN, "train.precision=fp8"], "train.precision"),
    ([*RUN, "data=cifar1000"], "Did you mean 'cifar100'"),
    ([*RUN, "data=cifar100"], "fedlens data prepare cifar100"),
    ([*RUN, "data=folder"], "train"),
    ([*RUN, "data.name=nosuch"], "data.name"),
    ([*RUN, "data.val_fraction=1"], "data.val_fraction"),
    ([*RUN, "data.val_fraction=0"], "head=linear"),
    ([*RUN, "data.val_fraction=0.00001"], "0 validation samples"),
    ([*RUN, "data.partition=shards"], "data.partition"),
    ([*RUN, "data.crop=-1"], "data.crop"),
    ([*RUN, "optim.batch_size=1000000", "model.image_size=4095"], "optim.batch_size must be smaller: a batch needs over"),
    ([*RUN, "optim.batch_size=1000001"], "optim.batch_size must be in [1, 1e+06]"),
    ([*RUN, f"model.image_size={10**23}"], "model.image_size must be in [1, 4096]"),
    ([*RUN, "experiment=fedavg_iid", "federated.exclude=[[1]]"], "federated.exclude must be a list of values >= 0, got [[1]]"),
    ([*RUN, "experiment=fedavg_iid", "server.alphas=${experiment}"], "server.alphas"),
    ([*RUN, "experiment=fedavg_iid", "server.merge_options=${experiment}"], "server.merge_options must be a mapping, got 'fedavg_iid'"),
    ([*RUN, "experiment=fedavg_iid", "federated.clients=1000000000"], "federated.clients must be in [1, 1e+06]"),
    ([*RUN, "experiment=fedavg_iid", "federated.local_steps=1000000000"], "federated.local_steps must be in [1, 1e+06]"),
    (["data", "inspect", "federated.clients=1000000000"], "federated.clients must be in [1, 1e+06]"),
    (["study", "quick", "--plan", "--seeds", "99999999999"], "at most 1000"),
    (["study", "many.yaml", "--plan"], "at most 1000"),
    ([*RUN, "model=vit"], "model"),
    ([*RUN, "model.name=vit_huge"], "model.name"),
    ([*RUN, "model.image_size=30"], "model.image_size must be a multiple of the patch, 7, got 30"),
    ([*RUN, "model.weights=/no/such/file.pth"], "is not a file"),
    ([*RUN, "model.dropout=1"], "model.dropout"),
    ([*RUN, "model.freeze_blocks=7"], "model.freeze_blocks"),
    ([*RUN, "model.freeze_backbone=true", "model.freeze_head=true"], "model.freeze_head must be false"),
    ([*RUN, "model=timm:nosuch"], "timm"),
    ([*RUN, "device=gpu"], "device"),
    ([*RUN, "device=cuda:99"], "device"),
    ([*RUN, "head=mlp"], "one of linear, ridge"),
    ([*RUN, "experiment=centralised"], "Did you mean 'centralized'"),
    ([*RUN, "seed=-1"], "seed"),
    ([*RUN, "run.trackers=[excel]"], "run.trackers"),
    ([*RUN, "run.keep_last=0"], "run.keep_last"),
    ([*RUN, "run.dir=occupied"], "not an empty folder"),
    ([*RUN, "run.dir=occupied/file.txt"], "run.dir"),
    ([*RUN, "run.dir=/proc/x"], "run.dir: /proc/x cannot be written"),
    ([*RUN, "+new.key=1"], "neither added nor deleted"),
    ([*RUN, "~seed"], "neither added nor deleted"),
    ([*RUN, "seed"], "not key=value"),
    ([*RUN, "optim.lr=[[["], "not key=value"),
    ([*RUN, "experiment=fedavg_iid", "federated.participation=0"], "federated.participation"),
    ([*RUN, "experiment=fedavg_iid", "federated.local_steps=0"], "federated.local_steps"),
    ([*RUN, "experiment=fedavg_iid", "federated.algorithm=fedsgd"], "one of fedavg, fedprox, scaffold, fednova"),
    ([*RUN, "experiment=fedavg_iid", "federated.engine=ray"], "one of auto, sequential, threaded, cohort"),
    ([*RUN, "experiment=fedavg_iid", "federated.clients=5401"], "so that each has data"),
    ([*RUN, "experiment=fedavg_iid", "federated.dropout_rate=1"], "federated.dropout_rate"),
    ([*RUN, "experiment=fedavg_iid", "server.merge=average"], "server.merge"),
    ([*RUN, "experiment=fedavg_iid", "server.optimizer=lion"], "server.optimizer"),
    ([*RUN, "experiment=fedavg_iid", "server.merge_options.trim=0.5"], "server.merge_options must be empty for mean"),
    ([*RUN, "experiment=fedavg_iid", "server.merge=trimmed_mean", "server.merge_options.trim=0.5"], "server.merge_options.trim"),
    ([*RUN, "experiment=fedavg_iid", "federated.algorithm=fedprox", "federated.algorithm_options.mu=-1"], "federated.algorithm_options.mu"),
    ([*RUN, "experiment=fedavg_iid", "trainer=centralized"], "trainer must be federated"),
    ([*RUN, "train.metrics=[macro_f2]"], "Did you mean 'macro_f1'"),
    ([*RUN, "experiment=fedavg_iid", "server.alphas=[1,-1]"], "server.alphas"),
    ([*RUN, "experiment=fedavg_iid", "server.alphas=[1]", "server.optimizer=adam"], "server.alphas"),
    ([*RUN, "experiment=fedavg_iid", "server.alphas=[1]", "head=linear", "data.val_fraction=0"], "server.alphas"),
    ([*RUN, "experiment=fedavg_iid", "federated.target_accuracy=0.5", "head=linear", "data.val_fraction=0"], "federated.target_accuracy"),
    ([*RUN, "experiment=fedavg_noniid", "data.classes_per_client=11"], "at most the number of classes"),
    ([*RUN, "experiment=fedavg_noniid", "federated.clients=9"], "without a client"),
    (["run", "--config", "missing.yaml"], "missing.yaml"),
    (["run", "--config", "occupied/file.txt"], "occupied/file.txt"),
    (["run", "-m", "--config", "x.yaml", "seed=1,2"], "--config cannot be combined with -m"),
    (["run", "-m", "--print-config", "seed=1,2"], "--print-config cannot be combined with -m"),
    (["run", "-m", "optim.lr=abc,0.1"], "optim.lr: Value 'abc' of type 'str' could not be converted to Float"),
    (["run", "-m", "optim.batch_size=1.5", "seed=0,1"], "optim.batch_size"),
    (["run", "-m", "experiment=centralized,centralised"], "Did you mean 'centralized'"),
    (["resume", "nowhere"], "is not a run folder"),
    (["resume", "occupied"], "is not a run folder"),
    (["data", "inspect", "data.partition=classes"], "data.classes_per_client"),
    (["data", "inspect", "data.partition=classes", "data.classes_per_client=11"], "at most the number of classes, 10"),
    (["data", "inspect", "data.partition=classes", "data.classes_per_client=1", "federated.clients=5"], "without a client"),
    (["data", "inspect", "data.partition=dirichlet"], "data.alpha"),
    (["data", "inspect", "federated.clients=0"], "federated.clients"),
    (["data", "inspect", "--out", "no/such/folder/x.png"], "--out"),
    (["data", "inspect", "--out", "x.nosuchformat"], "--out"),
    (["data", "prepare", "cifar99"], "Did you mean"),
    (["demo", "--out", "occupied"], "is not the folder of a demo"),
]


def tree(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*")}


@pytest.mark.parametrize(("argv", "message"), BAD, ids=[" ".join(a[-2:]) for a, _ in BAD])
def test_bad_input_is_one_line_status_2_and_nothing_written(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    (work / "occupied").mkdir(parents=True)
    (work / "occupied" / "file.txt").write_text("mine: [")
    (work / "many.yaml").write_text("seeds: 99999999999\ntables: [{cases: [{name: A, set: []}]}]\n")
    monkeypatch.chdir(work)
    before = tree(work)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert tree(work) == before


@pytest.mark.parametrize("argv", [[], ["fly"], ["run", "--no-such-option"], ["resume"], ["data"], ["demo", "--seed", "x"]])
def test_a_wrong_command_line_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: fedlens" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([*RUN, f"run.dir={tmp_path}/file/run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert os.listdir(tmp_path) == ["file"]


# paths

LONG = "x" * 300
AT_EVERY_PLACE = [
    [*RUN, f"run.dir={LONG}"],
    [*RUN, f"run.dir={LONG}/r"],
    [*RUN, f"model.weights={LONG}"],
    [*RUN, f"model.weights={LONG}/model.safetensors"],
    [*RUN, f"data.root={LONG}", "data=cifar100"],
    [*RUN, f"data.root={LONG}", "data=folder"],
    [*RUN, f"data.root={LONG}", "data=fashion_mnist"],
    [*RUN, f"mask.path={LONG}", "mask.strategy=random"],
    [*RUN, f"mask.like={LONG}", "mask.strategy=random_layerwise"],
    ["run", "--config", LONG],
    ["resume", LONG],
    ["report", LONG],
    ["report", ".", "--out", LONG],
    ["keep", LONG],
    ["study", f"{LONG}.yaml"],
    ["study", "quick", "--out", LONG],
    ["search", f"{LONG}.yaml"],
    ["search", "centralized", "--out", LONG],
    ["data", "inspect", "--out", LONG],
    ["data", "prepare", "folder", "--root", LONG],
    ["demo", "--out", LONG],
    ["arith", "sweep", LONG],
    ["arith", "negate", LONG, "--out", "tau"],
    ["federate", "init", LONG],
    ["federate", "server", LONG],
    ["federate", "client", LONG],
]


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that refuses a command."""
    logging.getLogger("fedlens").handlers.clear()  # main adds one for today's stderr
    capsys.readouterr()
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("run runs/", "ridge head: "))]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("argv", AT_EVERY_PLACE, ids=lambda argv: " ".join(argv).replace(LONG, "LONG").removeprefix(" ".join(RUN)))
def test_a_name_of_300_letters_is_refused_at_every_place(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(argv, capsys)
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]


def test_names_that_are_not_utf_8_are_refused_before_anything_is_written(
    fast_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = os.fsdecode(b"caf\xe9")
    for argv in ([*RUN, f"run.dir={bad}"], ["report", bad], ["report", ".", "--out", bad], ["demo", "--out", bad]):
        assert r"caf\udce9 is not UTF-8" in refused(argv, capsys)
    assert not list(tmp_path.iterdir())
    fast_run("runs/here", "train.epochs=1", "head=linear")
    (tmp_path / "runs" / "here").rename(tmp_path / "runs" / bad)
    assert "is not UTF-8; rename it" in refused(["report", "runs", "--out", "made"], capsys)
    assert not (tmp_path / "made").exists()


def test_an_error_shows_control_characters_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert r"\x1b[31m" in refused(["resume", "\x1b[31mred\nerror: forged\a"], capsys)


# data and weights


def cifar_python(root: Path, **changed: Any) -> None:
    """Write CIFAR-100 in its Python layout with two images, with some entries changed."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    batch = {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0, 1]} | changed
    for name in ("train", "test"):
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": changed.get("names", [f"class {i}" for i in range(100)])}))


def nested_lists() -> list[Any]:
    """A list that names 2 ** 60 lists, each of which is stored once."""
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fine_labels": [0, 2**70]}, "list of 2 integers from 0 to 99"),
        ({"fine_labels": nested_lists()}, "list of 2 integers"),
        ({"data": nested_lists()}, "table of bytes"),
        ({"more": nested_lists(), "fine_labels": [0, -1]}, "list of 2 integers"),
        ({"names": nested_lists()}, "must be a list of class names"),
    ],
    ids=["huge label", "nested labels", "nested data", "nested entry", "nested names"],
)
def test_a_pickle_that_claims_too_much_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cifar_python(tmp_path, **changed)
    assert message in refused(["data", "inspect", "data=cifar100", f"data.root={tmp_path}", f"--out={tmp_path / 'x.png'}"], capsys)
    assert not (tmp_path / "x.png").exists()


def test_weights_that_claim_more_numbers_than_the_file_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"cls_token": torch.zeros(1).expand(2**40)}, tmp_path / "huge.pth")
    assert "does not hold the numbers of tensor 'cls_token'" in refused([*RUN, f"model.weights={tmp_path}/huge.pth"], capsys)
    torch.save({"cls_token": torch.eye(3).to_sparse()}, tmp_path / "sparse.pth")
    assert "does not hold the numbers of tensor" in refused([*RUN, f"model.weights={tmp_path}/sparse.pth"], capsys)


def test_a_pipe_named_like_an_image_is_refused_instead_of_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        os.mkfifo(tmp_path / part / "a" / "x.png")
    assert "x.png: cannot be read (not a file)" in refused(["data", "inspect", "data=folder", f"data.root={tmp_path}"], capsys)


# memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.45 GiB for an array"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
        ),
    ],
)
def test_memory_that_runs_out_on_a_cpu_is_one_line_and_leaves_no_folder(
    error: Exception, fast_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: object) -> None:
        raise error

    monkeypatch.setattr("fedlens.training.centralized.fit_head_and_mask", fit)
    with pytest.raises(UserError, match=r"device: out of memory; try a smaller optim\.batch_size"):
        fast_run("r", "train.epochs=1")
    assert not (tmp_path / "r").exists()


def test_an_allocation_that_torch_refuses_is_one_line() -> None:
    with pytest.raises(UserError, match="device: out of memory"), system_errors():
        torch.empty(2**62, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shapes"), system_errors():
        torch.ones(2, 3) @ torch.ones(2, 3)


# the streams of the process


def fedlens(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `fedlens …` in a shell with redirections."""
    shell = f"'{sys.executable}' -m fedlens {command}"
    return subprocess.run(["sh", "-c", shell], cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


def test_a_closed_or_full_standard_stream_does_not_end_a_command_silently(tmp_path: Path) -> None:
    full = fedlens("explain optim.lr >/dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (2, "error: a file or standard output: no space left on device.\n")
    closed = fedlens("explain optim.lr >&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (0, "")
    silent = fedlens("run train.epochs=0 head=linear device=cpu run.dir=r 2>&-", tmp_path)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "r\n", "")
    assert (tmp_path / "r" / "summary.json").is_file() and "run r" in (tmp_path / "r" / "log.txt").read_text()
    wrong = fedlens("run train.epochs=-1 2>&- <&-", tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert os.listdir(tmp_path) == ["r"]


# at random

HARNESS = Path(__file__).parents[1] / "benchmarks" / "bad_input.py"


def test_random_overrides_and_malformed_inputs_are_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long run is in benchmarks/records."""
    monkeypatch.syspath_prepend(str(HARNESS.parent))
    tallies = import_module("bad_input").harness(seed=5, count=40, runs=1, damaged=16)
    assert [failure for tally in tallies for failure in tally.failures] == []
    assert sum(tally.refused for tally in tallies) > 25 and all(tally.accepted + tally.refused for tally in tallies)


def test_the_harness_notices_a_traceback_two_lines_and_another_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HARNESS.parent))
    harness = import_module("bad_input")
    tally = harness.Tally("bad")

    def says(*lines: str) -> Callable[[], int]:
        return lambda: print(*lines, sep="\n", file=sys.stderr) or 2  # type: ignore[func-returns-value]

    for call in (lambda: [][1], lambda: 1, says("error: a", "error: b"), says("error: \x1b"), says("sorry"), says("Traceback", "error: a")):
        harness.attempt(tally, "case", call)
    assert len(tally.failures) == 6
    harness.attempt(tally, "case", says("a log line", "error: a"))
    assert (len(tally.failures), tally.refused) == (6, 1)


# the disk


def test_a_disk_that_takes_no_report_is_not_called_the_run_s_folder(
    fast_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast_run("runs/here", "train.epochs=1", "head=linear")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("fedlens.files.fsync", full)
    line = refused(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "made")], capsys)
    assert "made/" in line and "no space left on device" in line and "run.dir" not in line and "checkpoint" not in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_demo_on_a_read_only_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert "permission denied" in refused(["demo", "--out", str(tmp_path / "demo")], capsys)
    tmp_path.chmod(0o700)


def test_a_demo_where_no_folder_can_be_made_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/proc/demo" in refused(["demo", "--out", "/proc/demo"], capsys)


# the Python interface


def vector() -> fl.TaskVector:
    return fl.TaskVector.between({"w": torch.zeros(4)}, {"w": torch.ones(4)})


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: fl.merge([vector()] * 2, "ties", density=[0.5]), r"density must be a number, got \[0.5\]"),
    (lambda: fl.merge([vector()] * 2, "dare", drop="0.5"), "drop must be a number, got '0.5'"),
    (lambda: fl.merge([vector()] * 2, "trimmed_mean", trim=None), "trim must be a number, got None"),
    (lambda: fl.merge([vector()] * 2, "clipped_mean", clip_norm="1"), "clip_norm"),
    (lambda: fl.merge([vector()] * 2, weights=["1", "x"]), "weights must be 2 numbers"),
    (lambda: fl.merge([vector()] * 2, 3), "merge rule must be one of"),  # type: ignore[arg-type]
    (lambda: fl.merge([{"w": torch.ones(2)}] * 2), "list of task vectors, got dict"),  # type: ignore[list-item]
    (lambda: fl.merge({"w": torch.ones(2)}), "list of task vectors, got str"),  # type: ignore[arg-type]
    (lambda: fl.run("experiment=centralized"), "overrides must be a list such as .*, got str"),
    (lambda: fl.run({"experiment": "centralized"}), "overrides must be a list such as .*, got dict"),  # type: ignore[arg-type]
    (lambda: fl.run([1]), "overrides must be a list such as"),  # type: ignore[list-item]
    (lambda: fl.run(None), "overrides must be a list such as .*, got NoneType"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_a_wrong_argument_from_python_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_received_configuration_reads_no_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    file = tmp_path / "config.yaml"
    file.write_text('experiment: centralized\ndata: {root: "\\x24{oc.env:WANDB_API_KEY}"}\n')
    with pytest.raises(UserError, match="interpolation") as error:
        from_file(file)
    assert "secret" not in str(error.value)
