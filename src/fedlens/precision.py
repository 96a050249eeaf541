"""Mixed precision, chosen by device."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from fedlens.errors import UserError


@dataclass(frozen=True)
class Precision:
    """bf16 where the GPU has it, fp16 with loss scaling on older ones (T4), fp32 on the CPU."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def choose(cls, device: torch.device, name: str) -> "Precision":
        if name == "auto":
            if device.type != "cuda":
                name = "fp32"
            else:
                name = "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
        if name == "fp16" and device.type != "cuda":
            raise UserError("train.precision: fp16 needs a GPU; allowed here is auto | fp32 | bf16")
        return cls(device, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name])

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @property
    def loss_scale(self) -> float:
        """A fixed scale for clients' local steps: it keeps a step a function of its input. Only fp16 needs one."""
        return 2.0**12 if self.dtype == torch.float16 else 1.0

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
