"""The C ABI of the compiled kernels: every signature is here and nowhere else.

``load_library`` finds or builds the library; calls release the interpreter lock while they run.

Shapes: N out_features, K in_features, G groups along K, T rows.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int8, c_int64, c_uint16, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantpipe.backends.cpu.native.build import BuildError, library_path

_FLOATS, _INT8S, _BF16S = POINTER(c_float), POINTER(c_int8), POINTER(c_uint16)

# Name -> (result, arguments).
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "qp_last_error": (c_char_p, []),
    "qp_linear_f32": (c_void_p, [c_int, c_int, c_void_p, c_void_p]),
    "qp_linear_bf16": (c_void_p, [c_int, c_int, c_void_p, c_void_p]),
    "qp_linear_w8a8": (c_void_p, [c_int, c_int, c_void_p, c_void_p, c_void_p, c_float]),
    "qp_linear_wint": (c_void_p, [c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int]),
    "qp_linear_free": (None, [c_void_p]),
    "qp_linear_bytes": (c_int64, [c_void_p]),
    "qp_linear_apply": (None, [c_void_p, c_void_p, c_int, c_void_p, c_int]),
}


class NativeError(Exception):
    """The compiled kernels refused something; the message says what and why."""


class Library:
    """The loaded library. Functions are called by their C names, with the types of ``SIGNATURES``."""

    def __init__(self, path: Path) -> None:
        """OSError where it cannot be loaded, AttributeError where it lacks a function."""
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._dll, name)
            function.restype, function.argtypes = result, arguments

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns."""
        return getattr(self._dll, name)(*arguments)

    def make(self, name: str, *arguments: Any) -> int:
        """The handle that the function makes. NativeError where it made none."""
        made = getattr(self._dll, name)(*arguments)
        if not made:
            raise NativeError((self._dll.qp_last_error() or b"no reason given").decode())
        return int(made)


@lru_cache(maxsize=1)
def load_library() -> Library | str:
    """The library, once per process, or why there is none, as part of a line."""
    try:
        return Library(library_path())
    except BuildError as error:
        return str(error)
    except (OSError, AttributeError, RuntimeError) as error:  # RuntimeError: no home folder to keep it in
        return f"the compiled kernels cannot be loaded: {str(error).splitlines()[0]}"
