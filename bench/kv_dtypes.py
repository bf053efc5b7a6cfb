"""What a KV cache mode saves and costs: sequences that fit into the same bytes, and how far predictions move.

    python bench/kv_dtypes.py --model MODEL --text TEXT.txt --num-windows 4 --window-tokens 256 --threads 1

Mean and 99th percentile of KL(full || mode) in nats, and how often the most likely token is the same, over the
positions of the first windows of the text; the weights are the same on both sides, only keys and values are rounded.
Windows are read in chunks of ``--chunk`` tokens: what a token sees of earlier ones has been through the cache. Static
scales, where the folder has none, are the largest magnitudes of the window after those judged.

``fit`` is how many sequences of ``--context-tokens`` the bytes of ``--pool-mib`` hold, in whole blocks.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from quantpipe.backends.protocol import BatchInput
from quantpipe.backends.reference import ReferenceBackend
from quantpipe.backends.reference_kv_cache import ReferenceKVStore
from quantpipe.bench.latency import percentile
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.evaluate.window_logits import Positions, compare_window
from quantpipe.formats.digests import KV_SCALES_NAME
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_rounding import static_scale
from quantpipe.formats.kv_scales import KVScales
from quantpipe.gate.record import machine_facts, utc_now

FULL = "auto"


def with_scales(folder: Path, token_ids: Sequence[int], scratch: Path) -> Path:
    """The model folder, or where it has no static KV scales, one beside it that links to its files and has them."""
    if (folder / KV_SCALES_NAME).is_file():
        return folder
    for path in folder.resolve().iterdir():
        (scratch / path.name).symlink_to(path)
    executor = ReferenceBackend().load(folder, 127.0, None)
    num_tokens = len(token_ids)
    kv_cache = executor.allocate_kv_cache(1, num_tokens, FULL)
    positions_T, table_SB = torch.arange(num_tokens), torch.zeros(1, 1, dtype=torch.int64)
    lens, rows_R = (num_tokens,), positions_T[-1:]
    executor.forward(
        BatchInput(torch.tensor(token_ids), positions_T, positions_T, lens, lens, table_SB, rows_R), kv_cache
    )

    def scales(stores: Sequence[ReferenceKVStore]) -> tuple[torch.Tensor, ...]:
        return tuple(static_scale(store.codes.abs().amax((0, 1, 3))) for store in stores)

    save_file(KVScales(scales(kv_cache.keys), scales(kv_cache.values)).tensors(), scratch / KV_SCALES_NAME)
    return scratch


def open_engine(folder: Path, kv_dtype: str, asked: argparse.Namespace) -> Engine:
    return Engine.open(
        folder,
        EngineConfig(
            backend=asked.backend,
            kv_dtype=kv_dtype,
            max_num_seqs=1,
            max_model_len=asked.window_tokens,
            max_prefill_chunk=asked.chunk,
            num_threads=asked.threads,
        ),
    )


def row(kv_dtype: str, positions: list[Positions], asked: argparse.Namespace, shape: tuple[int, int, int]) -> str:
    num_layers, num_kv_heads, head_dim = shape
    block_bytes = 16 * num_layers * KV_MODES[kv_dtype].token_bytes(num_kv_heads, head_dim)
    num_fitting = (asked.pool_mib << 20) // block_bytes // -(-asked.context_tokens // 16)
    kl = np.concatenate([window.kl_T for window in positions]) if positions else np.zeros(1)
    agrees = np.mean(np.concatenate([window.agrees_T for window in positions])) if positions else 1.0
    return (
        f"| {kv_dtype} | {block_bytes / 16 / 1024:.1f} | {num_fitting} | {kl.mean():.2g} | "
        f"{percentile(kl.tolist(), 99):.2g} | {agrees:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--kv-dtypes", nargs="+", choices=KV_MODES, default=list(KV_MODES))
    parser.add_argument("--num-windows", type=int, default=4)
    parser.add_argument("--window-tokens", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--context-tokens", type=int, default=2048)
    parser.add_argument("--pool-mib", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    token_ids = Tokenizer.open(asked.model).encode(asked.text.read_text(encoding="utf-8")[: 1 << 20])
    starts = range(0, asked.num_windows * asked.window_tokens + 1, asked.window_tokens)
    *windows, calibration = (token_ids[start : start + asked.window_tokens] for start in starts)
    if len(calibration) < asked.window_tokens:
        raise SystemExit(f"{asked.text}: {len(token_ids):,} tokens are too few for {asked.num_windows} windows and one")
    full = open_engine(asked.model, FULL, asked)
    shape = full.description.num_layers, full.description.num_kv_heads, full.description.head_dim
    print(f"{utc_now()}; {machine_facts()}; {asked.model.name}\n")
    print("| KV mode | KiB per token | fit | mean KL | p99 KL | top-1 |\n|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        for kv_dtype in asked.kv_dtypes:
            is_static = KV_MODES[kv_dtype].needs_scales
            folder = with_scales(asked.model, calibration, Path(scratch)) if is_static else asked.model
            engine = full if kv_dtype == FULL else open_engine(folder, kv_dtype, asked)
            judged = [] if kv_dtype == FULL else windows
            positions = [compare_window(full, engine, window, kv_dtype) for window in judged]
            print(row(kv_dtype, positions, asked, shape), flush=True)


if __name__ == "__main__":
    main()
