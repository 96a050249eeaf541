"""Task arithmetic on finished runs (Ilharco et al. 2023): their task vectors combined, and points θ₀ + α·τ measured.

Whatever is chosen is chosen on validation images; the test set is read after that, at the few points that are reported.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.data.dataset import Split
from fedlens.errors import UserError
from fedlens.lens.editing import SweepPoint, alphas, best, interpolate
from fedlens.lens.geometry import cosines
from fedlens.lens.merging import merge
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector, check_fits
from fedlens.runs.progress import progress_bar
from fedlens.tasks.image import ImageBank
from fedlens.training.bench import set_up
from fedlens.training.head_and_mask import Scorer, evenly
from fedlens.training.run import Run, load_run

Source = str | Path
Alphas = str | Sequence[float]
FISHER_SAMPLES = 256  # images that a run's sensitivities are scored on
FARTHEST = 10.0  # the largest α of a default range, however sparse τ is


class Lab:
    """A run's data and model, to measure any point θ of its weight space on: a flat vector of all floating-point tensors."""

    def __init__(self, run: Run, device: str | None = None, root: str | None = None) -> None:
        """`device`, `root`: where this machine has them, if not where the run's had."""
        config = run.config
        config.model.weights = None  # every tensor comes from the points that are measured
        config.device, config.data.root = device or config.device, root or config.data.root
        self.run, self.bench = run, set_up(config)
        state = self.bench.model.state_dict()
        self.tensors = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        self.space = ParamSpace({name: tensor.shape for name, tensor in self.tensors.items()})

    def theta(self, state: Mapping[str, Tensor]) -> Tensor:
        check_fits(self.space, state, f"{self.run.path}'s model")
        return self.space.flatten({name: state[name] for name in self.tensors}).to(self.bench.device)

    def direction(self, tau: TaskVector) -> Tensor:
        """τ as a direction [P]: what it does not name (a frozen head) stays."""
        check_fits(tau.space, self.tensors, f"{self.run.path}'s model")
        found, device = tau.state(), self.bench.device
        return self.space.flatten({n: found[n].to(device) if n in found else torch.zeros_like(t) for n, t in self.tensors.items()})

    def bank(self, split: Split, classes: Sequence[int] | None = None, others: bool = False) -> ImageBank:
        """A split's images; `classes`: only theirs, `others`: only those of all the other classes."""
        if classes is not None:
            held = torch.isin(split.labels, torch.tensor(classes)) != others
            split = split.subset(held.nonzero().squeeze(1))
        return ImageBank(split, self.bench.device)

    def move_to(self, theta: Tensor) -> None:
        with torch.no_grad():
            for name, view in self.space.views(theta).items():
                self.tensors[name].copy_(view)

    def evaluate(self, theta: Tensor, bank: ImageBank) -> tuple[float, float]:
        """(mean cross-entropy, accuracy) at θ."""
        self.move_to(theta)
        return self.bench.evaluate(bank)

    def logits(self, theta: Tensor, bank: ImageBank) -> Tensor:
        """[samples, classes] at θ, float32."""
        self.move_to(theta)
        bench = self.bench
        bench.model.eval()
        with torch.no_grad(), bench.precision.autocast():
            parts = torch.split(torch.arange(len(bank)), bench.config.train.eval_batch_size)
            return torch.cat([bench.model(bench.pipeline(bank.images(part))).float() for part in parts])


# --- vectors


def is_run(source: Source) -> bool:
    return Path(source).is_dir()


def load_vector(source: Source) -> TaskVector:
    """A finished run's τ, or a task vector's file."""
    return load_run(source).task_vector() if is_run(source) else TaskVector.load(source)


def describe(vectors: Sequence[TaskVector], result: TaskVector) -> list[dict[str, Any]]:
    """norm, density and cosines with each of `vectors`: one row for each of them, then one for the result."""
    table = cosines([*vectors, result])[:, : len(vectors)]
    return [
        {"norm": vector.norm(), "density": vector.density, "cosines": row}
        for vector, row in zip([*vectors, result], table.tolist(), strict=True)
    ]


def merge_sources(
    sources: Sequence[Source],
    rule: str = "mean",
    weights: Sequence[float] | None = None,
    *,
    device: str | None = None,
    root: str | None = None,
    **options: Any,
) -> tuple[list[TaskVector], TaskVector]:
    """(what was merged, the result). For "fisher" each run is scored on its own training images, at its own final model."""
    vectors = [load_vector(source) for source in sources]
    if rule == "fisher":
        options["fishers"] = [run_fisher(source, device, root) for source in sources]
    return vectors, merge(vectors, rule, weights, **options)


def run_fisher(source: Source, device: str | None = None, root: str | None = None) -> dict[str, Tensor]:
    """A run's sensitivities at its final model on up to FISHER_SAMPLES of its training images."""
    if not is_run(source):
        raise UserError(f"merge: fisher scores sensitivities on a run's own data, but {source} is a file; allowed is run folders")
    lab = Lab(load_run(source), device, root)
    lab.move_to(lab.theta(lab.run.state))
    train = lab.bench.train
    parameters = [name for name, _ in lab.bench.model.named_parameters()]
    found = Scorer(lab.bench, train)(evenly(len(train), FISHER_SAMPLES), parameters)
    return {name: found[name] if name in found else torch.zeros_like(tensor) for name, tensor in lab.tensors.items()}


# --- along a line


def default_alphas(tau: Tensor, lowest: float = -1.0, least: float = 2.0) -> list[float]:
    """From `lowest` up to 1/density, at least `least` and at most FARTHEST: a sparse τ [P] is short, and wants to be stretched."""
    density = int(torch.count_nonzero(tau)) / len(tau)  # of the whole model, also where τ names only the tensors that moved
    highest = round(2 * min(FARTHEST, max(least, 1 / max(density, 1e-9)))) / 2
    step = 0.25 if highest <= 3 else 0.5  # either passes through 0 and 1
    return [lowest + step * i for i in range(round((highest - lowest) / step) + 1)]


def sweep_run(
    run: Run, tau: TaskVector | Source | None = None, grid: Alphas | None = None, *, device: str | None = None, root: str | None = None
) -> dict[str, Any]:
    """θ₀ + α·τ from a run's θ₀, along its own τ or another: α chosen on validation, then the test set there and at α = 0 and 1."""
    end = run.state if tau is None else None
    if isinstance(tau, str | Path):
        tau = load_vector(tau)
    notes = [] if tau is None else same_validation(run, tau.origins)
    vector = run.task_vector() if tau is None else tau
    end = vector.apply_to(run.start) if end is None else end  # its own end to the bit, not to the rounding of θ₀ + τ
    lab = Lab(run, device, root)
    values = default_alphas(lab.direction(vector)) if grid is None else alphas(grid)
    facts = {"run": str(run.path), "norm": vector.norm(), "density": vector.density, "notes": notes}
    return facts | along(lab, lab.theta(run.start), lab.theta(end), values)


def interpolate_runs(
    run_a: Run, run_b: Run, grid: Alphas = "0:1:11", *, device: str | None = None, root: str | None = None
) -> dict[str, Any]:
    """W_a + α(W_b − W_a) between two finished runs of the same data and model; outside [0, 1] it extrapolates."""
    check_same_task(run_a, run_b)
    lab, between = Lab(run_a, device, root), TaskVector.between(run_a.state, run_b.state)
    facts = {"run_a": str(run_a.path), "run_b": str(run_b.path), "norm": between.norm(), "notes": same_validation(run_a, [run_b.origin])}
    return facts | along(lab, lab.theta(run_a.state), lab.theta(run_b.state), alphas(grid))


def along(lab: Lab, start: Tensor, end: Tensor, grid: Sequence[float]) -> dict[str, Any]:
    """Validation at every α on the line from start (0) to end (1); the test set at the best α and, for comparison, at both ends."""
    bench = lab.bench
    check_validation(lab)

    def validate(alpha: float) -> SweepPoint:
        loss, accuracy = lab.evaluate(interpolate(start, end, alpha), bench.val)
        return SweepPoint(alpha, {"val_accuracy": accuracy, "val_loss": loss})

    points: dict[float, SweepPoint] = {}
    with progress_bar("validation", len(grid)) as bar:
        for alpha in grid:
            points[alpha] = validate(alpha)
            bar.advance()
    chosen, test = best(list(points.values())).alpha, lab.bank(bench.dataset.test)
    reported: dict[float, dict[str, float]] = {}
    for alpha in {chosen, 0.0, 1.0}:
        loss, accuracy = lab.evaluate(interpolate(start, end, alpha), test)
        seen = points.get(alpha) or validate(alpha)
        reported[alpha] = {"alpha": alpha, **seen.metrics, "test_accuracy": accuracy, "test_loss": loss}
    rows = [{"alpha": p.alpha, **p.metrics} for p in points.values()]
    return {"points": rows, "chosen": reported[chosen], "start": reported[0.0], "end": reported[1.0]}


def check_validation(lab: Lab) -> None:
    if not len(lab.bench.val):
        raise UserError(f"alphas: chosen on a validation set, but {lab.run.path} has data.val_fraction 0")


def check_same_task(a: Run, b: Run) -> None:
    one, other = a.config, b.config
    for field, ours, theirs in (
        ("data.name", one.data.name, other.data.name),
        ("model.name", one.model.name, other.model.name),
        ("model.image_size", one.model.image_size, other.model.image_size),
    ):
        if ours != theirs:
            raise UserError(f"{field}: {ours!r} in {a.path} and {theirs!r} in {b.path}, allowed is the same in both")


def same_validation(run: Run, origins: Iterable[str]) -> list[str]:
    """A note for every other run that trained on what this one validates on."""
    ours, notes = json.loads(run.origin), []
    for told in sorted(origins):
        theirs = _told(told)
        if theirs and theirs["data"] == ours["data"] and any(theirs[key] != ours[key] for key in ("seed", "val_fraction")):
            notes.append(
                f"{theirs['run']} has another seed or data.val_fraction: it trained on validation images of {run.path}, which flatters it there"
            )
    return notes


def _told(told: str) -> dict[str, Any]:
    """What a run said; {}: somebody else's words."""
    try:
        found = json.loads(told)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.keys() >= {"run", "data", "seed", "val_fraction"} else {}
