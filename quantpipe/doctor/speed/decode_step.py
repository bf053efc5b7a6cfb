"""Whole decode steps: recorded ones give the tokens of those that are launched kernel by kernel, and how much faster.

Shapes: S sequences, T tokens, B KV blocks of a table, V vocabulary.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quantpipe.backends.protocol import BatchInput, DecodeLimits
from quantpipe.backends.triton.executor import TritonExecutor
from quantpipe.doctor.record import Row
from quantpipe.doctor.speed.random_model import Config, random_model
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8

SCHEMES: dict[str, WeightScheme | None] = {"bf16": None, "w4a16 g128": w4a16(128), "w8a8": w8a8()}
KV_DTYPES = ("auto", "int8_per_token_head")
BLOCK_SIZE, PROMPT_LEN, NUM_STEPS = 16, 33, 8
# A size of the ladder, where both ways run the same kernels over the same shapes, and one that is filled up.
EXACT, FILLED = 4, 3
# Logits of a step that was filled up: products of other shapes are summed in another order, of what is in bfloat16.
FILLED_BOUND = 0.05
_NUM_TIMED = 5


def step_rows(device: torch.device, config: Config, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """For each scheme and cache mode: whether tokens are equal, and milliseconds of a step in both ways."""
    for name, scheme in SCHEMES.items():
        executor = random_model(config, scheme, device, dtype)
        for kv_dtype in KV_DTYPES:
            row: Row = {"weights": name, "kv": kv_dtype}
            yield row | compare(executor, kv_dtype)


def compare(executor: TritonExecutor, kv_dtype: str) -> Row:
    """The same steps over two caches, one of them replayed. Tables are equally wide, so splits are the same."""
    num_blocks = -(-(PROMPT_LEN + 2 * NUM_STEPS) // BLOCK_SIZE)
    own, recorded = (executor.allocate_kv_cache(EXACT * num_blocks, BLOCK_SIZE, kv_dtype) for _ in range(2))
    executor.record_decodes(recorded, DecodeLimits(EXACT, num_blocks))
    vocab_size = executor.description.vocab_size
    draws = torch.Generator().manual_seed(0)
    prompts_ST = torch.randint(vocab_size, (EXACT, PROMPT_LEN), generator=draws)
    table_SB = torch.randperm(EXACT * num_blocks, generator=draws).view(EXACT, num_blocks)
    chunk = batch_of(prompts_ST, 0, table_SB)
    token_ids_S = executor.forward_greedy(chunk, own).cpu()
    executor.forward_greedy(chunk, recorded)
    num_equal, filled_error = 0, 0.0
    for step in range(NUM_STEPS):
        batch = batch_of(token_ids_S.unsqueeze(1), PROMPT_LEN + step, table_SB)
        token_ids_S = executor.forward_greedy(batch, own).cpu()
        num_equal += int((executor.forward_greedy(batch, recorded).cpu() == token_ids_S).sum())
    last = batch_of(token_ids_S[:FILLED].unsqueeze(1), PROMPT_LEN + NUM_STEPS, table_SB[:FILLED])
    logits_SV, replayed_SV = executor.forward(last, own), executor.forward(last, recorded)
    filled_error = float((replayed_SV - logits_SV).abs().max() / logits_SV.abs().max())
    batch = batch_of(token_ids_S.unsqueeze(1), PROMPT_LEN + NUM_STEPS, table_SB)
    return {
        "equal tokens": f"{num_equal} of {NUM_STEPS * EXACT}",
        "filled up: error of logits": filled_error,
        "ok": num_equal == NUM_STEPS * EXACT and filled_error <= FILLED_BOUND,
        "launched ms": _step_ms(lambda: executor.forward_greedy(batch, own)),
        "replayed ms": _step_ms(lambda: executor.forward_greedy(batch, recorded)),
    }


def batch_of(token_ids_ST: Tensor, start: int, table_SB: Tensor) -> BatchInput:
    """Each sequence reads its tokens from position ``start`` on; the logits of each last one are wanted."""
    num_seqs, query_len = token_ids_ST.shape
    positions_ST = (start + torch.arange(query_len)).repeat(num_seqs, 1)
    slots_ST = table_SB.gather(1, positions_ST // BLOCK_SIZE) * BLOCK_SIZE + positions_ST % BLOCK_SIZE
    return BatchInput(
        token_ids_T=token_ids_ST.flatten(),
        positions_T=positions_ST.flatten(),
        slot_mapping_T=slots_ST.flatten(),
        query_lens=(query_len,) * num_seqs,
        context_lens=(start + query_len,) * num_seqs,
        block_table_SB=table_SB,
        logit_rows_R=torch.arange(1, num_seqs + 1) * query_len - 1,
    )


def _step_ms(step: Callable[[], Tensor]) -> float:
    """Until the tokens are on the host, as an engine waits for them; the median."""
    times = []
    for _ in range(_NUM_TIMED):
        started_s = time.perf_counter()
        step().tolist()
        times.append(time.perf_counter() - started_s)
    return round(statistics.median(times) * 1e3, 3)
