"""The command line as people use it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FAST
from processes import completed

import fedlens as fl
from fedlens.cli import main, parser
from fedlens.cli.runs import check_types
from fedlens.overrides import compose


def commands() -> list[list[str]]:
    arith = [["arith", part] for part in ("add", "negate", "scale", "merge", "sweep", "interpolate", "forget", "interference")]
    return [
        ["demo"],
        ["run"],
        ["resume"],
        ["check"],
        ["explain"],
        ["data"],
        ["data", "prepare"],
        ["data", "inspect"],
        ["study"],
        ["report"],
        ["keep"],
        ["search"],
        ["arith"],
        *arith,
        ["federate"],
        *(["federate", part] for part in ("init", "join", "server", "client")),
        ["doctor"],
    ]


@pytest.mark.parametrize("command", [[], *commands()], ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert re.search(r"example: fedlens " + " ".join(command), capsys.readouterr().out)


def test_the_list_of_commands_above_is_complete() -> None:
    (sub,) = (a for a in parser()._actions if hasattr(a, "choices") and isinstance(a.choices, dict))
    assert set(sub.choices) == {c[0] for c in commands()}  # type: ignore[arg-type]


def test_run_prints_the_folder_that_load_run_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *FAST, "train.epochs=1", "seed=3"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.parent == Path("runs")
    assert fl.load_run(path).config.seed == 3
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}  # Hydra wrote nothing and stayed here


def test_a_sweep_makes_one_run_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = completed(["run", "-m", "seed=1,2", *FAST, "train.epochs=1"])
    assert done.returncode == 0, done.stderr
    runs = [fl.load_run(tmp_path / line) for line in done.stdout.split() if line.startswith("runs/centralized")]
    assert sorted(r.config.seed for r in runs) == [1, 2]


def test_a_sweep_with_an_unknown_key_is_refused_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "sede=1,2"]) == 2
    assert "Did you mean 'seed'" in capsys.readouterr().err


def test_a_sweep_may_have_any_value_that_a_run_may_have() -> None:
    words = [
        "seed=range(0,3)",
        "optim.lr=1e-3,0.1",
        "optim.clip_norm=null,1",
        "mask.without=[query],[key,value]",
        "model.weights='a b','c,d'",
    ]
    check_types(["experiment=glob(*)", "experiment=centralized,fedavg_iid", "hydra/launcher=joblib", "data.name='hf:x'", *words])


@pytest.mark.parametrize(
    "path", ["été/a", "/data/images (copy)", "it's", "a=b", "x#1", "[x]", "{x}", "1e5", "0.10", "1_0", "true", "end\\", "q\\'", "50%?x"]
)
def test_a_path_may_have_any_letters_and_stays_as_it_is(path: str) -> None:
    assert compose([f"run.dir={path}"]).run.dir == path
    assert compose([f"data=hf:{path}"]).data.name == f"hf:{path}"


def test_home_and_null_are_what_they_are_for_a_text() -> None:
    assert compose(["run.dir=~/a"]).run.dir == str(Path.home() / "a")
    assert compose(["run.dir=null"]).run.dir is None
    assert compose(["run.dir='1e5'"]).run.dir == "1e5"


def test_print_config_shows_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "model=dino_vits16", "data=cifar100", "optim.lr=1e-4", "seed=3", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "name: dino_vits16" in out
    assert "name: cifar100" in out
    assert "lr: 0.0001" in out


def test_a_recipe_for_model_and_experiment_is_found_and_yields_to_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for extra, rate in (([], "0.0004"), (["optim.lr=1e-3"], "0.001")):
        assert main(["run", "experiment=fedavg_noniid", "model=dino_vits16", "data=cifar100", *extra, "--print-config"]) == 0
        assert f"  lr: {rate}\n" in capsys.readouterr().out


def test_doctor_tells_what_is_missing_and_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "fedlens data prepare cifar100" in out
    assert "dino_deitsmall16_pretrain.pth" in out
    assert "6,000 + 1,000 images" in out


def test_inspect_prints_statistics_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.png"
    assert main(["data", "inspect", "data.partition=classes", "data.classes_per_client=2", "federated.clients=20", "--out", str(out)]) == 0
    assert "classes_max" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")


def test_inspect_says_which_file_it_wrote_and_how_many_clients_it_drew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", "federated.clients=101", "--out", str(tmp_path / "part")]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["part.png"]
    assert f"figure: {tmp_path / 'part.png'} (the first 100 of 101 clients)\n" in capsys.readouterr().out
    assert main(["data", "inspect", "federated.clients=100", "--out", str(tmp_path / "part.svg")]) == 0
    assert f"figure: {tmp_path / 'part.svg'}\n" in capsys.readouterr().out


def test_what_hydra_refuses_of_a_sweep_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedlens", "run", "-m", "hydra/launcher=nosuch", "seed=1,2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: override: ") and "nosuch" in done.stderr and done.stderr.count("\n") == 1


def test_importing_fedlens_loads_no_torch() -> None:
    code = "import sys, fedlens; assert 'torch' not in sys.modules; assert {'run', 'partition'} <= set(dir(fedlens)); fedlens.partition"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_resolves() -> None:
    for name in fl.__all__:
        assert callable(getattr(fl, name))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "experiment=centralized"], "continue an interrupted run with: fedlens resume RUN"),
        (["study", "quick"], "the same command continues with what is missing"),
    ],
)
def test_an_interrupt_is_one_line_that_says_how_to_go_on(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedlens.cli.runs.execute", interrupted)
    monkeypatch.setattr("fedlens.study.runner.execute", interrupted)
    assert main(words) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"stopped; {told}"
