"""Centralised fine-tuning: plain SGD over all data, the dense reference that federated runs are compared with.

The batches of epoch e and their augmentation are functions of (seed, e) alone, so a run that resumes at step s gets the same batches: resuming
is exact by construction. The test set is read once, at the end, with the model that validation chose.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedlens.engine.cohort import compiled_forward
from fedlens.engine.sampling import batch_indices, dropout_mask
from fedlens.errors import UserError
from fedlens.optim.schedules import learning_rate
from fedlens.optim.sgd import clip_gradients, make_optimizer
from fedlens.runs.session import Session, Summary
from fedlens.seeding import torch_rng
from fedlens.tasks import select
from fedlens.training.bench import Bench
from fedlens.training.head_and_mask import fit_head_and_mask, masked_space

log = logging.getLogger("fedlens")
FINITE_CHECK = 50  # steps between looks at the loss: each look waits for the device


def train(bench: Bench, session: Session) -> Summary | None:
    """Train the model over the steps that are left; return the summary."""
    cfg, model = bench.config, bench.model
    steps_per_epoch = bench.steps_per_epoch
    total = cfg.train.epochs * steps_per_epoch

    # Before step 0: the head in closed form, then the mask. A resumed run reads both from its folder.
    mask = session.start(model, lambda: fit_head_and_mask(bench))
    space = masked_space(bench, mask)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    training = Training(bench, make_optimizer(trained, cfg.optim, mask))  # model, momentum, loss scaler, running loss
    session.restore(training=training)
    session.begin(lambda test: evaluate(bench, 0, test=test), alone=total == 0)  # θ₀, epoch 0 of every curve

    for step in session.steps(total):
        epoch, within = divmod(step, steps_per_epoch)
        lr = learning_rate(cfg.optim, step / total, 1 / total)
        training.step(epoch, within, lr)
        if within + 1 < steps_per_epoch:
            session.checkpoint_if_due(step + 1)
            continue

        # The end of an epoch: validate, record, checkpoint.
        line: dict[str, Any] = {"epoch": epoch + 1, "lr": lr, "train_loss": float(training.loss_sum) / steps_per_epoch}
        training.check_finite()
        line |= evaluate(bench, step + 1, test=session.tests_after(epoch + 1))
        training.loss_sum.zero_()  # before the checkpoint: the next epoch starts from zero
        session.record(step + 1, line, evaluated=True, last=step + 1 == total)

    # The model that validation chose meets the test set, once.
    assert session.best_step is not None
    facts = {
        "epochs": session.last_step // steps_per_epoch,
        "best_epoch": session.best_step // steps_per_epoch,
        "steps": session.last_step,
        "images_per_second": session.last_step * cfg.optim.batch_size / session.seconds,
    }
    return session.finish(model, bench.test, facts | bench.description(space), "training")


def evaluate(bench: Bench, step: int, *, test: bool) -> dict[str, Any]:
    """Return loss and metrics of the model after a step, on validation and, if wanted, on test."""
    scores = bench.scores(val=True, test=test)
    if not math.isfinite(scores.get("val_loss", 0.0)):  # weights may be finite and useless
        raise not_finite(step)
    return scores


@dataclass
class Training:
    """One model under SGD: a step at a time, and the state that a checkpoint must carry."""

    bench: Bench
    optimizer: torch.optim.Optimizer
    loss_sum: Tensor = field(init=False)  # of the epoch so far

    def __post_init__(self) -> None:
        cfg = self.bench.config
        self.model, self.scaler = self.bench.model, self.bench.precision.scaler()
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.bench.device)
        self.forward: Callable[..., Tensor] = compiled_forward(self.model) if cfg.train.compile else self.model
        self.chunk = min(cfg.train.chunk or cfg.optim.batch_size, cfg.optim.batch_size)
        self.at = 0  # steps taken
        self._epoch = -1  # whose batches are drawn

    def step(self, epoch: int, within: int, lr: float) -> None:
        """Take one step of SGD on batch `within` of the epoch. If the device's memory runs out, halve the part that is computed at once."""
        cfg = self.bench.config
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        inputs, labels = self._batch(epoch, within)
        keep = None
        if cfg.model.dropout:
            shape = (len(labels), int(self.model.head.in_features))  # type: ignore[union-attr, arg-type]
            keep = dropout_mask(shape, cfg.model.dropout, torch_rng(cfg.seed, "dropout", epoch, 0, within)).to(labels.device)
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            try:
                loss = self._backward(inputs, labels, keep)
                break
            except torch.OutOfMemoryError:
                if self.chunk == 1:
                    raise
                log.warning("out of memory with %d samples at once, continuing with %d", self.chunk, (self.chunk + 1) // 2)
                self.chunk = (self.chunk + 1) // 2
                torch.cuda.empty_cache()
        if cfg.optim.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_gradients(self.optimizer, cfg.optim.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.loss_sum += loss
        self.at = epoch * self.bench.steps_per_epoch + within + 1
        if self.at % FINITE_CHECK == 0 and not bool(torch.isfinite(self.loss_sum)):
            raise not_finite(self.at)

    def _batch(self, epoch: int, within: int) -> tuple[Tensor, Tensor]:
        bench, size = self.bench, self.bench.config.optim.batch_size
        if epoch != self._epoch:
            seed = bench.config.seed
            self._order = batch_indices(len(bench.train), bench.steps_per_epoch, size, torch_rng(seed, "batches", epoch, 0))
            self._draws = bench.task.draw(tuple(self._order.shape), torch_rng(seed, "augment", epoch, 0))
            self._epoch = epoch
        return bench.task.batch(bench.train, self._order[within], select(self._draws, within))

    def _backward(self, inputs: Tensor, labels: Tensor, keep: Tensor | None) -> Tensor:
        """Add the gradient of the batch's mean loss, `chunk` samples at a time; return the loss."""
        bench, total = self.bench, torch.zeros((), device=self.bench.device)
        for at in range(0, len(labels), self.chunk):
            part = slice(at, at + self.chunk)
            with bench.precision.autocast():
                logits = self.forward(inputs[part], keep=None if keep is None else keep[part])
                loss = bench.task.loss(logits, labels[part], bench.config.train.label_smoothing)
            loss = loss * (len(labels[part]) / len(labels))
            torch.autograd.backward(self.scaler.scale(loss))
            total += loss.detach()
        return total

    def check_finite(self) -> None:
        """Raise if a loss or a weight is not finite."""
        if not all(bool(torch.isfinite(each).all()) for each in (self.loss_sum, *self.model.parameters())):
            raise not_finite(self.at)

    def state_dict(self) -> dict[str, Any]:
        """The model, momentum by parameter name, the loss scaler, and the running loss. A state that is not finite is never saved."""
        self.check_finite()
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, param in self.model.named_parameters():
            buffer = self.optimizer.state.get(param, {}).get("momentum_buffer")
            if buffer is not None:
                tensors[f"momentum.{name}"] = buffer
        return {**tensors, "loss_sum": float(self.loss_sum), "scaler": self.scaler.state_dict(), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.model.load_state_dict({n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")})
        for name, param in self.model.named_parameters():
            if (buffer := state.get(f"momentum.{name}")) is not None:
                self.optimizer.state[param]["momentum_buffer"] = buffer.to(param.device)
        self.scaler.load_state_dict(state["scaler"])
        self.loss_sum.fill_(state["loss_sum"])
        self.at = int(state.get("at", 0))


def not_finite(step: int) -> UserError:
    """Return the error of a training that diverged."""
    return UserError(f"Training is not finite at step {step}; try a lower optim.lr or optim.clip_norm=1. No such state was saved.")
