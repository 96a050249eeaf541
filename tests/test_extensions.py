"""Rules, algorithms and metrics of a user's own: the code of docs/howto/own-rule.md as a script outside the package."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FAST, few_images
from processes import completed, start

import fedlens as fl

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "own-rule.md"
FEW = [*FAST, f"data.root={few_images()}", "data.val_fraction=0.25", "model.freeze_blocks=3"]
FED = ["federated.clients=6", "federated.participation=0.5", "federated.local_steps=2", "federated.rounds=4", "federated.eval_every=2", "optim.batch_size=4"]  # fmt: skip
OWN = {
    "mask.strategy": "least_salient",
    "server.merge": "agreeing_mean",
    "server.optimizer": "lion",
    "optim.schedule": "square_root",
    "data.partition": "by_order",
    "federated.algorithm": "feddyn",
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mine.py: the page's code up to its use, and the command line."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    script = tmp_path_factory.mktemp("mine") / "mine.py"
    script.write_text("\n".join(block for block in blocks if not block.startswith("small =")))
    return script


def test_help_and_explain_know_a_variant_that_a_script_registers(mine: Path) -> None:
    shown = subprocess.run([sys.executable, str(mine), "run", "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in (*OWN.values(), "worst_class"))
    assert "share=0.7" in completed(["explain", "server.merge"], mine).stdout
    assert "alpha=0.01" in completed(["explain", "federated.algorithm"], mine).stdout


def test_one_run_uses_a_variant_of_every_kind(mine: Path, tmp_path: Path) -> None:
    chosen = [f"{key}={name}" for key, name in OWN.items()]
    options = ["server.merge_options.share=0.6", "federated.algorithm_options.alpha=0.1", "train.metrics=[worst_class]", "mask.rounds=1"]
    done = completed(["run", "experiment=fedavg_noniid_sparse", *FEW, *FED, *chosen, *options, f"run.dir={tmp_path / 'r'}"], mine)
    assert done.returncode == 0, done.stderr
    run = fl.load_run(tmp_path / "r")
    assert {key: value for key, value in OWN.items() if value not in (tmp_path / "r" / "config.yaml").read_text()} == {}
    assert 0 <= run.summary["test_worst_class"] <= run.summary["test_accuracy"]
    assert all("val_worst_class" in line for line in run.metrics if "val_loss" in line)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("server.merge_options.shared=0.6", "server.merge_options"),
        ("server.merge=agreeing_maen", "Did you mean 'agreeing_mean'?"),
        ("federated.algorithm_options.alpha=x federated.algorithm=feddyn optim.lr=-1", "optim.lr"),
    ],
)
def test_a_wrong_name_or_option_is_one_line(mine: Path, tmp_path: Path, override: str, message: str) -> None:
    words = ["run", "experiment=fedavg_iid", "server.merge=agreeing_mean", *FEW, *override.split(), f"run.dir={tmp_path / 'r'}"]
    done = completed(words, mine)
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "r").exists()


def test_the_table_of_a_study_has_an_own_rule_and_an_own_metric(mine: Path, tmp_path: Path) -> None:
    plan = {
        "question": "Which rule?",
        "seeds": 2,
        "set": ["experiment=fedavg_iid", *FEW, *FED, "federated.rounds=2", "train.metrics=[worst_class]"],
        "tables": [{"name": "rules", "grid": {"server.merge": ["mean", "agreeing_mean"]}}],
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    done = completed(["study", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "study")], mine)
    assert done.returncode == 0, done.stderr
    assert re.search(r"agreeing_mean.* ± ", done.stdout)
    assert "worst_class" in done.stdout
    header, *rows = (tmp_path / "study" / "report" / "results.csv").read_text().splitlines()
    assert "test_worst_class" in header and len(rows) >= 2


def test_the_state_of_an_own_algorithm_survives_a_kill(mine: Path, tmp_path: Path) -> None:
    words = ["experiment=fedavg_noniid", "data.classes_per_client=2", *FEW, *FED, "federated.algorithm=feddyn", "federated.algorithm_options.alpha=0.1",
             "run.checkpoint_minutes=0", "run.keep_last=100", "federated.rounds=8"]  # fmt: skip
    assert completed(["run", *words, f"run.dir={tmp_path / 'whole'}"], mine).returncode == 0
    killed = tmp_path / "killed"
    process = start(["run", *words, f"run.dir={killed}"], mine)
    while not (killed / "checkpoints" / "step-000000002").is_dir() and process.exitcode is None:
        process.join(0.005)
    process.kill()
    process.join()
    assert not (killed / "summary.json").exists()
    assert completed(["resume", str(killed)], mine).returncode == 0
    assert "resuming at" in (killed / "log.txt").read_text()
    whole, resumed = fl.load_run(tmp_path / "whole"), fl.load_run(killed)
    assert all(torch.equal(tensor, resumed.state[name]) for name, tensor in whole.state.items())
