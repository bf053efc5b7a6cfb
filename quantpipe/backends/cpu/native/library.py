"""The C ABI of the compiled kernels: every signature is here and nowhere else.

``load_library`` finds or builds the library; calls release the interpreter lock while they run.

Shapes: N out_features, K in_features, G groups along K, T rows.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantpipe.backends.cpu.native.build import BuildError, library_path
from quantpipe.backends.cpu.native.structures import KV, Batch, Layer, Shape

# Name -> (result, arguments). Arrays are addresses: what they hold is told in src/linear.h and src/plan.h.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "qp_last_error": (c_char_p, []),
    "qp_isa_name": (c_char_p, []),
    "qp_isa_note": (c_char_p, []),
    "qp_isa_select": (c_int32, [c_char_p]),
    "qp_linear_f32": (c_void_p, [c_int, c_int, c_void_p, c_void_p]),
    "qp_linear_bf16": (c_void_p, [c_int, c_int, c_void_p, c_void_p]),
    "qp_linear_w8a8": (c_void_p, [c_int, c_int, c_void_p, c_void_p, c_void_p, c_float]),
    "qp_linear_wint": (c_void_p, [c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int]),
    "qp_linear_free": (None, [c_void_p]),
    "qp_linear_bytes": (c_int64, [c_void_p]),
    "qp_linear_apply": (None, [c_void_p, c_void_p, c_int, c_void_p, c_int]),
    "qp_plan_new": (c_void_p, [POINTER(Shape)]),
    "qp_plan_free": (None, [c_void_p]),
    "qp_plan_add_rope": (c_int32, [c_void_p, c_int32, c_void_p, c_float]),
    "qp_plan_add_layer": (c_int32, [c_void_p, POINTER(Layer)]),
    "qp_plan_forward": (c_int32, [c_void_p, POINTER(Batch), POINTER(KV), c_void_p, c_void_p]),
    "qp_plan_times": (None, [c_void_p, POINTER(c_double)]),
    "qp_plan_bytes": (c_int64, [c_void_p]),
    "qp_kv_block_bytes": (c_int64, [c_int32] * 5),
    "qp_kv_tile": (c_int32, []),
    "qp_attention_apply": (
        c_int32,
        [POINTER(Layer), c_int32, c_void_p, c_float, POINTER(Batch), POINTER(KV), c_void_p, c_void_p, c_int32],
    ),
    "qp_gate_apply": (None, [c_int32, c_void_p, c_void_p, c_int32]),
    "qp_argmax_apply": (c_int64, [c_void_p, c_int64]),
}


class NativeError(Exception):
    """The compiled kernels refused something; the message says what and why."""


class Library:
    """The loaded library. Functions are called by their C names, with the types of ``SIGNATURES``."""

    def __init__(self, path: Path) -> None:
        """OSError where it cannot be loaded."""
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns. NativeError where the library lacks it."""
        return (self._functions.get(name) or self._find(name))(*arguments)

    def make(self, name: str, *arguments: Any) -> int:
        """The handle that the function makes. NativeError where it made none."""
        made = self.call(name, *arguments)
        if not made:
            raise self._refusal()
        return int(made)

    def check(self, name: str, *arguments: Any) -> int:
        """What the function returns. NativeError where that is negative."""
        result = int(self.call(name, *arguments))
        if result < 0:
            raise self._refusal()
        return result

    def _find(self, name: str) -> Any:
        try:
            function = getattr(self._dll, name)
        except AttributeError:
            raise NativeError(f"{self.path.name} lacks {name}; remove it, and it is compiled again") from None
        function.restype, function.argtypes = SIGNATURES[name]
        self._functions[name] = function
        return function

    def _refusal(self) -> NativeError:
        return NativeError((self.call("qp_last_error") or b"no reason given").decode())


def load_library() -> Library:
    """The library, found or compiled once per process. NativeError where there is none, with the reason."""
    found = _find_library()
    if isinstance(found, str):
        raise NativeError(found)
    return found


@lru_cache(maxsize=1)
def _find_library() -> Library | str:
    """The library or why there is none: what failed once is not compiled again."""
    try:
        return Library(library_path())
    except BuildError as error:
        return str(error)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder to keep it in
        return f"the compiled kernels cannot be loaded: {str(error).splitlines()[0]}"
