"""How fast the compiled linears are: decode beside the speed of reading memory, prefill beside torch's float32 matmul.

    OMP_NUM_THREADS=1 python bench/native_linears.py --shapes 576x1536 1536x576 2048x5632 896x4864

One thread, everything taking turns in one process, the fastest of many goes by the processor time of this thread (so
that a busy machine changes little but what the memory gives). Decode: one token through copies of one linear that do
not fit into the caches; what a call costs whatever its size (Python, mostly) is taken off. Reading is the C library's
search for a byte that is not there. Prefill: operations (2 T N K) per second.

Shapes: T tokens, N out_features, K in_features, G groups along K.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from ctypes import CDLL, c_int, c_size_t, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.backends.cpu.native.library import Library, load_library
from quantpipe.backends.cpu.native.linears import LinearSettings, make_linear
from quantpipe.formats.scheme import w8a8, weight_only
from quantpipe.models.weights import LinearWeights

POOL_BYTES, PIECE_BYTES = 96 << 20, 4 << 20
GROUP_SIZE = 64
# Name -> bits of weights, bits of activations.
KINDS: dict[str, tuple[int, int]] = {
    "float32": (32, 32),
    "bfloat16": (16, 32),
    "w8a8": (8, 8),
    "w4, int8": (4, 8),
    "w4, int16": (4, 16),
    "w4, float32": (4, 32),
    "w8, int16": (8, 16),
}


def random_weights(kind: str, num_out: int, num_in: int) -> LinearWeights:
    """Full-range integers with scales in bfloat16, as artifacts have them."""
    bits = KINDS[kind][0]
    if bits >= 16:
        dtype = torch.float32 if bits == 32 else torch.bfloat16
        return LinearWeights(torch.randn(num_out, num_in).to(dtype), None, None, None)
    q_NK = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (num_out, num_in), dtype=torch.int8)
    scheme = w8a8() if kind == "w8a8" else weight_only(bits, GROUP_SIZE)
    return LinearWeights(q_NK, torch.rand(num_out, scheme.num_groups(num_in)).bfloat16(), None, scheme)


class Linears:
    """Copies of one linear that together take so many bytes; each call runs the next few of them."""

    def __init__(
        self, library: Library, kind: str, num_out: int, num_in: int, num_tokens: int, pool_bytes: int, piece_bytes: int
    ) -> None:
        weights = random_weights(kind, num_out, num_in)
        settings = LinearSettings(127.0, KINDS[kind][1])
        self._library = library
        self._handles = [make_linear(library, weights, settings)]
        self.num_bytes = int(library.call("qp_linear_bytes", self._handles[0]))
        while len(self._handles) * self.num_bytes < pool_bytes:
            self._handles.append(make_linear(library, weights, settings))
        self.num_per_call = max(1, piece_bytes // self.num_bytes)
        self._next = 0
        self._x_TK, self._y_TN = torch.randn(num_tokens, num_in), torch.empty(num_tokens, num_out)

    def __call__(self) -> None:
        arguments = (self._x_TK.data_ptr(), self._x_TK.shape[0], self._y_TN.data_ptr(), 1)
        for _ in range(self.num_per_call):
            self._library.call("qp_linear_apply", self._handles[self._next], *arguments)
            self._next = (self._next + 1) % len(self._handles)

    def free(self) -> None:
        for handle in self._handles:
            self._library.call("qp_linear_free", handle)


class Reader:
    """Reads a pool piece by piece."""

    def __init__(self) -> None:
        self._find = CDLL(None).memchr
        self._find.argtypes, self._find.restype = [c_void_p, c_int, c_size_t], c_void_p
        self._pool: Tensor = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        self._at = 0

    def __call__(self) -> None:
        found = self._find(self._pool.data_ptr() + self._at, 1, PIECE_BYTES)
        assert found is None, "zeros hold no ones"
        self._at = (self._at + PIECE_BYTES) % POOL_BYTES


def fastest(runs: Sequence[Callable[[], object]], budget_s: float) -> list[float]:
    """Seconds of the fastest go of each, all taking turns."""
    best = [math.inf] * len(runs)
    end = time.monotonic() + budget_s
    while time.monotonic() < end or math.inf in best:
        for index, run in enumerate(runs):
            start = time.thread_time()
            run()
            best[index] = min(best[index], time.thread_time() - start)
    return best


@dataclass(frozen=True)
class Row:
    """One kind at one shape."""

    kind: str
    read_gb_s: float
    decode_gb_s: float
    decode_us: float
    torch_gflops: float
    prefill_gflops: float

    def __str__(self) -> str:
        return (
            f"| {self.kind} | {self.decode_us:.1f} | {self.decode_gb_s:.1f} | {self.decode_gb_s / self.read_gb_s:.0%} "
            f"| {self.prefill_gflops:.0f} | {self.prefill_gflops / self.torch_gflops:.2f} |"
        )


def measure(library: Library, num_out: int, num_in: int, num_tokens: int, budget_s: float) -> list[Row]:
    """Every kind at one shape; half of the budget for decode."""
    # Some hundred calls, so that a cold cache does not count.
    empty = Linears(library, "float32", 1, 32, 1, 1, 1 << 20)
    decodes = [Linears(library, kind, num_out, num_in, 1, POOL_BYTES, PIECE_BYTES) for kind in KINDS]
    read_s, empty_s, *decode_s = fastest([Reader(), empty, *decodes], budget_s / 2)
    call_s = empty_s / empty.num_per_call
    sizes = [decode.num_bytes for decode in decodes]
    each_s = [seconds / decode.num_per_call - call_s for seconds, decode in zip(decode_s, decodes, strict=True)]
    for linears in (empty, *decodes):
        linears.free()
    x_TK, weight_NK = torch.randn(num_tokens, num_in), torch.randn(num_out, num_in)
    prefills = [Linears(library, kind, num_out, num_in, num_tokens, 1, 1) for kind in KINDS]
    torch_s, *prefill_s = fastest([lambda: torch.matmul(x_TK, weight_NK.T), *prefills], budget_s / 2)
    for linears in prefills:
        linears.free()
    billions = 2 * num_tokens * num_out * num_in / 1e9
    return [
        Row(kind, PIECE_BYTES / read_s / 1e9, size / s / 1e9, 1e6 * s, billions / torch_s, billions / many_s)
        for kind, size, s, many_s in zip(KINDS, sizes, each_s, prefill_s, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["576x1536", "1536x576", "2048x5632", "896x4864"], help="NxK")
    parser.add_argument("--tokens", type=int, default=256, help="of the prefill")
    parser.add_argument("--seconds", type=float, default=20, help="per shape")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    library = load_library()
    print(f"kernels: {library.call('qp_isa_name').decode()}")
    for shape in arguments.shapes:
        num_out, num_in = map(int, shape.split("x"))
        rows = measure(library, num_out, num_in, arguments.tokens, arguments.seconds)
        print(f"\n{shape}: reading {rows[0].read_gb_s:.1f} GB/s, torch float32 {rows[0].torch_gflops:.0f} GFLOP/s\n")
        print("| kind | decode, us | GB/s | of reading | prefill, GFLOP/s | of torch float32 |")
        print("|---|---:|---:|---:|---:|---:|")
        print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
