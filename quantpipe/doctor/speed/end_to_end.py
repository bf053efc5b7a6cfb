"""Tokens per second of whole engines over random weights, beside transformers and beside the bare matrix products."""

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch

from quantpipe.backends.triton.executor import TritonExecutor
from quantpipe.doctor.record import Row
from quantpipe.doctor.speed.decode_step import KV_DTYPES, SCHEMES
from quantpipe.doctor.speed.random_model import Config, needed_bytes, random_model
from quantpipe.doctor.speed.timer import GpuTimer
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.sampling_params import SamplingParams

BATCHES = (1, 32)
PROMPT_LEN, NUM_NEW = 128, 64
BLOCK_SIZE = 16
DTYPE = torch.bfloat16


def end_to_end_rows(
    device: torch.device, config: Config, batches: tuple[int, ...] = BATCHES, dtype: torch.dtype = DTYPE
) -> Iterator[Row]:
    """Decoding alone: the time of ``NUM_NEW`` + 1 tokens less that of 1. Whatever does not fit says so."""
    for name, scheme in SCHEMES.items():
        if not _fits(device, needed_bytes(config, scheme).peak_bytes):
            yield {"what": f"quantpipe {name}", "found": "does not fit into the GPU's free memory"}
            continue
        executor = random_model(config, scheme, device, dtype)
        for kv_dtype in KV_DTYPES:
            yield from _engine_rows(f"quantpipe {name}", executor, kv_dtype, batches)
        del executor
        _give_back(device)
    if device.type == "cuda":
        yield from _product_rows(device, config, batches)
        yield from _transformers_rows(device, config, batches)


def _engine_rows(name: str, executor: TritonExecutor, kv_dtype: str, batches: tuple[int, ...]) -> Iterator[Row]:
    most, max_model_len = max(batches), PROMPT_LEN + NUM_NEW + BLOCK_SIZE
    settings = EngineConfig(
        backend="triton",
        max_num_seqs=most,
        max_num_batched_tokens=max(2048, most),
        max_model_len=max_model_len,
        num_kv_blocks=most * -(-max_model_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        prefix_cache=False,
    )
    engine = Engine(executor, settings, kv_dtype)
    vocab_size = executor.description.vocab_size
    prompts_ST = torch.randint(vocab_size, (most, PROMPT_LEN), generator=torch.Generator().manual_seed(0)).tolist()

    def generate(batch: int, num_new: int) -> None:
        engine.generate(prompts_ST[:batch], SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True))

    for batch in batches:
        generate(batch, 2)
        yield _row(name, kv_dtype, batch, partial(generate, batch))


def _row(name: str, kv_dtype: str, batch: int, generate: Callable[[int], None]) -> Row:
    """Of ``generate``, which takes the number of new tokens of each sequence and returns when they are there."""
    first_s, all_s = _seconds(lambda: generate(1)), _seconds(lambda: generate(NUM_NEW + 1))
    decode_s = max(all_s - first_s, 1e-9)
    return {
        "what": name,
        "kv": kv_dtype,
        "sequences": batch,
        "tokens/s": round(batch * NUM_NEW / decode_s, 1),
        "ms per step": round(decode_s / NUM_NEW * 1e3, 3),
        "prompts ms": round(first_s * 1e3, 1),
    }


def _product_rows(device: torch.device, config: Config, batches: tuple[int, ...]) -> Iterator[Row]:
    """What a step's matrix products alone take in bfloat16, by cuBLAS: no bfloat16 engine can be faster."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    qkv = hidden + 2 * config["num_key_value_heads"] * head_dim
    layer = [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    timer = GpuTimer(device)
    for batch in batches:
        step_s = 0.0
        for repeats, sizes in ((config["num_hidden_layers"], layer), (1, [(config["vocab_size"], hidden)])):
            for num_out, num_in in sizes:
                weight_NK = torch.randn(num_out, num_in, dtype=DTYPE, device=device)
                x_TK = torch.randn(batch, num_in, dtype=DTYPE, device=device)
                step_s += repeats * timer.seconds(partial(torch.matmul, x_TK, weight_NK.T))
        yield {
            "what": "torch.matmul of all linears, bf16",
            "sequences": batch,
            "tokens/s": round(batch / step_s, 1),
            "ms per step": round(step_s * 1e3, 3),
        }


def _transformers_rows(device: torch.device, config: Config, batches: tuple[int, ...]) -> Iterator[Row]:
    if find_spec("transformers") is None:
        yield {"what": "transformers generate, bf16", "found": "transformers is not installed"}
        return
    if not _fits(device, needed_bytes(config, None).held_bytes):
        yield {"what": "transformers generate, bf16", "found": "does not fit into the GPU's free memory"}
        return
    from transformers import AutoModelForCausalLM, LlamaConfig

    settings = {name: value for name, value in config.items() if name not in ("model_type", "rope_theta")}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**settings), dtype=DTYPE).eval()
    prompts_ST = torch.randint(config["vocab_size"], (max(batches), PROMPT_LEN), device=device)

    def generate(batch: int, num_new: int) -> None:
        ids_ST = prompts_ST[:batch]
        with torch.no_grad():
            model.generate(
                ids_ST,
                attention_mask=torch.ones_like(ids_ST),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )
        torch.cuda.synchronize(device)

    for batch in batches:
        generate(batch, 2)
        yield _row("transformers generate, bf16", "auto", batch, partial(generate, batch))


def _fits(device: torch.device, num_bytes: int) -> bool:
    """With some room left for keys, values and activations."""
    return device.type != "cuda" or 1.1 * num_bytes + (2 << 30) < torch.cuda.mem_get_info(device)[0]


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _seconds(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
