"""Centralised fine-tuning: one loop, top to bottom. It is the dense reference that federated runs are compared with.

The batches of epoch e and their augmentation are functions of (seed, e) alone, so a run that goes on from step s sees what it
would have seen: resuming is exact by construction. The test set is read once, at the end, with the model that validation chose.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.config import Config
from fedlens.engine.cohort import compiled_forward
from fedlens.engine.sampling import batch_indices
from fedlens.errors import UserError
from fedlens.lens.mask_rules import Mask
from fedlens.optim.sparse_sgdm import SparseSGDM
from fedlens.runs.progress import progress_bar
from fedlens.runs.store import MASK_FILE, RunFolder, fitting
from fedlens.runs.trackers import Trackers
from fedlens.seeding import torch_rng
from fedlens.tasks.image import Draws, ImageBank
from fedlens.training.bench import Bench, learning_rate, said
from fedlens.training.head_and_mask import make_mask, masked_space

log = logging.getLogger("fedlens")
FINITE_CHECK = 50  # steps between looks at the loss: each look waits for the device


def train(bench: Bench, run: RunFolder, trackers: Trackers) -> dict[str, Any]:
    cfg, model, device = bench.config, bench.model, bench.device
    started = time.monotonic()
    steps_per_epoch = -(-len(bench.train) // cfg.optim.batch_size)
    total = cfg.train.epochs * steps_per_epoch
    scaler = bench.precision.scaler()
    forward = compiled_forward(model) if cfg.train.compile else model

    # --- where we are: at the start, or where the last sound checkpoint was written
    step, seconds, loss_sum = 0, 0.0, torch.zeros((), dtype=torch.float64, device=device)
    best: dict[str, Any] = {"score": None, "step": None}
    stale, ridge, mask, facts = 0, None, None, None  # evaluations since the best; what chose the head, and the mask
    saved = run.latest_checkpoint()
    if saved is None:
        if cfg.head == "ridge":  # step 0
            choice = bench.fit_ridge_head()
            ridge = {"lambda": choice.lam, "temperature": choice.temperature, "val_accuracy": choice.val_accuracy}
        if cfg.mask.strategy:  # step 1
            mask, facts = make_mask(bench)
        run.keep_start(model.state_dict(), mask)
    elif saved.state.get("mask"):
        mask = Mask.load(run.path / MASK_FILE)
    space = masked_space(bench, mask)
    optimizer = make_optimizer(model, cfg, mask)
    if saved is not None:
        with fitting(run, saved.step):
            load_state(model, optimizer, saved.tensors)
            scaler.load_state_dict(saved.state["scaler"])
            step, seconds, stale, ridge, facts = saved.step, *(saved.state[key] for key in ("seconds", "stale", "ridge", "mask"))
            best = {"score": saved.state["best_score"], "step": saved.state["best_step"]}
            loss_sum.fill_(saved.state["loss_sum"])
        log.info("resuming at step %d of %d", step, total)
    run.rewind_metrics(step)

    def save(score: float | None = None) -> None:
        check_finite(model, loss_sum, step)
        state = {
            "seconds": seconds + time.monotonic() - started,
            "loss_sum": float(loss_sum),
            "stale": stale,
            "ridge": ridge,
            "mask": facts,
            "best_score": best["score"],
            "best_step": best["step"],
            "scaler": scaler.state_dict(),
        }
        run.save_checkpoint(step, state_tensors(model, optimizer), state | ({} if score is None else {"score": score}))

    if total == 0 and best["step"] is None:  # the head alone
        best = {"score": bench.evaluate(bench.val)[1] if len(bench.val) else None, "step": 0}
        save(best["score"])
    last_save, order, draws = time.monotonic(), None, None
    chunk = min(cfg.train.chunk or cfg.optim.batch_size, cfg.optim.batch_size)
    with progress_bar(cfg.experiment, total, step, cfg.run.progress) as bar:
        while step < total and not _patience_over(stale, cfg.train.patience):
            epoch, within = divmod(step, steps_per_epoch)
            if order is None or draws is None or within == 0:
                order = batch_indices(len(bench.train), steps_per_epoch, cfg.optim.batch_size, torch_rng(cfg.seed, "batches", epoch, 0))
                draws = bench.augment.draw(tuple(order.shape), torch_rng(cfg.seed, "augment", epoch, 0))
            rate = learning_rate(cfg.optim, step / total, 1 / total)
            for group in optimizer.param_groups:
                group["lr"] = rate

            # --- one step of SGD; should the device's memory run out, its gradient is taken in halves of what was tried
            model.train()
            images, labels = training_batch(bench, bench.train, order[within], draws[within])
            keep = dropout_mask(bench, len(labels), epoch, 0, within)
            optimizer.zero_grad(set_to_none=True)
            try:
                loss = backward(bench, forward, scaler, images, labels, keep, chunk)
            except torch.OutOfMemoryError:
                if chunk == 1:
                    raise
                log.warning("out of memory with %d images at once, going on with %d", chunk, (chunk + 1) // 2)
                chunk = (chunk + 1) // 2
                torch.cuda.empty_cache()
                continue
            if cfg.optim.clip_norm is not None:
                scaler.unscale_(optimizer)
                clip_gradients(model, optimizer, cfg.optim.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            loss_sum += loss
            step += 1
            bar.advance()

            if step % FINITE_CHECK == 0 and not bool(torch.isfinite(loss_sum)):
                raise _not_finite(step)
            if step % steps_per_epoch:
                if time.monotonic() - last_save >= 60 * cfg.run.checkpoint_minutes:
                    save()
                    last_save = time.monotonic()
                continue

            # --- the end of an epoch: evaluate on validation, log, checkpoint
            line = {"step": step, "epoch": epoch + 1, "lr": rate, "train_loss": float(loss_sum) / steps_per_epoch}
            check_finite(model, loss_sum, step)
            score = None
            if len(bench.val):
                line["val_loss"], line["val_accuracy"] = bench.evaluate(bench.val)
                if not math.isfinite(line["val_loss"]):  # weights may be finite and of no use
                    raise _not_finite(step)
                score = line["val_accuracy"]
                if best["score"] is None or score > best["score"]:
                    best, stale = {"score": score, "step": step}, 0
                else:
                    stale += 1
            elif step == total:  # without validation the last is best
                best = {"score": None, "step": step}
            line["seconds"] = seconds + time.monotonic() - started
            loss_sum.zero_()
            run.append_metrics(line)
            trackers.log(line)
            save(score)
            last_save = time.monotonic()
            shown = f"loss {line['train_loss']:.4f}" + ("" if score is None else f", validation accuracy {100 * score:.2f} %")
            log.info("epoch %d/%d: %s", epoch + 1, cfg.train.epochs, shown)
            bar.advance(0, shown)

    # --- the model that validation chose meets the test set, once
    chosen = run.read_checkpoint(best["step"])
    if chosen is None:
        raise UserError(f"run.dir: the best checkpoint (step {best['step']}) is damaged; fedlens resume {run.path} makes it again")
    load_state(model, optimizer, chosen.tensors)
    tested = bench.test()
    elapsed = seconds + time.monotonic() - started
    summary = {
        **tested,
        "val_accuracy": best["score"],
        "seconds": elapsed,
        "epochs": step // steps_per_epoch,
        "best_epoch": best["step"] // steps_per_epoch,
        "steps": step,
        "images_per_second": step * cfg.optim.batch_size / elapsed,
        **bench.description(space),
        "ridge": ridge,
        "mask": facts,
    }
    run.finish(summary, model.state_dict())
    trackers.finish(summary)
    log.info("%s (best epoch %d, %.0f s)", said(tested), summary["best_epoch"], elapsed)
    return summary


def backward(
    bench: Bench,
    forward: Callable[..., Tensor],
    scaler: torch.amp.GradScaler,
    images: Tensor,
    labels: Tensor,
    keep: Tensor | None,
    chunk: int,
) -> Tensor:
    """Adds the gradient of a batch's mean loss, `chunk` images at a time, each part by its share of the batch; returns the loss."""
    total = torch.zeros((), device=bench.device)
    for at in range(0, len(labels), chunk):
        part = slice(at, at + chunk)
        with bench.precision.autocast():
            logits = forward(images[part], keep=None if keep is None else keep[part])
            loss = F.cross_entropy(logits.float(), labels[part], label_smoothing=bench.config.train.label_smoothing)
        loss = loss * (len(labels[part]) / len(labels))
        torch.autograd.backward(scaler.scale(loss))
        total += loss.detach()
    return total


def make_optimizer(model: nn.Module, cfg: Config, mask: Mask | None) -> torch.optim.Optimizer:
    """SGD with momentum over what trains; under a mask SparseSGDM, which leaves the rest bit for bit."""
    o = cfg.optim
    options: dict[str, Any] = {
        "lr": o.lr,
        "momentum": o.momentum,
        "dampening": o.dampening,
        "nesterov": o.nesterov,
        "weight_decay": o.weight_decay,
    }
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if mask is not None:
        return SparseSGDM(trained, **options, masks=mask)
    return torch.optim.SGD([param for _, param in trained], **options)


def clip_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, norm: float) -> None:
    """To this norm over the coordinates that may move."""
    if isinstance(optimizer, SparseSGDM):
        optimizer.clip_grad_norm_(norm)
    else:
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], norm)


def training_batch(bench: Bench, bank: ImageBank, index: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    images, labels = bank.batch(index)
    return bench.pipeline(images, draws.to(bench.device)), labels


def dropout_mask(bench: Bench, batch: int, *ids: int) -> Tensor | None:
    """Dropout before the head, keyed like all randomness: [batch, dim], divided by the keep rate."""
    rate = bench.config.model.dropout
    if rate == 0:
        return None
    dim = bench.model.head.in_features  # type: ignore[union-attr]
    kept = torch.rand(batch, int(dim), generator=torch_rng(bench.config.seed, "dropout", *ids)) >= rate  # type: ignore[arg-type]
    return (kept.float() / (1 - rate)).to(bench.device)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The model under `model.`, momentum under `momentum.`, by parameter name."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        buffer = optimizer.state.get(param, {}).get("momentum_buffer")
        if buffer is not None:
            tensors[f"momentum.{name}"] = buffer
    return tensors


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    for name, param in model.named_parameters():
        if (buffer := tensors.get(f"momentum.{name}")) is not None:
            optimizer.state[param]["momentum_buffer"] = buffer.to(param.device)


def _patience_over(stale: int, patience: int | None) -> bool:
    return patience is not None and stale >= patience


def check_finite(model: nn.Module, loss: Tensor, step: int) -> None:
    """Neither the losses so far nor what the last step made of the weights is nan or infinite."""
    if not all(bool(torch.isfinite(each).all()) for each in (loss, *model.parameters())):
        raise _not_finite(step)


def _not_finite(step: int) -> UserError:
    return UserError(f"training is not finite at step {step}; a lower optim.lr or optim.clip_norm=1 may help; no such state was saved")
