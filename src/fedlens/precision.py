"""Mixed precision by device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.errors import bad_value

FP16_SCALE = 2.0**12  # first loss scale of a local step in fp16


@dataclass(frozen=True)
class Precision:
    """Number type of forward and backward passes: by default bf16 on a recent GPU, fp16 with loss scaling on an older one (a T4), fp32 on a CPU."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def choose(cls, device: torch.device, name: str) -> "Precision":
        """Return the configured precision; `auto` depends on the device."""
        if name == "auto":
            if device.type != "cuda":
                name = "fp32"
            else:
                name = "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
        if name == "fp16" and device.type == "mps":
            raise bad_value("train.precision", name, "auto, fp32 or bf16 on mps")
        return cls(device, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name])

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def gradients(self, loss: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of a local step; None for a parameter that the loss does not use.

        In fp16 the loss is scaled, so that small gradients do not vanish. Where a gradient overflows, the same step is taken with a smaller
        scale: unlike a scale that adapts over steps, this makes a step depend on its input only.
        """
        scale = FP16_SCALE if self.dtype == torch.float16 else 1.0
        while True:
            grads = torch.autograd.grad(loss if scale == 1 else loss * scale, params, allow_unused=True, retain_graph=scale > 1)
            if scale == 1:
                return grads
            if all(bool(grad.isfinite().all()) for grad in grads if grad is not None):
                return tuple(grad if grad is None else grad / scale for grad in grads)
            scale = max(1.0, scale / 16)

    def scaler(self) -> torch.amp.GradScaler:
        """Return torch's adaptive loss scaler for centralised training."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
