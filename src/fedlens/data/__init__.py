"""Data sets. A source registers itself when its module is imported here."""

from fedlens.data import cifar, fashion, folder  # noqa: F401
from fedlens.data.dataset import SOURCES, Dataset, Split, load_dataset

__all__ = ["SOURCES", "Dataset", "Split", "load_dataset"]
