"""Estimates of a study before it starts: close to what is measured, and nothing left to do once it is finished."""

import json
from pathlib import Path

import pytest
from conftest import FAST

from fedlens.models import create_model
from fedlens.models.vit import ViT
from fedlens.overrides import compose
from fedlens.study.estimate import Speed, estimate, measure, memory
from fedlens.study.plan import read_plan
from fedlens.study.runner import Study

RECORDS = Path(__file__).parents[1] / "benchmarks" / "records" / "2026-11-15-gpu-round"


def peaks() -> dict[str, float]:
    """GiB by contender, ViT-S/16 at 224 px in bf16."""
    return {row["contender"]: row["peak_gib"] for row in json.loads((RECORDS / "round.json").read_text())["rows"]}


@pytest.mark.parametrize(
    ("options", "share", "measured"),
    [
        (["experiment=fedavg_iid", "federated.clients=100", "federated.participation=0.1"], 1.0, peaks()["cohort_compiled"]),
        (["experiment=fedavg_iid", "federated.chunk=1"], 1.0, peaks()["sequential_compiled"]),
        (["experiment=centralized", "optim.batch_size=640"], 1.0, peaks()["one_model"]),
        (
            ["experiment=fedavg_iid_sparse", "federated.clients=100", "federated.participation=0.1"],
            0.1,
            19.0,
        ),  # records/README.md, mask-rules
    ],
)
def test_estimated_memory_is_within_ten_percent_of_the_recorded_peak(options: list[str], share: float, measured: float) -> None:
    config = compose([*options, *(["optim.batch_size=64"] if "fedavg" in options[0] else [])])
    model = create_model("dino_vits16", 100, image_size=224)
    assert isinstance(model, ViT)
    trained = round(share * sum(p.numel() for p in model.parameters()))
    assert memory(config, model, trained, half=True) / 2**30 == pytest.approx(measured, rel=0.10)


def test_a_longer_run_takes_longer_and_curves_cost_evaluations() -> None:
    speed = Speed(100, 1000, samples=600, val=100, test=200, parameters=1000)

    def of(*overrides: str) -> float:
        return speed.seconds(compose(["experiment=centralized", "head=linear", *overrides]))

    assert of("train.epochs=3") - of("train.epochs=2") == pytest.approx(600 / 100 + 100 / 1000)
    assert of("train.epochs=2", "train.test_every=1") - of("train.epochs=2") == pytest.approx(2 * 200 / 1000)


def test_the_estimate_counts_what_is_left_and_nothing_once_all_is_finished(tmp_path: Path) -> None:
    plan = tmp_path / "two.yaml"
    plan.write_text(json.dumps({"seeds": 2, "set": [*FAST, "experiment=centralized", "train.epochs=1"], "tables": [{"name": "one"}]}))
    study = Study(read_plan(str(plan)), tmp_path / "study", jobs=1)
    before = estimate(study, 1)
    assert before.startswith("2 runs, 2 to do: about ") and "GB on disk" in before
    study.run()
    assert estimate(Study(read_plan(str(plan)), tmp_path / "study", jobs=1), 1) == "2 runs, all finished."
    assert measure(study.selected()[0].config).parameters == study.run().runs[0].summary["parameters"]


@pytest.mark.parametrize("place", ["embedded", "cifar100"])
def test_the_hand_in_asks_every_question_of_the_course(place: str) -> None:
    plan = read_plan("handin", place=place)
    tables = {table.name: [p for p in plan.runs if p.cell.table == table.name] for table in plan.tables}
    assert ", ".join(tables) == (
        "centralised lengths, schedules, IID, Nc and J, sparsity, calibration rounds, mask rules, six models, extension: merge rules"
    )
    assert {p.config.mask.strategy for p in tables["mask rules"]} >= {
        "least_sensitive",
        "most_sensitive",
        "lowest_magnitude",
        "highest_magnitude",
        "random",
        None,
    }
    assert {p.config.experiment for p in tables["six models"]} == {
        f"{name}{sparse}" for name in ("centralized", "fedavg_iid", "fedavg_noniid") for sparse in ("", "_sparse")
    }
    assert {p.config.federated.local_steps * p.config.federated.rounds for p in tables["Nc and J"]} == {32 if place == "embedded" else 240}
    federated = [p.config.federated for p in plan.runs if p.config.trainer == "federated"]
    assert {(f.clients, f.participation) for f in federated} == {(100, 0.1)}
    assert all(p.config.train.test_every for p in plan.runs) and len({p.seed for p in plan.runs}) == 3
