"""The readable oracle: one model a client, torch's own SGD (SparseSGDM under a mask), clients in turn. Also the engine for models that cannot be stacked.

On a CPU clients run side by side in threads, one core each: small products do not share cores well, whole clients do.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fedlens.engine.local_work import Offsets, Update, Work
from fedlens.lens.space import ParamSpace
from fedlens.optim.sgd import LocalRule
from fedlens.optim.sparse_sgdm import SparseSGDM
from fedlens.precision import Precision
from fedlens.tasks.image import ImageBank, Pipeline

EARLY = 1 << 24  # bytes of parameters from which a step in the backward pass pays


@dataclass
class Sequential:
    model: nn.Module
    space: ParamSpace
    bank: ImageBank
    pipeline: Pipeline
    precision: Precision
    compile: bool = False
    name: str = "sequential"
    _workers: list["Worker"] = field(default_factory=list)  # they stay from round to round, and with them the memory that they have warm
    _pool: ThreadPoolExecutor | None = None  # its threads stay as well

    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None = None) -> Iterator[Update]:
        threads, parallel = torch.get_num_threads(), theta.device.type == "cpu" and not self.compile
        count = min(threads, len(work)) if parallel else 1
        python = Semaphore(max(1, count // 2))
        start = self.space.expand(theta)  # [dense]
        mask = self.space.mask()
        masks = None if mask is None else [m.bool() for m in self.space.views(mask).values()]
        workers = [self._worker(i, start, masks, python) for i in range(count)]

        def train(k: int) -> Update:
            if count > 1:
                torch.set_num_threads(threads // count)
            return workers[k % count].train(start, work.part(slice(k, k + 1)), rule, offsets)

        try:
            yield from map(train, range(len(work))) if count == 1 else self._side_by_side(train, workers, len(work), threads)
        finally:
            for worker in workers:
                worker.velocity = None  # merging needs the room

    def _side_by_side(self, train: Callable[[int], Update], workers: list["Worker"], clients: int, threads: int) -> Iterator[Update]:
        """In the order of the clients. While an update is read, its worker is at the next client already, in memory of the update before."""
        count, spare = len(workers), None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads)
        running: deque[Future[Update]] = deque(self._pool.submit(train, k) for k in range(count))
        try:
            for k in range(count, count + clients):
                update, worker = running.popleft().result(), workers[k % count]
                read = worker.local
                if k < clients:
                    if update.delta.data_ptr() == read.data_ptr():  # not so under a mask, whose coordinates are a vector of their own
                        worker.local = torch.empty_like(read) if spare is None else spare
                        worker.bind()
                    running.append(self._pool.submit(train, k))
                yield update
                if worker.local is not read:
                    spare = read
        finally:
            wait(running)
            torch.set_num_threads(threads)  # not every library keeps this number apart by thread

    def _worker(self, number: int, start: Tensor, masks: list[Tensor] | None, python: Semaphore) -> "Worker":
        while len(self._workers) <= number:
            shared = {id(p): p for n, p in self.model.named_parameters() if n not in self.space.shapes}
            model = copy.deepcopy(self.model, shared) if self._workers else self.model
            params, forward = dict(model.named_parameters()), torch.compile(model) if self.compile else model
            self._workers.append(Worker(self, model, forward, [params[name] for name in self.space.shapes], torch.empty_like(start)))
        worker = self._workers[number]
        worker.bind()
        worker.model.train()
        worker.masks, worker.python = masks, python
        return worker


@dataclass
class Worker:
    """One model and the vector that its parameters live in.

    `python` admits half of the workers to what needs the interpreter, while the others are in backward passes, which do not:
    without it they would wake each other at every operation.
    """

    engine: Sequential
    model: nn.Module
    forward: Callable[..., Any]  # the model, or what it was compiled to
    trained: list[nn.Parameter]
    local: Tensor  # [dense]
    masks: list[Tensor] | None = None
    python: Semaphore = field(default_factory=Semaphore)
    velocity: Tensor | None = None  # [dense]: of steps in the backward pass

    def bind(self) -> None:
        """The model's parameters are views of `local`: nothing is copied back and forth."""
        for param, view in zip(self.trained, self.engine.space.views(self.local).values(), strict=True):
            param.data = view

    def train(self, start: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None) -> Update:
        """The local steps of one client, from whole tensors [dense]."""
        (client,), steps, space = work.clients, int(work.steps[0]), self.engine.space
        anchor, offset = list(space.views(start).values()), None
        if offsets is not None:
            offset = list(space.views(space.expand(offsets(client), torch.zeros_like(start))).values())
        self.local.copy_(start)
        losses = torch.zeros((), dtype=torch.float64, device=start.device)
        stepping = self.stepping_early if self.may_step_early(rule) else self.stepping
        with stepping(rule, anchor, offset) as step:
            for j in range(steps):
                with self.python:
                    loss = self.loss(work, j, rule.label_smoothing)
                step(loss)
                losses += loss.detach()
        return Update(client, int(work.samples[0]), steps, space.compact(self.local.sub_(start)), (losses / steps).float())

    @contextmanager
    def stepping(self, rule: LocalRule, anchor: list[Tensor], offset: list[Tensor] | None) -> Iterator[Callable[[Tensor], None]]:
        """A step from a loss: all gradients, then torch's SGD (SparseSGDM under a mask)."""
        optimizer, scale = self.optimizer(rule), self.engine.precision.loss_scale  # a new one: momentum starts at zero each round

        def step(loss: Tensor) -> None:
            grads = torch.autograd.grad(
                loss * scale, self.trained, allow_unused=True
            )  # a foreign model may have weights that its loss does not use
            for param, grad in zip(self.trained, grads, strict=True):
                param.grad = grad if scale == 1 or grad is None else grad / scale
            if rule.prox:
                self._add([rule.prox * (p.detach() - a) for p, a in zip(self.trained, anchor, strict=True)])
            if rule.clip_norm is not None:
                if isinstance(optimizer, SparseSGDM):
                    optimizer.clip_grad_norm_(rule.clip_norm)  # what may move counts
                else:
                    nn.utils.clip_grad_norm_(self.trained, rule.clip_norm)
            if offset is not None:
                self._add(offset)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)  # before the next backward pass makes new ones

        yield step

    def may_step_early(self, rule: LocalRule) -> bool:
        """Whether each tensor may take its step in the backward pass, as soon as its gradient is there and still in the cache: on a CPU, for
        a model that no cache holds. Clipping needs all gradients first, and masks have an optimizer of their own."""
        large = self.local.numel() * self.local.element_size() > EARLY
        return large and self.local.device.type == "cpu" and self.masks is None and rule.clip_norm is None

    @contextmanager
    def stepping_early(self, rule: LocalRule, anchor: list[Tensor], offset: list[Tensor] | None) -> Iterator[Callable[[Tensor], None]]:
        """The same arithmetic tensor by tensor, in the backward pass itself; no more than one gradient is alive at a time."""
        options = {**_options(rule), "maximize": False, "fused": True}
        buffers: list[list[Tensor | None]] = [[] for _ in self.trained]
        begun = [False] * len(self.trained)
        if rule.momentum:  # in memory that stays for the next client: a velocity is as large as the model
            self.velocity = torch.empty_like(self.local) if self.velocity is None else self.velocity
            buffers = [[view] for view in self.engine.space.views(self.velocity.zero_()).values()]

        def move(param: Tensor, i: int) -> None:
            grad = param.grad
            assert grad is not None
            if rule.prox:
                grad.add_(rule.prox * (param.detach() - anchor[i]))
            if offset is not None:
                grad.add_(offset[i])
            with torch.no_grad():  # v = μ·0 + g is the first step, which is not dampened
                sgd([param], [grad], buffers[i], **(options if begun[i] else {**options, "dampening": 0.0}))
            param.grad, begun[i] = None, True

        hooks = [p.register_post_accumulate_grad_hook(partial(move, i=i)) for i, p in enumerate(self.trained)]  # type: ignore[no-untyped-call]
        try:
            yield torch.autograd.backward
        finally:
            for hook in hooks:
                hook.remove()

    def optimizer(self, rule: LocalRule) -> torch.optim.Optimizer:
        if self.masks is not None:
            return SparseSGDM(self.trained, **_options(rule), masks=self.masks)
        return torch.optim.SGD(self.trained, **_options(rule), fused=True)  # one pass over memory, which is what a large model waits for

    def loss(self, work: Work, step: int, smoothing: float) -> Tensor:
        engine, device = self.engine, self.local.device
        images, labels = engine.bank.batch(work.index[0, step])
        inputs = engine.pipeline(images, work.draws[0][step].to(device))
        keep = {} if work.keep is None else {"keep": work.keep[0, step].to(device)}
        with engine.precision.autocast():
            return F.cross_entropy(self.forward(inputs, **keep).float(), labels, label_smoothing=smoothing)

    def _add(self, more: list[Tensor]) -> None:
        for param, extra in zip(self.trained, more, strict=True):
            if param.grad is not None:
                param.grad.add_(extra)


def _options(rule: LocalRule) -> dict[str, Any]:
    """Of a rule what torch's SGD calls by the same names."""
    return {name: getattr(rule, name) for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay")}
