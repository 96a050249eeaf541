"""Mixed precision by device."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from fedlens.errors import bad_value


@dataclass(frozen=True)
class Precision:
    """Number type of forward and backward passes: by default bf16 on a recent GPU, fp16 with loss scaling on an older one, fp32 on a CPU."""

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
        if name == "fp16" and device.type != "cuda":
            raise bad_value("train.precision", name, f"auto, fp32 or bf16 on {device.type} (fp16 needs a GPU)")
        return cls(device, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name])

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def loss_scale(self) -> float:
        """Fixed loss scale of local steps, so that a step depends on its input only; above 1 only for fp16."""
        return 2.0**12 if self.dtype == torch.float16 else 1.0

    def scaler(self) -> torch.amp.GradScaler:
        """Return torch's adaptive loss scaler for centralised training."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
