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

    def name(self) -> str:
        name = ("" if self.order == "|" else self.order) + self.code.lstrip("|")
        if not re.fullmatch(r"[<>=]?[buif][1248]", name):
            raise ValueError(f"unsupported array type {name!r}")
        return name


class _Array:
    """Stand-in for numpy.ndarray that stores shape, type and bytes."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_numpy(self) -> np.ndarray[Any, Any]:
        _, shape, dtype, fortran, data = self.state
        if not isinstance(data, bytes):
            raise ValueError("array without its bytes")
        return np.frombuffer(bytearray(data), dtype.name()).reshape(shape, order="F" if fortran else "C")


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


def read_pickle(path: Path) -> Any:
    """Return the file's dictionaries, lists, numbers, strings (bytes from Python 2) and numeric arrays; raise for anything else."""
    try:
        with path.open("rb") as file:
            return _plain(_Unpickler(file, encoding="bytes").load(), {})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises errors of any type
        raise UserError(f"{path}: must be a readable pickle of plain data ({first_line(error)}).") from error


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """Return the value with stand-ins replaced by arrays. `done`: results by id, since a list may refer to another many times."""
    if id(value) in done:
        return done[id(value)]
    match value:
        case _Array():
            return done.setdefault(id(value), value.to_numpy())
        case dict():
            return done.setdefault(id(value), {_plain(k, done): _plain(v, done) for k, v in value.items()})
        case list():
            return done.setdefault(id(value), [_plain(v, done) for v in value])
        case tuple():
            return done.setdefault(id(value), tuple(_plain(v, done) for v in value))
        case None | bool() | int() | float() | str() | bytes():
            return value
    raise ValueError(f"unsupported type {type(value).__name__}")
