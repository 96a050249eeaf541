"""Read the pickled dictionaries of the Python CIFAR archives without executing code from the file.

A pickle is a program. Here it can only call the stand-ins below, which store their arguments; any other name is refused.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.errors import UserError, first_line


class _Dtype:
    """Stand-in for numpy.dtype that stores type code and byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = _text(code), "|"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])

    def numeric(self) -> np.dtype[Any]:
        name = ("" if self.order == "|" else self.order) + self.code.lstrip("|")
        if not re.fullmatch(r"[<>=]?[buif][1248]", name):
            raise ValueError(f"unsupported array type {name!r}")
        return np.dtype(name)


class _Array(np.ndarray[Any, Any]):
    """An array that takes its shape, numeric type and bytes from the pickle, and nothing else."""

    def __new__(cls, *_: Any) -> "_Array":
        return super().__new__(cls, 0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(data, bytes):
            raise ValueError("array without its bytes")
        super().__setstate__((1, shape, dtype.numeric(), fortran, data))  # checks the number of bytes


def _encode(text: str, codec: Any = "latin1") -> bytes:
    if _text(codec) not in ("latin1", "latin-1"):
        raise ValueError(f"unsupported codec {codec!r}")
    return text.encode("latin1")


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # numpy 1 and Python 2
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # numpy 2
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes in protocol 2
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(f"refused, nothing was run: the pickle calls {module}.{name}, which plain data never needs.")
        return _ALLOWED[module, name]


def read_pickle(path: Path) -> dict[Any, Any]:
    """Return the file's dictionary of lists, numbers, strings (bytes from Python 2) and numeric arrays."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError(f"it holds no dictionary but a {type(content).__name__}")
        return content
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises errors of any type
        raise UserError(f"{path}: must be a readable pickle of plain data ({first_line(error)}).") from error
