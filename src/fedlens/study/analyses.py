"""Measurements of a study on its finished runs, once each. They stay beside the runs, and a report needs only their numbers.

    analyses:
      - {kind: sweep, of: Nc=1}                                θ₀ + α·τ: α chosen on validation (arith.py)
      - {kind: interpolate, of: [centralised, IID]}            the line between two models
      - {kind: interference, of: [half A, half B]}             cosine, sign conflict, linearity, the map ξ(α₁, α₂)
      - {kind: interference, of: Nc=1, clients: [0, 1]}        the same for two clients of a run with federated.client_vectors
      - {kind: masks, of: [central, federated]}                overlap of two masks, compared with that of two random ones
      - {kind: masks, of: central}                             overlap between each seed and the next (needs two seeds): variation by chance
      - {kind: forget, of: Nc=1, clients: [0, 1, 2]}           subtract the contribution of each of these clients
      - {kind: forget, of: [Nc=1, without 5], clients: [5]}    compared with the run that was trained without that client

`of`: labels of cells; `seeds: N`: use the first N seeds (default 1). Other keys are options of the kind.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from fedlens.engine.sampling import survives, training_cohort
from fedlens.errors import UserError, bad_value, unknown
from fedlens.lens.editing import alphas
from fedlens.study.arith import interpolate_runs, sweep_run
from fedlens.study.forget import forget_client
from fedlens.study.interference import interference_of_clients, interference_of_runs, mask_overlap
from fedlens.study.plan import AnalysisSpec, Plan, PlannedRun
from fedlens.study.yaml_files import REQUIRED, TEXT, Field, is_number, list_of, read_fields, whole
from fedlens.training.run import Run


def _interference(runs: Sequence[Run], clients: Sequence[int] | None = None, **options: Any) -> dict[str, Any]:
    return interference_of_runs(runs, **options) if clients is None else interference_of_clients(runs[0], clients, **options)


def _forget(runs: Sequence[Run], clients: Sequence[int], **options: Any) -> dict[str, Any]:
    return {"clients": [forget_client(runs[0], client, without=runs[1:], **options) for client in clients]}


def _is_grid(value: Any, least: float = -inf) -> bool:
    try:
        return min(alphas(value)) >= least
    except (UserError, TypeError):
        return False


@dataclass(frozen=True)
class Kind:
    """A kind of analysis."""

    measure: Callable[..., dict[str, Any]]
    options: Mapping[str, Field]
    cells: tuple[int, int]  # the fewest and the most cells
    title: str


GRID = {"grid": Field(None, "start:stop:count, or a list of numbers", _is_grid)}
CLIENTS = Field(None, "a list of clients", list_of(int, fewest=1))
INTERFERENCE = {**GRID, "samples": whole(1), "clients": CLIENTS}
FORGET = {
    "clients": replace(CLIENTS, default=REQUIRED),
    "keep": Field(None, "in [0, 1]", lambda value: is_number(value) and 0 <= value <= 1),
    "grid": Field(None, "numbers >= 0, because forgetting subtracts", lambda value: _is_grid(value, 0)),
}
KINDS = {
    "sweep": Kind(lambda runs, **options: sweep_run(runs[0], **options), GRID, (1, 1), "α sweep of {}"),
    "interpolate": Kind(lambda runs, **options: interpolate_runs(*runs, **options), GRID, (2, 2), "From {} to {}"),
    "interference": Kind(_interference, INTERFERENCE, (2, 8), "Interference of {}"),
    "masks": Kind(lambda runs, **_: mask_overlap(*runs), {}, (1, 2), "Overlap of the masks of {}"),
    "forget": Kind(_forget, FORGET, (1, 9), "Forgetting clients of {}"),
}
COMMON = {"kind": TEXT, "of": Field(), "seeds": whole(1, 1)}  # options of every kind


@dataclass(frozen=True)
class PlannedAnalysis:
    """One analysis of one seed."""

    kind: str
    labels: tuple[str, ...]
    seed: int
    runs: tuple[PlannedRun, ...]
    options: Mapping[str, Any]

    @property
    def title(self) -> str:
        title, others = KINDS[self.kind].title.format(*self.labels), self.labels[1:]
        if self.kind == "masks" and not others:
            return f"{title}, between seeds"
        return title + (f" and {', '.join(others)}" if others and self.kind in ("interference", "masks") else "")

    @property
    def file(self) -> str:
        """The file's name, with a hash of the kind, the runs' configurations and the options."""
        key = json.dumps([self.kind, [run.name for run in self.runs], self.options], sort_keys=True)
        return f"analyses/{self.kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"

    def measure(self, folder: Path) -> dict[str, Any]:
        """Measure on the runs in `folder`. The result names runs without the folder, so that the study may move."""
        device, root = self.runs[0].config.device, self.runs[0].config.data.root
        runs = [Run(folder / planned.name) for planned in self.runs]
        result = KINDS[self.kind].measure(runs, **self.options, device=None if device == "auto" else device, root=root)
        plain: dict[str, Any] = json.loads(json.dumps(result).replace(json.dumps(f"{folder}/")[1:-1], ""))
        return plain


def planned_analyses(plan: Plan) -> list[PlannedAnalysis]:
    """Return every analysis of the plan, checked before any run starts."""
    return [analysis for spec in plan.analyses for analysis in _of_spec(plan, spec)]


def _of_spec(plan: Plan, spec: AnalysisSpec) -> list[PlannedAnalysis]:
    kind = str(spec.options.get("kind"))
    if kind not in KINDS:
        raise unknown("analyses: kind", kind, KINDS)
    fields = read_fields(spec.options, {**COMMON, **KINDS[kind].options}, f"analyses: {kind}")
    options = {key: value for key, value in spec.options.items() if key not in COMMON}
    labels = tuple(map(str, fields["of"] if isinstance(fields["of"], list) else [fields["of"]]))
    fewest, most = KINDS[kind].cells if fields.get("clients") is None or kind == "forget" else (1, 1)
    if not fewest <= len(labels) <= most:
        expected = f"{fewest} cell{'s' if fewest > 1 else ''}" if fewest == most else f"{fewest} to {most} cells"
        raise bad_value(f"analyses: {kind} of", ", ".join(labels), expected)
    cells = [_runs_of_cell(plan, label, spec.tables) for label in labels]
    seeds = [seed for seed in cells[0] if all(seed in cell for cell in cells)]
    untested = [label for label, cell in zip(labels, cells, strict=True) if not all(p.config.train.test for p in cell.values())]
    if untested and kind != "masks":
        raise UserError(f"analyses: {kind} reads the test set, which train.test=false of {untested[0]} forbids; leave it out.")
    if kind == "masks" and len(cells) == 1:
        pairs = zip(seeds, [*seeds[1:], *seeds[:1]], strict=True)  # each seed and the next
        first = list(pairs)[: min(fields["seeds"], len(seeds) if len(seeds) > 2 else len(seeds) - 1)]
        return [PlannedAnalysis(kind, labels, a, (cells[0][a], cells[0][b]), options) for a, b in first]
    seeds = seeds[: fields["seeds"]]
    for seed in seeds if fields.get("clients") else ():
        _check_participation(f"analyses: {kind} of {labels[0]}", cells[0][seed], fields["clients"])
    return [PlannedAnalysis(kind, labels, seed, tuple(cell[seed] for cell in cells), options) for seed in seeds]


def _check_participation(where: str, planned: PlannedRun, clients: Sequence[int]) -> None:
    """Raise for a client without updates in any round. Rounds after the best one are not known here, so the analysis itself may still raise."""
    fed = planned.config.federated
    if not fed.client_vectors:
        raise UserError(f"{where} needs the contribution of each client: set federated.client_vectors=true.")
    drawn = {c for r in range(fed.rounds) for c in training_cohort(planned.config, r) if survives(planned.seed, r, c, fed.dropout_rate)}
    if absent := [client for client in clients if client not in drawn]:
        names = ", ".join(map(str, sorted(drawn)[:20])) + (", …" if len(drawn) > 20 else "")
        raise UserError(f"{where}: client {absent[0]} takes part in no round of seed {planned.seed}; choose from {names}.")


def _runs_of_cell(plan: Plan, label: str, tables: Collection[str]) -> dict[int, PlannedRun]:
    """Return seed -> run of the first cell in these tables with this label or case."""
    runs = [planned for planned in plan.runs if planned.cell.table in tables]
    for name in ("label", "case"):
        cell = next((p.cell for p in runs if getattr(p.cell, name) == label), None)
        if cell is not None:
            return {p.seed: p for p in runs if p.cell == cell}
    raise unknown("analyses: of", label, list(dict.fromkeys(p.cell.label for p in runs)))
