"""The threaded engine, the default on a CPU: several clients at once, one core each, with the bits of one after another.

Small matrix products do not share cores well; whole clients do. Models, memory and threads live from round to round. A large
model takes the step of each tensor inside the backward pass, while its gradient is still in the cache.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fedlens.engine.local_work import Offsets, Update, Work
from fedlens.engine.sequential import Sequential, Tensors, local_step
from fedlens.optim.sgd import OPTIONS, LocalRule, make_optimizer

EARLY = 1 << 24  # bytes of parameters from which a step in the backward pass is faster


@dataclass
class Threaded(Sequential):
    """Clients side by side in threads; with `compile` one after another."""

    name: ClassVar[str] = "threaded"
    _workers: list["Worker"] = field(default_factory=list)
    _pool: ThreadPoolExecutor | None = None

    def updates(self, theta: Tensor, work: Work, rule: LocalRule, offsets: Offsets | None = None) -> Iterator[Update]:
        threads = torch.get_num_threads()
        count = 1 if self.compile else min(threads, len(work))
        start, masks, python = self.space.expand(theta), self.masks(), Semaphore(max(1, count // 2))
        workers = [self._worker(i, start, masks, python) for i in range(count)]

        def train(k: int) -> Update:
            if count > 1:
                torch.set_num_threads(threads // count)
            return workers[k % count].train(start, work, k, rule, offsets)

        try:
            yield from map(train, range(len(work))) if count == 1 else self._side_by_side(train, workers, len(work), threads)
        finally:
            for worker in workers:
                worker.velocity = None  # merging needs the memory

    def _side_by_side(self, train: Callable[[int], Update], workers: list["Worker"], clients: int, threads: int) -> Iterator[Update]:
        """Yield updates in client order. While one is read, its worker trains its next client in the memory of the update before."""
        count, spare = len(workers), None
        self._pool = self._pool or ThreadPoolExecutor(threads)
        running: deque[Future[Update]] = deque(self._pool.submit(train, k) for k in range(count))
        try:
            for following in range(count, count + clients):
                update, worker = running.popleft().result(), workers[following % count]
                lent = worker.local  # without a mask the update lies here
                if following < clients:
                    if self.space.active is None:
                        worker.bind(torch.empty_like(lent) if spare is None else spare)
                    running.append(self._pool.submit(train, following))
                yield update
                if worker.local is not lent:
                    spare = lent
        finally:
            wait(running)
            torch.set_num_threads(threads)  # some libraries have one setting for all threads

    def _worker(self, number: int, start: Tensor, masks: Tensors | None, python: Semaphore) -> "Worker":
        if len(self._workers) <= number:
            shared = {id(p): p for n, p in self.model.named_parameters() if n not in self.space.shapes}
            model = copy.deepcopy(self.model, shared) if number else self.model
            params = dict(model.named_parameters())
            forward = model if number else self.forward
            self._workers.append(Worker(self, model, forward, [params[n] for n in self.space.shapes], torch.empty_like(start)))
        worker = self._workers[number]
        worker.masks, worker.python = masks, python
        worker.bind(worker.local)
        worker.model.train()
        return worker


@dataclass
class Worker:
    """One model and the vector that holds its parameters.

    `python` admits half of the workers to code that holds the interpreter; the others are in backward passes, which do not.
    Without it they would wake each other at every operation.
    """

    engine: Threaded
    model: nn.Module
    forward: Callable[..., Tensor]
    trained: list[nn.Parameter]
    local: Tensor  # [dense]
    masks: Tensors | None = None
    python: Semaphore = field(default_factory=Semaphore)
    velocity: Tensor | None = None  # [dense] momentum of steps in the backward pass

    def bind(self, local: Tensor) -> None:
        """Make the model's parameters views of this memory, so that nothing is copied back and forth."""
        self.local = local
        for param, view in zip(self.trained, self.engine.space.views(local).values(), strict=True):
            param.data = view

    def train(self, start: Tensor, work: Work, k: int, rule: LocalRule, offsets: Offsets | None) -> Update:
        """Run the local steps of client number k of the cohort, from whole tensors [dense]."""
        space, client, steps = self.engine.space, work.clients[k], int(work.steps[k])
        offset = None if offsets is None else self.engine.whole(offsets(client))
        self.local.copy_(start)
        losses = torch.zeros((), dtype=torch.float64)
        # Clipping and loss scaling need all gradients first, and masks have their own optimizer.
        scaled = self.engine.precision.dtype == torch.float16
        early = self.local.nbytes > EARLY and self.masks is None and rule.clip_norm is None and not scaled
        stepping = self._early_steps if early else self._late_steps
        with stepping(rule, list(space.views(start).values()), offset) as step:
            for j in range(steps):
                with self.python:
                    loss = self.engine.loss(self.forward, work, k, j, rule)
                step(loss)
                losses += loss.detach()
        return Update(client, int(work.samples[k]), steps, space.compact(self.local.sub_(start)), (losses / steps).float())

    @contextmanager
    def _late_steps(self, rule: LocalRule, anchor: Tensors, offset: Tensors | None) -> Iterator[Callable[[Tensor], None]]:
        """Step after the backward pass, as the sequential engine does."""
        optimizer = make_optimizer(self.trained, rule, self.masks, fused=True)
        yield lambda loss: local_step(loss, self.trained, optimizer, rule, self.engine.precision, anchor, offset)

    @contextmanager
    def _early_steps(self, rule: LocalRule, anchor: Tensors, offset: Tensors | None) -> Iterator[Callable[[Tensor], None]]:
        """Step tensor by tensor in the backward pass with the same arithmetic: only one gradient exists at a time."""
        started = [False] * len(self.trained)
        options = {name: getattr(rule, name) for name in OPTIONS} | {"maximize": False, "fused": True}
        buffers: list[list[Tensor | None]] = [[] for _ in self.trained]
        if rule.momentum:
            self.velocity = torch.empty_like(self.local) if self.velocity is None else self.velocity
            buffers = [[view] for view in self.engine.space.views(self.velocity.zero_()).values()]

        def move(param: Tensor, i: int) -> None:
            grad = param.grad
            assert grad is not None
            if rule.prox:
                grad.add_(rule.prox * (param.detach() - anchor[i]))
            if offset is not None:
                grad.add_(offset[i])
            with torch.no_grad():  # the first step v = μ·0 + g has no dampening, as in torch
                sgd([param], [grad], buffers[i], **(options if started[i] else {**options, "dampening": 0.0}))
            param.grad, started[i] = None, True

        hooks = [p.register_post_accumulate_grad_hook(partial(move, i=i)) for i, p in enumerate(self.trained)]  # type: ignore[no-untyped-call]
        try:
            yield torch.autograd.backward
        finally:
            for hook in hooks:
                hook.remove()
