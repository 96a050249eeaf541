"""A run while it trains: resume, best model, patience, metrics, checkpoints, progress and summary, shared by both training loops.

A checkpoint is the session's own counters and the `state_dict` of everything that a loop hands to `restore`. What is restored is exactly
what was saved, so on a CPU a run that is killed at any moment ends with the same bits.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from fedlens.config import Config
from fedlens.errors import UserError, first_line
from fedlens.lens.mask import Mask
from fedlens.runs.folder import RunFolder
from fedlens.runs.progress import Bar, progress_bar
from fedlens.runs.store import Checkpoint, read_mask
from fedlens.runs.trackers import Trackers

log = logging.getLogger("fedlens")
Summary = dict[str, Any]


class Stateful(Protocol):
    """Anything with state that a checkpoint must carry: tensors and JSON values by name."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Session:
    """One run in one process, around a training loop.

    `folder` is None on all but the first of several processes, which hold the same state: `broadcast` gives every process the first one's
    value. `unit` is what metrics are recorded per: a round or an epoch.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder | None,
        trackers: Trackers,
        *,
        unit: str,
        broadcast: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self.config, self.folder, self.trackers, self.unit, self.broadcast = config, folder, trackers, unit, broadcast
        fed, per_round = config.federated, unit == "round"
        self.units = fed.rounds if per_round else config.train.epochs  # of the whole run
        self.test_every = fed.test_every if per_round else config.train.test_every  # units between points of the test curves; 0: none
        self.target = fed.target_accuracy if per_round else None
        self.started = self.last_save = self.round_started = time.monotonic()
        self.saved: Checkpoint | None = broadcast(folder.latest_checkpoint() if folder else None)
        self.fresh = self.saved is None  # the run starts now; False: it resumes
        self.last_step = self.step = self.saved.step if self.saved else 0  # the step that has been reached, and the first of this process
        self.seconds_before, self.stale = 0.0, 0  # `stale`: evaluations since the best
        self.best_score: float | None = None
        self.best_step: int | None = None
        self.start_facts: dict[str, Any] = {}  # what the summary reports about head, mask and θ₀'s scores
        if self.saved:
            with self._fitting(self.step):
                own = self.saved.state["session"]
                self.seconds_before, self.stale = float(own["seconds"]), int(own["stale"])
                self.best_score, self.best_step = own["best_score"], own["best_step"]
                self.start_facts = {"ridge": own["facts"]["ridge"], "mask": own["facts"]["mask"], **own["facts"]}
        self._parts: dict[str, Stateful] = {}
        self._stack = ExitStack()
        self._bar: Bar | None = None

    def close(self) -> None:
        """Remove the progress bar."""
        self._stack.close()

    # --- start and resume ----------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds of training, those before an interruption included."""
        return self.seconds_before + time.monotonic() - self.started

    def secret(self) -> int:
        """Return the key that only this run folder holds, on every process."""
        key: int = self.broadcast(self.folder.secret() if self.folder else None)
        return key

    def start(self, model: nn.Module, fit: Callable[[], tuple[Mask | None, dict[str, Any]]]) -> Mask | None:
        """Fit head and mask before the first step, or read them from the run folder; return the mask (None: dense).

        `fit` also returns what the summary reports about both.
        """
        mask: Mask | None
        if self.fresh:
            mask, self.start_facts = fit()
            if self.folder:
                self.folder.keep_start(model.state_dict(), mask)
            return mask
        mask = self.broadcast(read_mask(self.folder.path, sparse=bool(self.start_facts["mask"])) if self.folder else None)
        return mask

    def restore(self, **parts: Stateful) -> None:
        """Load the last checkpoint into these parts; from now on, checkpoints consist of their states."""
        self._parts = parts
        record = self.saved.state.get("metrics") if self.saved else None
        if self.saved is not None:
            self._load(self.saved, parts)
            log.info("resuming at %s %d", "round" if self.unit == "round" else "step", self.step)
            self.saved = None  # its tensors have been copied
        if self.folder:
            self.folder.rewind_metrics(-1 if self.fresh else self.step, record)

    def begin(self, measure: Callable[[bool], dict[str, Any]], *, alone: bool = False) -> None:
        """Score θ₀ if curves start there or if it can be the final model. `measure`: called with True for test scores too.

        `alone`: no step follows, so θ₀ is the final model.
        """
        selectable = alone or self.config.train.select == "best_or_start"
        if not self.fresh or not (selectable or self.test_every):
            return
        scores = measure(self.tests_after(0))
        self.start_facts["start"] = {name: value for name, value in scores.items() if name.startswith("val_")}
        if selectable:
            self.judge(0, scores.get("val_accuracy"), last=alone)
        if self.test_every:
            self._write({"step": 0, self.unit: 0, **scores, "seconds": self.seconds})
        if selectable:
            self.checkpoint(0, scores.get("val_accuracy"))

    def tests_after(self, unit: int) -> bool:
        """Return True if the test curves have a point after this round or epoch."""
        return bool(self.test_every and self.config.train.test) and (unit % self.test_every == 0 or unit == self.units)

    def _load(self, checkpoint: Checkpoint, parts: Mapping[str, Stateful]) -> None:
        with self._fitting(checkpoint.step):
            for name, part in parts.items():
                prefix = f"{name}."
                tensors = {key.removeprefix(prefix): tensor for key, tensor in checkpoint.tensors.items() if key.startswith(prefix)}
                part.load_state_dict({**checkpoint.state.get(name, {}), **tensors})

    @contextmanager
    def _fitting(self, step: int) -> Iterator[None]:
        """Report in one line a checkpoint of another model, or one whose state.json was edited."""
        try:
            yield
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            problem = f"no {error}" if isinstance(error, KeyError) else first_line(error).removesuffix(":")
            where = f"{self.folder.path}: " if self.folder else ""
            raise UserError(f"run.dir: {where}the checkpoint of step {step} does not fit the run's config.yaml ({problem}).") from None

    # --- while it runs -------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps or rounds that are left, until patience runs out or the target accuracy is reached."""
        self.last_save, show = time.monotonic(), self.config.run.progress and self.folder is not None
        self._bar = self._stack.enter_context(progress_bar(self.config.experiment, total, self.step, show))
        for step in range(self.step, total):
            if self._enough():
                break
            self.round_started = time.monotonic()
            yield step
            self.last_step = step + 1
            self._bar.advance()
        self.close()

    def _enough(self) -> bool:
        """Depends only on state in the checkpoint, so that a resumed run stops at the same step."""
        patience = self.config.train.patience
        out_of_patience = patience is not None and self.stale >= patience
        return out_of_patience or (self.target is not None and self.best_score is not None and self.best_score >= self.target)

    def record(self, step: int, line: dict[str, Any], *, evaluated: bool = False, last: bool = False) -> None:
        """Write a line of metrics; after an evaluation, compare with the best and write a checkpoint."""
        score: float | None = line.get("val_accuracy")
        if evaluated:
            self.judge(step, score, last)
        line = {"step": step, **line, "seconds": self.seconds}
        if self.unit == "round":
            line["round_seconds"] = time.monotonic() - self.round_started
        self._write(line)
        if not evaluated:
            self.checkpoint_if_due(step)
            return
        self.checkpoint(step, score)
        shown = "" if score is None else f", validation accuracy {100 * score:.2f} %"
        if self.folder:
            log.info("%s %d/%d: loss %.4f%s", self.unit, line[self.unit], self.units, line.get("train_loss", float("nan")), shown)
        if self._bar:
            self._bar.advance(0, shown.removeprefix(", "))

    def _write(self, line: dict[str, Any]) -> None:
        if self.folder:
            self.folder.append_metrics(line)
            self.trackers.log(line)

    def judge(self, step: int, score: float | None, last: bool) -> None:
        """Compare a validation score with the best. Of equal scores the earlier is the best; without validation the last model is."""
        if score is None:
            self.best_step = step if last else None
        elif self.best_score is None or score > self.best_score:
            self.best_score, self.best_step, self.stale = score, step, 0
        else:
            self.stale += 1

    def checkpoint_if_due(self, step: int) -> None:
        """Write a checkpoint if run.checkpoint_minutes have passed since the last one."""
        if time.monotonic() - self.last_save >= 60 * self.config.run.checkpoint_minutes:
            self.checkpoint(step)

    def checkpoint(self, step: int, score: float | None = None) -> None:
        """Write the state of all parts. `score`: of the model just evaluated, by which the best checkpoints are kept."""
        self.last_save = time.monotonic()
        if self.folder is None:
            return
        tensors: dict[str, Tensor] = {}
        state: dict[str, Any] = {} if score is None else {"score": score}
        for name, part in self._parts.items():
            saved = part.state_dict()
            tensors |= {f"{name}.{key}": value for key, value in saved.items() if isinstance(value, Tensor)}
            state[name] = {key: value for key, value in saved.items() if not isinstance(value, Tensor)}
        own = {"seconds": self.seconds, "stale": self.stale, "best_score": self.best_score, "best_step": self.best_step}
        state["session"] = own | {"facts": self.start_facts}
        # With checkpoint_minutes=0, write before the next model is sent: a repeated round could receive different updates.
        wait = self.unit == "round" and self.config.run.checkpoint_minutes == 0
        self.folder.save_checkpoint(step, tensors, state, wait=wait)

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(
        self,
        model: nn.Module,
        test: Callable[[], Mapping[str, Any]],
        summary: Summary,
        *chosen: str,
        write: Callable[[RunFolder], None] = lambda folder: None,
    ) -> Summary | None:
        """Evaluate the model that validation chose on the test set, once; write model and summary.

        `chosen`: the parts whose state goes back to the best checkpoint. `write`: further files, before the summary makes the run finished.
        """
        if self.folder is None:
            return None
        best = self.folder.read_checkpoint(self.best_step) if self.best_step is not None else None
        if best is None:
            fix = f"fedlens resume {self.folder.path} repeats training from the last intact one"
            raise UserError(f"run.dir: the best checkpoint ({self.best_step}) is damaged. {fix}.")
        self._load(best, {name: self._parts[name] for name in chosen})
        tested = test()
        write(self.folder)
        summary = {**tested, "val_accuracy": self.best_score, "seconds": self.seconds, **summary, **self.start_facts}
        self.folder.finish(summary, model.state_dict())
        self.trackers.finish(summary)
        best_unit = f"best {self.unit} {summary.get(f'best_{self.unit}')}"
        log.info("%s (%s, %.0f s)%s", describe_test(tested), best_unit, summary["seconds"], describe_loss(summary))
        return summary


def start_accuracy(summary: Mapping[str, Any]) -> float | None:
    """Return the validation accuracy of θ₀: measured before the first step, or when the head was fitted."""
    facts = [summary.get(name) or {} for name in ("start", "ridge")]
    return next((float(each["val_accuracy"]) for each in facts if each.get("val_accuracy") is not None), None)


def describe_loss(summary: Mapping[str, Any]) -> str:
    """Return a remark on a run whose final model is worse on validation than the one that it started from."""
    before, after = start_accuracy(summary), summary["val_accuracy"]
    if before is None or after is None or after >= before:
        return ""
    return f"; on validation {100 * (before - after):.2f} points below its start, {100 * before:.2f} %"


def describe_test(tested: Mapping[str, Any]) -> str:
    """Return the result on the test set in words."""
    accuracy = tested["test_accuracy"]
    return "not evaluated on the test set" if accuracy is None else f"test accuracy {100 * accuracy:.2f} %"
