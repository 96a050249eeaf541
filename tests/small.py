"""Pages and notebooks in small: their text stays what users read, but a tenth of the embedded images and short local work are behind it.

As a program: the kernel of a notebook, with that data set and that work.
"""

from dataclasses import replace

import pytest

from fedlens.config import Config
from fedlens.data import SOURCES
from fedlens.data.dataset import Raw
from fedlens.training import run
from fedlens.training.bench import Bench


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Let the embedded data set have 600 + 100 images, a client take one step of at most 4 images per round, and a mask see 8 images."""
    embedded, set_up = SOURCES["fashion_mini"], run.set_up

    def few(*given: object) -> Raw:
        raw = embedded(*given)  # type: ignore[arg-type]
        return replace(raw, train=raw.train.subset(range(600)), test=raw.test.subset(range(100)))

    def short(config: Config) -> Bench:
        if config.trainer == "federated":
            optim = replace(config.optim, batch_size=min(config.optim.batch_size, 4))
            mask = replace(config.mask, samples=8)
            config = replace(config, optim=optim, mask=mask, federated=replace(config.federated, local_steps=1))
        return set_up(config)

    patch.setitem(SOURCES, "fashion_mini", few)
    patch.setattr(run, "set_up", short)


if __name__ == "__main__":
    from ipykernel.kernelapp import IPKernelApp

    shrink(pytest.MonkeyPatch())
    IPKernelApp.launch_instance()
