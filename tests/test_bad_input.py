"""Whatever is wrong with the input: one clear line that names the field, exit status 2, nothing written."""

import os
from pathlib import Path

import pytest

from fedlens.cli import main

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
