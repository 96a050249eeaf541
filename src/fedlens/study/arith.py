"""Task arithmetic on finished runs (Ilharco et al. 2023): combine their task vectors and evaluate points θ₀ + α·τ.

α is chosen on validation images; the test set is read afterwards, at the reported points only.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.data.dataset import Split
from fedlens.errors import UserError
from fedlens.lens.editing import SweepPoint, alphas, best, interpolate
from fedlens.lens.space import ParamSpace
from fedlens.lens.task_vectors import TaskVector, check_fits
from fedlens.runs.progress import progress_bar
from fedlens.tasks import Samples
from fedlens.training.bench import set_up
from fedlens.training.head_and_mask import Scorer, evenly
from fedlens.training.run import Run, load_run

Source = str | Path  # a run folder or the file of a task vector
Alphas = str | Sequence[float]
FISHER_SAMPLES = 256  # images per run for its sensitivities
LARGEST_ALPHA = 10.0  # of a default range


class PointEvaluator:
    """A run's data and model, to evaluate any point θ of its weight space: a flat vector [P] of all floating-point tensors."""

    def __init__(self, run: Run, device: str | None = None, root: str | None = None) -> None:
        """`device`, `root`: device and folder of the data; default: those of the run."""
        config = run.config
        config.model.weights = None  # every evaluated point sets all tensors
        config.device, config.data.root = device or config.device, root or config.data.root
        self.run, self.bench = run, set_up(config)
        state = self.bench.model.state_dict()
        self.tensors = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        self.space = ParamSpace({name: tensor.shape for name, tensor in self.tensors.items()})

    def theta(self, state: Mapping[str, Tensor]) -> Tensor:
        check_fits(self.space, state, f"{self.run.path}'s model")
        return self.space.flatten({name: state[name] for name in self.tensors}).to(self.bench.device)

    def direction(self, tau: TaskVector) -> Tensor:
        """Return τ as a direction [P], with zeros for tensors that it lacks, such as a frozen head."""
        check_fits(tau.space, self.tensors, f"{self.run.path}'s model")
        state, device = tau.state(), self.bench.device
        return self.space.flatten({n: state[n].to(device) if n in state else torch.zeros_like(t) for n, t in self.tensors.items()})

    def bank(self, split: Split, classes: Sequence[int] | None = None, others: bool = False) -> Samples:
        """Return a split's images, or those of some classes; with `others`, those of all other classes."""
        if classes is not None:
            selected = torch.isin(split.labels, torch.tensor(classes)) != others
            split = split.subset(selected.nonzero().squeeze(1))
        return self.bench.task.samples(split)

    def move_to(self, theta: Tensor) -> None:
        with torch.no_grad():
            for name, view in self.space.views(theta).items():
                self.tensors[name].copy_(view)

    def evaluate(self, theta: Tensor, bank: Samples) -> tuple[float, float]:
        """Return (mean cross-entropy, accuracy) at θ."""
        self.move_to(theta)
        return self.bench.evaluate(bank)

    def logits(self, theta: Tensor, bank: Samples) -> Tensor:
        """Return the logits [samples, classes] at θ in float32."""
        self.move_to(theta)
        return self.bench.outputs(self.bench.model, bank)


# --- vectors


def load_vector(source: Source) -> TaskVector:
    """Load the τ of a finished run, or a task vector from its file."""
    return load_run(source).task_vector() if Path(source).is_dir() else TaskVector.load(source)


def run_fisher(source: Source, device: str | None = None, root: str | None = None) -> dict[str, Tensor]:
    """Return a run's sensitivities at its final model on up to FISHER_SAMPLES of its training images."""
    if not Path(source).is_dir():
        raise UserError(f"merge: fisher needs run folders, because it scores each run on its own data; {source} is a file.")
    evaluator = PointEvaluator(load_run(source), device, root)
    evaluator.move_to(evaluator.theta(evaluator.run.state))
    train = evaluator.bench.train
    parameters = [name for name, _ in evaluator.bench.model.named_parameters()]
    scores = Scorer(evaluator.bench, train)(evenly(len(train), FISHER_SAMPLES), parameters)
    return {name: scores[name] if name in scores else torch.zeros_like(tensor) for name, tensor in evaluator.tensors.items()}


# --- along a line


def default_alphas(tau: Tensor, lowest: float = -1.0, least: float = 2.0) -> list[float]:
    """Return α from `lowest` to 1/density, at least `least` and at most LARGEST_ALPHA: a sparse τ [P] is short, so its best α is larger."""
    density = int(torch.count_nonzero(tau)) / len(tau)  # of the whole model, even if τ has only the tensors that changed
    highest = round(2 * min(LARGEST_ALPHA, max(least, 1 / max(density, 1e-9)))) / 2
    step = 0.25 if highest <= 3 else 0.5  # both include 0 and 1
    return [lowest + step * i for i in range(round((highest - lowest) / step) + 1)]


def sweep_run(run: Run, tau: TaskVector | Source | None = None, grid: Alphas | None = None, **where: str | None) -> dict[str, Any]:
    """Evaluate θ₀ + α·τ from a run's θ₀ along its own τ or another: validation chooses α; test at that α, 0 and 1. `where`: device, root."""
    if isinstance(tau, str | Path):
        tau = load_vector(tau)
    vector, notes = (run.task_vector(), []) if tau is None else (tau, same_validation(run, tau.origins))
    end = run.state if tau is None else tau.apply_to(run.start)  # its own final model to the bit, not rounded as θ₀ + τ
    evaluator = PointEvaluator(run, **where)
    values = default_alphas(evaluator.direction(vector)) if grid is None else alphas(grid)
    facts = {"run": str(run.path), "norm": vector.norm(), "density": vector.density, "notes": notes}
    return facts | evaluate_line(evaluator, evaluator.theta(run.start), evaluator.theta(end), values)


def interpolate_runs(run_a: Run, run_b: Run, grid: Alphas = "0:1:11", **where: str | None) -> dict[str, Any]:
    """Evaluate W_a + α(W_b − W_a) between two finished runs of the same data and model; α outside [0, 1] extrapolates."""
    check_same_task(run_a, run_b)
    evaluator, between = PointEvaluator(run_a, **where), TaskVector.between(run_a.state, run_b.state)
    facts = {"run_a": str(run_a.path), "run_b": str(run_b.path), "norm": between.norm(), "notes": same_validation(run_a, [run_b.origin])}
    return facts | evaluate_line(evaluator, evaluator.theta(run_a.state), evaluator.theta(run_b.state), alphas(grid))


def evaluate_line(evaluator: PointEvaluator, start: Tensor, end: Tensor, grid: Sequence[float]) -> dict[str, Any]:
    """Validate at every α on the line from start (0) to end (1); test at the best α and at both ends."""
    check_validation(evaluator)
    banks = {"val": evaluator.bench.val}

    def measure(alpha: float, split: str) -> dict[str, float]:
        loss, accuracy = evaluator.evaluate(interpolate(start, end, alpha), banks[split])
        return {f"{split}_accuracy": accuracy, f"{split}_loss": loss}

    points = {p.alpha: p for p in validated(lambda alpha: measure(alpha, "val"), grid)}
    chosen, banks["test"] = best(list(points.values())).alpha, evaluator.bank(evaluator.bench.dataset.test)

    def report(alpha: float) -> dict[str, float]:
        validation = points[alpha].metrics if alpha in points else measure(alpha, "val")
        return {"alpha": alpha, **validation, **measure(alpha, "test")}

    rows = [{"alpha": p.alpha, **p.metrics} for p in points.values()]
    reports = {alpha: report(alpha) for alpha in {chosen, 0.0, 1.0}}
    return {"points": rows, "chosen": reports[chosen], "start": reports[0.0], "end": reports[1.0]}


def validated(validate: Callable[[float], dict[str, float]], values: Sequence[float]) -> Iterator[SweepPoint]:
    """Yield the point of each α with its metrics on validation, and show the progress."""
    with progress_bar("validation", len(values)) as bar:
        for alpha in values:
            yield SweepPoint(alpha, validate(alpha))
            bar.advance()


def check_validation(evaluator: PointEvaluator) -> None:
    if not len(evaluator.bench.val):
        raise UserError(f"alphas: α is chosen on a validation set, but {evaluator.run.path} has data.val_fraction=0; use a run with > 0.")


def check_same_task(a: Run, b: Run) -> None:
    for section, name in (("data", "name"), ("model", "name"), ("model", "image_size")):
        ours, theirs = (getattr(getattr(run.config, section), name) for run in (a, b))
        if ours != theirs:
            raise UserError(f"{section}.{name} must be equal in both runs, got {ours!r} in {a.path} and {theirs!r} in {b.path}.")


def same_validation(run: Run, origins: Iterable[str]) -> list[str]:
    """Return a note for every other run that trained on images which this run validates on."""
    ours, notes = json.loads(run.origin), []
    for origin in sorted(origins):
        with suppress(ValueError, TypeError, KeyError):  # another program wrote it
            theirs = json.loads(origin)
            if theirs["data"] == ours["data"] and any(theirs[key] != ours[key] for key in ("seed", "val_fraction")):
                notes.append(f"{theirs['run']} has another seed or data.val_fraction: it trained on images that {run.path} validates on")
    return notes
