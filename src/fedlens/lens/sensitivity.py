"""Sensitivity of the output to each weight: the diagonal of the Fisher information, F_i = Σ_x E_{y ~ p(·|x)} (∂ log p(y|x) / ∂θ_i)².

Gradients are squared per sample and then summed, so that the sensitivities of clients add up to the centralised ones. TaLoS
(Iurada et al. 2025) can therefore calibrate in a federation. The square of a batch's mean gradient does not add up.
"""

import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedlens.errors import UserError, bad_value, first_line, unknown
from fedlens.seeding import torch_rng

log = logging.getLogger("fedlens")
LABELS = {
    "model": "one label per sample, drawn from the model's own distribution: an estimate of the Fisher information",
    "data": "the true labels: the empirical Fisher information",
    "exact": "the expectation over all classes: the Fisher information itself, at one backward pass per class",
}
SCORES = {"log_prob": "log p(y|x), as in the paper", "logit": "the raw logit of y, as in the authors' code"}
REDUCE = ("sum", "mean")  # over the images; sums add up over clients
CPU_BYTES = 512 * 2**20  # per-sample gradients in memory at once
MOST = 256  # images at once: beyond that a GPU is busy, and a small model's activations outgrow its gradients


def sensitivity(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    labels_from: str = "model",
    score: str = "log_prob",
    reduce: str = "sum",
    seed: int = 0,
    names: Collection[str] | None = None,
    uniform: Tensor | None = None,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """Return the diagonal Fisher information over images [n, …] in eval mode: name -> tensor like the parameter.

    names: parameters to score, by default those that train. chunk: images at once; it does not change the result. uniform: [n] in [0, 1),
    draws each image's label for labels_from="model"; by default a hash of seed and image, independent of batch and client.
    """
    for field, value, known in (("labels_from", labels_from, LABELS), ("score", score, SCORES), ("reduce", reduce, REDUCE)):
        if value not in known:
            raise unknown(field, value, known)
    count = _check(images, labels if labels_from == "data" else None, labels_from, uniform, chunk)
    params = dict(model.named_parameters())
    sampler = _Sampler(model, params, _scored(params, names), labels_from, score)
    totals = {name: torch.zeros(params[name].shape, dtype=_exact(params[name].dtype), device=params[name].device) for name in sampler.names}
    device = next(iter(totals.values())).device
    key = _hash_key(images[0].numel(), seed, device) if labels_from == "model" and uniform is None else None
    size, at = chunk or _default_chunk(params, device), 0
    with _evaluating(model), torch.enable_grad():
        while at < count:
            part = slice(at, at + size)
            x, y = images[part].to(device), None if labels is None else labels[part].to(device)
            u = _hash(x, key) if key is not None else None if uniform is None else uniform[part].to(device).float()
            try:
                squares = sampler.squares(x, y, u)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size = (size + 1) // 2
                log.warning("sensitivity: out of memory; continuing with %d images at once", size)
                torch.cuda.empty_cache()
                continue
            for name, square in squares.items():
                totals[name] += square
            at += size
    return {name: total / count for name, total in totals.items()} if reduce == "mean" else totals


@dataclass
class _Sampler:
    """Squared per-sample gradients: every sample has its own copy of the scored parameters."""

    model: nn.Module
    params: dict[str, nn.Parameter]
    names: list[str]
    labels_from: str
    score: str
    loop: bool = False  # one sample at a time, for a model that vmap cannot batch

    def squares(self, images: Tensor, labels: Tensor | None, uniform: Tensor | None) -> dict[str, Tensor]:
        """Return the squared gradients summed over images [b, …], without names that the output does not depend on."""
        copies = {name: self.params[name].detach().expand(len(images), *self.params[name].shape).requires_grad_() for name in self.names}
        scores = self._scores(self._logits(copies, images), labels, uniform)  # [b, terms]
        sums: dict[str, Tensor] = {}
        terms = scores.unbind(1) if scores.requires_grad else ()
        for i, term in enumerate(terms):
            grads = torch.autograd.grad(term.sum(), list(copies.values()), retain_graph=i + 1 < len(terms), allow_unused=True)
            for name, grad in zip(self.names, grads, strict=True):  # grad [b, *shape], or None
                if grad is not None:
                    square = grad.to(_exact(grad.dtype)).square().sum(0)  # not in place: two parameters may share one gradient
                    sums[name] = sums[name].add_(square) if name in sums else square
            del grads, grad  # free them before the next term's gradients are allocated
        return sums

    def _scores(self, logits: Tensor, labels: Tensor | None, uniform: Tensor | None) -> Tensor:
        """Return what is differentiated, from logits [b, classes]: [b, 1], or [b, classes] times √p so that squares have weight p."""
        classes = logits.shape[1]
        scores = logits.log_softmax(1) if self.score == "log_prob" else logits
        if self.labels_from == "exact":
            return scores * logits.detach().softmax(1).sqrt()
        if self.labels_from == "model":
            assert uniform is not None
            cdf = logits.detach().softmax(1).cumsum(1)
            chosen = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(1).clamp(max=classes - 1)  # inverse transform sampling
        else:
            assert labels is not None
            if int(labels.min()) < 0 or int(labels.max()) >= classes:
                raise bad_value("labels", f"{int(labels.min())} to {int(labels.max())}", f"0 to {classes - 1}, the model's classes")
            chosen = labels.long()
        return scores.gather(1, chosen[:, None])

    def _logits(self, copies: dict[str, Tensor], images: Tensor) -> Tensor:
        """Return logits [b, classes] of images [b, …], each computed with its own copy of the parameters [b, *shape]."""
        if getattr(self.model, "client_axis", False):  # treat each sample as a client with one image
            logits = _checked(self._call(copies, images[:, None]), 3)[:, 0]
        elif self.loop:
            logits = self._one_by_one(copies, images)
        else:
            try:
                with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # vmap has no rule for the fused attention kernels
                    warnings.filterwarnings("ignore", "There is a performance drop")  # vmap loops over other operations without a rule
                    logits = vmap(self._one)(copies, images)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                model = type(self.model).__name__
                log.debug("sensitivity: %s cannot be batched, scoring one sample at a time (%s)", model, first_line(error))
                self.loop = True
                logits = self._one_by_one(copies, images)
        return logits.to(_exact(logits.dtype))

    def _call(self, own: dict[str, Tensor], images: Tensor) -> object:
        rest = {name: param.detach() for name, param in self.params.items() if name not in own}
        return functional_call(self.model, {**rest, **own}, (images,))

    def _one(self, own: dict[str, Tensor], image: Tensor) -> Tensor:
        return _checked(self._call(own, image[None]), 2)[0]

    def _one_by_one(self, copies: dict[str, Tensor], images: Tensor) -> Tensor:
        rows = zip(*(copy.unbind(0) for copy in copies.values()), strict=True)  # unbind: its gradient is one stack, not b sums
        return torch.stack([self._one(dict(zip(copies, row, strict=True)), image) for row, image in zip(rows, images, strict=True)])


def _checked(logits: object, ndim: int) -> Tensor:
    if not isinstance(logits, Tensor) or logits.ndim != ndim:
        output = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"model must return logits [images, classes], got {output}.")
    return logits


def _check(images: Tensor, labels: Tensor | None, labels_from: str, uniform: Tensor | None, chunk: int | None) -> int:
    """Return the number of images; raise if an input does not fit them."""
    count = len(images) if images.ndim else 0
    if not count or not images.is_floating_point():
        raise bad_value("images", f"{images.dtype} {list(images.shape)}", "at least one image, floating point, normalised")
    if labels_from == "data" and labels is None:
        raise bad_value("labels", None, "one label per image for labels_from='data'")
    if labels is not None and (labels.shape != (count,) or labels.is_floating_point()):
        raise bad_value("labels", f"{labels.dtype} {list(labels.shape)}", f"[{count}] integers, one per image")
    if uniform is not None and (uniform.shape != (count,) or not bool(((uniform >= 0) & (uniform < 1)).all())):
        raise bad_value("uniform", list(uniform.shape), f"[{count}] numbers in [0, 1), one per image")
    if chunk is not None and chunk < 1:
        raise bad_value("chunk", chunk, ">= 1 or None")
    return count


def _scored(params: dict[str, nn.Parameter], names: Collection[str] | None) -> list[str]:
    scored = [name for name, param in params.items() if param.requires_grad] if names is None else list(dict.fromkeys(names))
    for name in scored:
        if name not in params:
            raise unknown("names", name, params)
    if not scored:
        raise UserError("sensitivity: no parameter to score: every one of the model is frozen, or `names` is empty.")
    return scored


def _default_chunk(params: dict[str, nn.Parameter], device: torch.device) -> int:
    """Return how many images fit at once. All parameters count, scored or not, because activations grow with the model."""
    bound = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else CPU_BYTES
    return max(1, min(MOST, bound // (4 * sum(param.numel() for param in params.values()))))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _hash_key(length: int, seed: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random weights [length], drawn on the CPU."""
    return (torch.randint(-(2**63), 2**63 - 1, (length,), generator=torch_rng(seed, "sensitivity labels")) | 1).to(device)


def _hash(images: Tensor, key: Tensor) -> Tensor:
    """Return [b] in [0, 1), a hash of the bits of each image [b, …]. Integers wrap round, so every device and order gives the same."""
    bits = images.float().flatten(1).contiguous().view(torch.int32)
    z = (bits.long() * key).sum(1)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # splitmix64 (Steele et al. 2014)
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor
    z = z ^ ((z >> 31) & (2**33 - 1))
    return ((z >> 40) & (2**24 - 1)).float() / 2**24  # a float32 holds 24 bits exactly


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode without torch's attention fast path, which has no gradient; restore both afterwards."""
    before, fastpath = [(module, module.training) for module in model.modules()], torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, training in before:
            module.training = training
